"""Prometheus and promtool for tests: from PATH, or from the Debian package, unpacked and not installed.

Installing the package would start a service.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_PROGRAMS = ("prometheus", "promtool")
_PACKAGE = "prometheus"
_DOWNLOAD_SECONDS = 240


def prometheus_folder() -> Path:
    """The folder that has both programs. Skips the test where they cannot be had, saying why."""
    found = [shutil.which(program) for program in _PROGRAMS]
    if found[0] and found[1]:
        return Path(found[0]).parent
    cache = os.environ.get("HEADWATER_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "headwater"
    unpacked = Path(cache).expanduser() / "prometheus"
    unpacked.parent.mkdir(parents=True, exist_ok=True)
    with (unpacked.parent / "prometheus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unpacked.exists():
            _unpack(unpacked)
    return unpacked / "usr" / "bin"


def _unpack(into: Path) -> None:
    missing = [program for program in ("apt-get", "dpkg-deb") if not shutil.which(program)]
    if missing:
        pytest.skip(f"prometheus and promtool are not on PATH, and there is no {missing[0]} here to get them with")
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        if not _download(folder):
            # Package lists may be missing, or old.
            subprocess.run(["apt-get", "-qq", "update"], check=False, timeout=_DOWNLOAD_SECONDS)
            if not _download(folder):
                pytest.skip("apt-get cannot download the package prometheus; its messages are above")
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, f"{folder}/root"], check=True)
        Path(folder, "root").rename(into)


def _download(folder: str) -> bool:
    command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", _PACKAGE]
    return subprocess.run(command, cwd=folder, check=False, timeout=_DOWNLOAD_SECONDS).returncode == 0
