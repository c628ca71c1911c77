#!/usr/bin/env bash
# Sets this checkout up and runs the main job: a long prompt through a router, a pipelined prefill group and a
# separate decode node, all on this machine.
#
#   bash deploy/quickstart.sh [--pp N] [--tp N] [--chunk N] [--prompt-file F] [--max-tokens N] [--keep]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model=$(bash "$here/deploy/setup.sh")
# exec: Ctrl-C and SIGTERM reach the program that has to clean up.
exec "$here/.venv/bin/python" "$here/deploy/quickstart.py" --model "$model" "$@"
