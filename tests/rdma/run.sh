#!/usr/bin/env bash
# KV transfers over real RDMA verbs without an RDMA adapter: boots a Debian kernel under QEMU (software emulation, one
# CPU, no network), loads Soft-RoCE (rdma_rxe) and runs tests/rdma/guest.py in it.
#
#   bash tests/rdma/run.sh [smoke|full|SCENARIO…]
#
# Ends with PASS (exit status 0), FAIL (1), or says why this machine cannot do it (2).
#
# Nothing is installed: packages are unpacked once, into $HEADWATER_CACHE/soft-roce (by default ~/.cache/headwater/…).
# The guest sees this checkout with its .venv, /usr and the Python installation, all read-only.
#
# RDMA_SHIM=0          leaves the endless retries that rdma_rxe makes of Mooncake's retry count (see guest/shim.c)
# RDMA_ENV="A=1 B=2"   variables for the guest, such as GLOG_minloglevel=0 MC_LOG_LEVEL=INFO
# RDMA_LIMIT=SECONDS   after which QEMU is killed
set -eEuo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
HERE=$ROOT/tests/rdma
CACHE=${HEADWATER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/headwater}/soft-roce
SHIM=${RDMA_SHIM:-1}
MEMORY_MB=1536
# What the guest needs beside the modules themselves, in /lib/modules/VERSION/kernel.
MODULE_FOLDERS=(arch crypto drivers/infiniband drivers/net drivers/virtio fs/9p fs/fscache fs/netfs lib net)
MODULES=(virtio_pci 9pnet_virtio 9p veth ib_uverbs crc32_pclmul rdma_rxe sch_netem)

say() { printf 'rdma +%ds: %s\n' "$SECONDS" "$*"; }

cannot() {
    printf 'rdma: %s\n' "$@" >&2
    exit 2
}

has_library() {
    local known
    known=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p) || return 1
    [[ $known == *"$1 "* ]]
}

