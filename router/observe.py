"""The Prometheus of `headwater up --observe`: where it is found, what it is told, and when it is ready.

It listens on loopback, scrapes what the router's page lists, and evaluates the rules of deploy/prometheus.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
from pathlib import Path
from typing import Any

import aiohttp

from headwater.errors import InvalidConfig
from headwater.security import Credentials, credentials
from router.supervisor import Supervisor

# Of the process among those of the cluster.
NAME = "prometheus"
_HOST = "127.0.0.1"
# Where people look for a Prometheus.
_USUAL_PORT = 9090
# Nothing tells when it is ready, so it is asked again and again.
_PAUSE_SECONDS = 0.1
_CONFIG = "prometheus.yml"
# Between two looks. Prometheus forgets what it has not looked at for 5 minutes, and a rate takes two looks.
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.1, 120.0


class Prometheus:
    """One that is to be started.

    Args:
        folder: made when missing; takes its configuration and data.
        scrape_seconds: between two looks at each process.

    Raises:
        InvalidConfig: the program is not there, or the interval is not one.
    """

    def __init__(self, folder: Path, scrape_seconds: float) -> None:
        if not _SHORTEST_SECONDS <= scrape_seconds <= _LONGEST_SECONDS:
            raise InvalidConfig(
                f"--scrape-interval is {scrape_seconds:g}; it takes {_SHORTEST_SECONDS:g} to "
                f"{_LONGEST_SECONDS:g} seconds."
            )
        program = shutil.which("prometheus")
        if program is None:
            raise InvalidConfig(
                "--observe: there is no program `prometheus` on PATH. Debian and Ubuntu have it in the package "
                "prometheus (which also starts a service of its own: `systemctl disable --now prometheus`); for "
                "others it is at https://prometheus.io/download. Or leave --observe, and let a Prometheus that you "
                "have scrape the cluster (README, Watching)."
            )
        self._program = program
        self._folder = folder
        self._scrape_seconds = scrape_seconds

    async def run(self, supervisor: Supervisor, page: str, deadline_seconds: float) -> str:
        """Starts it beside a cluster that serves. It ends with the cluster.

        Args:
            page: URL of the cluster's router; ends in "/".

        Returns:
            URL where it answers queries.

        Raises:
            PeerUnavailable: it, or a process of the cluster, ended; the message has the last lines of its log.
            DeadlinePassed: it does not answer yet.
        """
        address = f"{_HOST}:{_free_port()}"
        self._folder.mkdir(parents=True, exist_ok=True)
        told = configuration(page, self._scrape_seconds, credentials())
        # JSON is YAML.
        (self._folder / _CONFIG).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        command = (
            self._program,
            f"--config.file={self._folder / _CONFIG}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address={address}",
            "--log.level=warn",
        )
        await supervisor.add(NAME, command, lambda: _until_ready(address), deadline_seconds)
        return f"http://{address}"


async def _until_ready(address: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://{address}/-/ready") as answer:
                    if answer.ok:
                        return
            await asyncio.sleep(_PAUSE_SECONDS)


def configuration(page: str, scrape_seconds: float, own: Credentials) -> dict[str, Any]:
    """What deploy/prometheus/prometheus.yml says, for the cluster whose page and credentials are given."""
    interval = f"{round(scrape_seconds * 1000)}ms"
    files = {"ca_file": own.ca, "cert_file": own.cert, "key_file": own.key}
    # What is relative would be so to its folder.
    absolute = {name: str(Path(file).resolve()) for name, file in files.items() if file}
    tls = {"tls_config": absolute} if own.ca else {}
    discovery = {"url": f"{page}sd", "refresh_interval": interval, **tls}
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(rules_folder() / "*.yml")],
        "scrape_configs": [{"job_name": "headwater", "honor_labels": True, "http_sd_configs": [discovery], **tls}],
    }


def rules_folder() -> Path:
    """Where the rules are: in deploy/ of a checkout, or beside this module, where a wheel has them."""
    here = Path(__file__).parent
    checkout = here.parent / "deploy" / "prometheus" / "rules"
    return checkout if checkout.is_dir() else here / "rules"


def _free_port() -> int:
    with socket.socket() as usual:
        usual.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            usual.bind((_HOST, _USUAL_PORT))
            return _USUAL_PORT
    with socket.socket() as some:
        some.bind((_HOST, 0))
        return int(some.getsockname()[1])
