"""The exception tree, and how each exception crosses gRPC.

    HeadwaterError
    ├── LocalError             the caller, the operator or the configuration is at fault
    │   ├── InvalidRequest         INVALID_ARGUMENT      this request can never work
    │   ├── InvalidConfig          FAILED_PRECONDITION   the cluster file or a flag is wrong
    │   ├── ModelFolderError       FAILED_PRECONDITION   the model folder cannot be used
    │   ├── UnsupportedModel       FAILED_PRECONDITION   the architecture cannot be split or paged
    │   ├── Unauthenticated        UNAUTHENTICATED       the public API's token is missing or wrong
    │   ├── DuplicateTransfer      ALREADY_EXISTS        the transfer id is in use
    │   └── IllegalEvent           INTERNAL              a state machine was given an event it does not allow
    ├── CapacityError          RESOURCE_EXHAUSTED    no room now; the same request may work later
    ├── RequestCancelled       CANCELLED             somebody else ended the request
    └── PeerError              another process is at fault, or gone
        ├── PeerUnavailable        UNAVAILABLE           not reachable, not serving, or lost
        ├── GeometryMismatch       FAILED_PRECONDITION   the two groups cannot exchange KV
        ├── StalePeer              FAILED_PRECONDITION   an id, attempt, epoch or token of another incarnation
        ├── TransferFailed         ABORTED               KV did not arrive whole; nothing was read
        └── DeadlinePassed         DEADLINE_EXCEEDED     a configured deadline ended a wait

A message says what happened, to whom, and what to do. The class name travels in the trailing metadata,
so that `from_rpc_error` gives back the same class on the other side.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import grpc

ERROR_CLASS_KEY = "headwater-error"
# gRPC's own: clients with a retry policy wait as long as it says.
RETRY_AFTER_KEY = "grpc-retry-pushback-ms"


class HeadwaterError(Exception):
    """Base of everything Headwater raises on purpose."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL


class LocalError(HeadwaterError):
    """The caller, the operator or the configuration is at fault."""


class InvalidRequest(LocalError):
    """This request can never work as it is."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class InvalidConfig(LocalError):
    """The cluster file or a flag is wrong."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ModelFolderError(LocalError):
    """The model folder is missing, incomplete or damaged."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class UnsupportedModel(LocalError):
    """The architecture cannot be split into stages, sharded or paged."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Unauthenticated(LocalError):
    """The token of the public API is missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class DuplicateTransfer(LocalError):
    """The transfer id is already in use."""

    code = grpc.StatusCode.ALREADY_EXISTS


class IllegalEvent(LocalError):
    """A state machine was given an event that its table does not allow; nothing changed."""


class CapacityError(HeadwaterError):
    """No room now; the same request may work later: after `retry_after_seconds`, about."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_after_seconds = 1.0


class RequestCancelled(HeadwaterError):
    """Somebody else ended the request."""

    code = grpc.StatusCode.CANCELLED


class PeerError(HeadwaterError):
    """Another process is at fault, or gone."""


class PeerUnavailable(PeerError):
    """The peer cannot be reached, does not serve, or was lost."""

    code = grpc.StatusCode.UNAVAILABLE


class GeometryMismatch(PeerError):
    """Two groups hold different models, or KV that cannot be converted."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class StalePeer(PeerError):
    """A message named a transfer, attempt, epoch or token that is not the current one."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class TransferFailed(PeerError):
    """The KV of a transfer did not arrive whole and verified."""

    code = grpc.StatusCode.ABORTED


class DeadlinePassed(PeerError):
    """A configured deadline ended a wait."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


def _tree(root: type[HeadwaterError]) -> dict[str, type[HeadwaterError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_CLASSES = _tree(HeadwaterError)


# Of the classes that are raised, which are the leaves of the tree.
ERROR_NAMES = tuple(name for name, found in _CLASSES.items() if not found.__subclasses__())


def error_class(name: str) -> type[HeadwaterError]:
    """The class that another process named; `PeerUnavailable` for a name that is not in the tree."""
    return _CLASSES.get(name, PeerUnavailable)


_BY_CODE: dict[grpc.StatusCode, type[HeadwaterError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: CapacityError,
    grpc.StatusCode.UNAVAILABLE: PeerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
    grpc.StatusCode.ABORTED: TransferFailed,
}


def from_rpc_error(error: grpc.RpcError, peer: str) -> HeadwaterError:
    """The exception that `peer` raised, or the nearest one when it failed without saying.

    Args:
        error: what a gRPC call raised.
        peer: name and address of the other side, put into the message of connection failures.
    """
    call = error if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    if call is None:
        return PeerUnavailable(f"{peer}: the call failed: {error}")
    return from_status(call.code(), call.details() or "", call.trailing_metadata(), peer)


def from_status(
    code: grpc.StatusCode, details: str, trailing: Iterable[tuple[str, str | bytes]] | None, peer: str
) -> HeadwaterError:
    """`from_rpc_error` for a call whose status was read from the call itself."""
    sent = {key: value for key, value in trailing or () if isinstance(value, str)}
    named = _CLASSES.get(sent.get(ERROR_CLASS_KEY, ""))
    error = named(details) if named else _BY_CODE.get(code, PeerUnavailable)(f"{peer}: {details or code.name}")
    if isinstance(error, CapacityError) and sent.get(RETRY_AFTER_KEY, "").isdigit():
        error.retry_after_seconds = int(sent[RETRY_AFTER_KEY]) / 1e3
    return error