check_host() {
    [[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] || cannot "this runs on Linux on x86-64 only."
    command -v apt-get >/dev/null && command -v dpkg >/dev/null ||
        cannot "this takes QEMU and a kernel from Debian packages, and there is no apt-get here."
    "$ROOT/.venv/bin/python" -c 'import mooncake.engine' 2>/dev/null ||
        cannot "$ROOT/.venv is missing or cannot import Mooncake: run \`bash deploy/setup.sh --dev\`."
    local -a missing=()
    has_library libibverbs.so.1 || missing+=(libibverbs1)
    has_library librdmacm.so.1 || missing+=(librdmacm1)
    has_library libnuma.so.1 || missing+=(libnuma1)
    [[ -e /etc/libibverbs.d/rxe.driver ]] || missing+=(ibverbs-providers)
    local program
    for program in rdma ip tc; do
        [[ -x /usr/sbin/$program || -x /usr/bin/$program ]] || { missing+=(iproute2) && break; }
    done
    if [[ $SHIM == 1 ]]; then
        command -v gcc >/dev/null || missing+=(gcc)
    fi
    ((${#missing[@]} == 0)) || cannot "packages are missing: apt-get install -y ${missing[*]}"
}

apt_version() { apt-cache depends linux-image-amd64 2>/dev/null | sed -n 's/.*Depends: linux-image-//p' | head -1; }

# Fills the folder $1: qemu and busybox (tools), the kernel, its modules (kernel), and its version (version).
unpack() {
    local into=$1 version needed
    version=$(apt_version)
    if [[ -z $version && $EUID -eq 0 ]]; then
        say "apt has no package lists; fetching them"
        timeout 120 apt-get -qq update || cannot "apt-get update failed; its messages are above."
        version=$(apt_version)
    fi
    [[ -n $version ]] || cannot "apt knows no linux-image-amd64: run \`apt-get update\` as root (Debian or a derivative)."
    # What is installed here is not among them, and the guest sees /usr.
    needed=$(apt-get install -s --no-install-recommends qemu-system-x86 2>/dev/null | awk '/^Inst/{print $2}')
    say "downloading packages"
    mkdir -p "$into"/{debs,tools,kernel}
    # shellcheck disable=SC2086  # several words
    (cd "$into/debs" && timeout 240 apt-get -qq -o APT::Sandbox::User=root download $needed qemu-system-x86 \
        "linux-image-$version" busybox-static kmod cpio libibverbs-dev) || cannot "apt-get download failed."
    say "unpacking packages"
    local deb
    for deb in "$into"/debs/*.deb; do
        case $deb in
            */linux-image-*)
                dpkg --fsys-tarfile "$deb" | tar -x -C "$into/kernel" --wildcards "./boot/vmlinuz-*" \
                    "./lib/modules/*/modules.*" "${MODULE_FOLDERS[@]/#/./lib/modules/$version/kernel/}"
                ;;
            *) dpkg -x "$deb" "$into/tools" ;;
        esac
    done
    rm -r "$into/debs"
    # One program under many names; the name decides what it does.
    ln -s kmod "$into/tools/bin/depmod"
    ln -s kmod "$into/tools/bin/modprobe"
    "$into/tools/bin/depmod" -b "$into/kernel" "$version"
    echo "$version" >"$into/version"
}

# Unpacks once, whoever else wants to at the same time. The recipe is part of what is cached.
fill_cache() {
    local recipe
    recipe=$({ declare -f unpack && echo "${MODULE_FOLDERS[@]}"; } | sha256sum | cut -d' ' -f1)
    mkdir -p "$CACHE" || cannot "cannot write to $CACHE: set HEADWATER_CACHE to another folder."
    exec 9<"$CACHE"
    flock 9
    if [[ $(cat "$CACHE/recipe" 2>/dev/null) != "$recipe" ]]; then
        rm -rf "${CACHE:?}"/*
        unpack "$CACHE/partial"
        mv "$CACHE"/partial/* "$CACHE"
        rmdir "$CACHE/partial"
        echo "$recipe" >"$CACHE/recipe"
    fi
    flock -u 9
}

# The guest's first root: busybox, modules in the order of loading, /init, and what it is to do.
make_initrd() {
    local folder=$1 version module path
    version=$(<"$CACHE/version")
    mkdir -p "$folder"/{bin,mods,proc,sys,dev,new}
    cp "$CACHE/tools/bin/busybox" "$folder/bin"
    install -m 755 "$HERE/guest/init" "$folder/init"
    if [[ $SHIM == 1 ]]; then
        gcc -O1 -shared -fPIC -I "$CACHE/tools/usr/include" -o "$folder/shim.so" "$HERE/guest/shim.c" -ldl
    fi
    for module in "${MODULES[@]}"; do
        # Prints "insmod PATH" for each module that it rests on, and itself.
        "$CACHE/tools/bin/modprobe" -d "$CACHE/kernel" -S "$version" --show-depends "$module" 2>/dev/null |
            awk '$1 == "insmod" {print $2}'
    done | awk '!seen[$0]++' | while read -r path; do
        cp "$path" "$folder/mods"
        basename "$path"
    done >"$folder/mods/order"
    printf '%s=%q\n' ROOT "$ROOT" PYTHON_HOME "$PYTHON_HOME" SUITE "$SUITE" GUEST_ENV "${RDMA_ENV:-}" >"$folder/config"
    (cd "$folder" && find . | "$CACHE/tools/bin/cpio" -o -H newc --quiet | gzip -1)
}

# Options that show a folder of this machine to the guest.
share() { echo "-fsdev local,id=$1,path=$2,security_model=none,readonly=on -device virtio-9p-pci,fsdev=$1,mount_tag=$1"; }

boot() {
    local version
    version=$(<"$CACHE/version")
    # shellcheck disable=SC2046  # several words each
    LD_LIBRARY_PATH=$CACHE/tools/usr/lib/x86_64-linux-gnu:$CACHE/tools/lib/x86_64-linux-gnu \
        timeout --kill-after=5 "$LIMIT" "$CACHE/tools/usr/bin/qemu-system-x86_64" \
        -L "$CACHE/tools/usr/share/qemu" -L "$CACHE/tools/usr/share/seabios" \
        -accel tcg,thread=multi -M pc -cpu max -smp 1 -m "$MEMORY_MB" \
        -nodefaults -no-user-config -nic none -display none -no-reboot -serial "file:$WORK/console.log" \
        -kernel "$CACHE/kernel/boot/vmlinuz-$version" -initrd "$WORK/initrd.gz" \
        -append "console=ttyS0 quiet loglevel=4 mitigations=off nokaslr no5lvl panic=-1 rdinit=/init" \
        $(share usr /usr) $(share python "$PYTHON_HOME") $(share root "$ROOT") $(share verbs /etc/libibverbs.d) &
    QEMU=$!
    wait "$QEMU" || QEMU_STATUS=$?
    QEMU=
}

clean_up() {
    # `timeout` passes it on to QEMU.
    if [[ -n ${QEMU:-} ]]; then
        kill "$QEMU" 2>/dev/null && wait "$QEMU" || true
    fi
    if [[ -n ${WORK:-} ]]; then rm -rf "$WORK"; fi
}

main() {
    SUITE=${*:-smoke}
    case $SUITE in
        smoke) LIMIT=${RDMA_LIMIT:-480} ;;
        *) LIMIT=${RDMA_LIMIT:-1200} ;;
    esac
    trap 'cannot "setting up failed in line $LINENO of run.sh; messages are above."' ERR
    check_host
    fill_cache
    PYTHON_HOME=$("$ROOT/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')
    WORK=$(mktemp -d)
    trap clean_up EXIT
    trap 'exit 130' INT TERM
    make_initrd "$WORK/initrd" >"$WORK/initrd.gz"
    say "booting Linux $(<"$CACHE/version") for $SUITE"
    QEMU_STATUS=0
    : >"$WORK/console.log"
    boot
    trap - ERR
    cat "$WORK/console.log"
    say "the guest has ended"
    if [[ $QEMU_STATUS == 124 || $QEMU_STATUS == 137 ]]; then
        echo "FAIL: not done within $LIMIT s"
        exit 1
    fi
    [[ -s $WORK/console.log ]] || cannot "QEMU does not start here (exit status $QEMU_STATUS); its messages are above."
    # The serial line ends lines with CR LF.
    if grep -q '^guest: all passed' "$WORK/console.log"; then
        echo PASS
    else
        echo FAIL
        exit 1
    fi
}

main "$@"
