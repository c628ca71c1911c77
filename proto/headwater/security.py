"""Who may listen and who may ask: TLS for every channel of this process, and the token of the public API.

A process has one set of credentials: from the cluster file that it reads (`use`), or from its environment, which is how
workers and clients get theirs:

    HEADWATER_TLS_CA, HEADWATER_TLS_CERT, HEADWATER_TLS_KEY   PEM files; the last two where a certificate is asked for
    HEADWATER_TLS_MUTUAL                                      "1": this process's servers ask for one
    HEADWATER_TOKEN_FILE                                      file with the token of the public API
    HEADWATER_ALLOW_PLAIN_TEXT                                "1": plain text on other addresses than loopback

Without a certificate everything is plain text, which is only allowed on loopback unless asked for. What Mooncake writes
(KV) is not encrypted.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import os
import ssl
from pathlib import Path

import grpc

from headwater.cluster import Security
from headwater.errors import InvalidConfig
from headwater.lifecycle import get_logger

log = get_logger(__name__)

_PREFIX = "HEADWATER_"


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Of this process. Files are read when they are needed first."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    mutual: bool = False
    token_file: str = ""
    allow_plain_text: bool = False

    def environment(self) -> dict[str, str]:
        """For processes that this one starts."""
        values = {
            "TLS_CA": self.ca,
            "TLS_CERT": self.cert,
            "TLS_KEY": self.key,
            "TLS_MUTUAL": "1" if self.mutual else "",
            "TOKEN_FILE": self.token_file,
            "ALLOW_PLAIN_TEXT": "1" if self.allow_plain_text else "",
        }
        return {_PREFIX + name: value for name, value in values.items() if value}

    @property
    def token(self) -> str:
        """Of the public API; empty: none is asked for.

        Raises:
            InvalidConfig: the file cannot be read, or is empty.
        """
        if not self.token_file:
            return ""
        token = _read(self.token_file, "token_file").decode("ascii", errors="replace").strip()
        if not token:
            raise InvalidConfig(f"token_file {self.token_file} is empty.")
        return token

    @functools.cached_property
    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """To ask with; None: in plain text. Kept, because every delivery opens a channel."""
        if not self.ca:
            return None
        pair = (_read(self.key, "tls_key"), _read(self.cert, "tls_cert")) if self.cert else (None, None)
        return grpc.ssl_channel_credentials(_read(self.ca, "tls_ca"), *pair)

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """To listen with; None: in plain text."""
        if not self.cert:
            return None
        pair = (_read(self.key, "tls_key"), _read(self.cert, "tls_cert"))
        ca = _read(self.ca, "tls_ca") if self.mutual else None
        return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=self.mutual)

    def context(self, *, server: bool) -> ssl.SSLContext | None:
        """The same for connections that are not gRPC's."""
        if not (self.cert if server else self.ca):
            return None
        try:
            purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
            context = ssl.create_default_context(purpose, cafile=self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(f"the TLS files of [security] cannot be used: {error}.") from error
        if server and self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def check_listening(self, address: str) -> None:
        """Raises InvalidConfig when plain text may not be spoken on "host:port"."""
        if self.cert or is_loopback(address.rpartition(":")[0]):
            return
        if not self.allow_plain_text:
            raise InvalidConfig(
                f"{address} is no loopback address, and there is no certificate: set tls_ca, tls_cert and tls_key in "
                "[security], or allow_plain_text = true when the network is trusted."
            )
        log.warning("listening in plain text on an address that others can reach", address=address)


def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, IPv6 with or without brackets) is this host for itself only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def of_environment() -> Credentials:
    """What this process was started with."""
    get = {name: os.environ.get(_PREFIX + name, "") for name in ("TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN_FILE")}
    return Credentials(
        ca=get["TLS_CA"],
        cert=get["TLS_CERT"],
        key=get["TLS_KEY"],
        mutual=os.environ.get(_PREFIX + "TLS_MUTUAL") == "1",
        token_file=get["TOKEN_FILE"],
        allow_plain_text=os.environ.get(_PREFIX + "ALLOW_PLAIN_TEXT") == "1",
    )


_current: Credentials | None = None


def credentials() -> Credentials:
    """Those of this process."""
    global _current  # noqa: PLW0603 - one for the process, as its environment is
    if _current is None:
        _current = of_environment()
    return _current


def use(section: Security | Credentials) -> None:
    """Replaces them: by those of a cluster file's [security]."""
    global _current  # noqa: PLW0603
    if isinstance(section, Credentials):
        _current = section
        return
    _current = Credentials(
        ca=section.tls_ca,
        cert=section.tls_cert,
        key=section.tls_key,
        mutual=section.mutual and bool(section.tls_cert),
        token_file=section.token_file,
        allow_plain_text=section.allow_plain_text,
    )


def _read(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidConfig(f"{key} {path or '(not given)'} cannot be read: {error.strerror}.") from error
