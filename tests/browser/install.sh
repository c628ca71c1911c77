#!/usr/bin/env bash
# Sees to it that Debian's chromium and its driver are here, and prints where: two lines. Installs them where it may; else
# says why not and exits with 2.
set -euo pipefail

PACKAGES=(chromium chromium-driver fonts-dejavu-core)

cannot() {
    printf 'browser: %s\n' "$@" >&2
    exit 2
}

if ! command -v chromium chromedriver >/dev/null || [[ $(command -v chromium chromedriver | wc -l) -ne 2 ]]; then
    command -v apt-get >/dev/null || cannot "chromium and chromedriver are missing, and there is no apt-get here."
    [[ $EUID -eq 0 ]] || cannot "packages are missing: sudo apt-get install -y --no-install-recommends ${PACKAGES[*]}"
    {
        timeout 120 apt-get -qq update || cannot "apt-get update failed; its messages are above."
        DEBIAN_FRONTEND=noninteractive timeout 600 apt-get -qq install -y --no-install-recommends "${PACKAGES[@]}" ||
            cannot "apt-get install ${PACKAGES[*]} failed; its messages are above."
    } >&2
fi
command -v chromium chromedriver
