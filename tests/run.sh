#!/usr/bin/env bash
# Sets this checkout up, then runs every check and all tests. Arguments go to pytest:
#
#   bash tests/run.sh [-k NAME …]
#
# Everything runs even when something has failed; the summary and the exit status say what.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

model=$(bash deploy/setup.sh --dev) || exit 1
export PATH="$PWD/.venv/bin:$PATH"
export HEADWATER_MODEL="$model"
# One compute thread a process, asleep while it waits: several ranks share these cores.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
# Models come from folders, never from a hub.
export HF_HUB_OFFLINE=1

failed=()
check() {
    local name=$1
    shift
    printf '\n== %s\n' "$name"
    "$@" || failed+=("$name")
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "mypy" mypy
check "import-linter" lint-imports
check "buf lint" buf lint proto
# A file a process.
check "tests" python -m pytest -n 2 --dist loadfile "$@"

if ((${#failed[@]})); then
    printf '\nFAILED:'
    printf ' [%s]' "${failed[@]}"
    printf '\n'
    exit 1
fi
printf '\nAll checks passed.\n'
