#!/usr/bin/env bash
# Regenerates the protobuf and gRPC stubs beside the .proto files.
#
#   bash deploy/gen-stubs.sh [OUT [PYTHON]]
#
# OUT is the folder to write to, by default proto/. PYTHON has the pinned generators, by default .venv/bin/python.
# The generators are pinned low (deploy/constraints-cpu.txt) so that the stubs import on every later runtime.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-proto}
python=${2:-.venv/bin/python}

# protoc finds the plug-ins of mypy-protobuf by name, next to the interpreter.
PATH="$(dirname "$python"):$PATH" "$python" -m grpc_tools.protoc --proto_path=proto \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="$out" --mypy_grpc_out="$out" \
    proto/headwater/v1/*.proto

# A file without a service gets an empty module; nobody needs it.
for proto in proto/headwater/v1/*.proto; do
    name=$(basename "$proto" .proto)
    if ! grep -q '^service ' "$proto"; then rm -f "$out/headwater/v1/${name}_pb2_grpc."{py,pyi}; fi
done
