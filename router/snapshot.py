"""What the router knows of its groups at one moment: plain data for the pairing policies to read."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from headwater.v1 import decode_pb2, prefill_pb2
from router.breaker import BreakerState

_Description = TypeVar("_Description", bound=prefill_pb2.DescribePrefillResponse | decode_pb2.DescribeDecodeResponse)


class State(enum.StrEnum):
    """Whether a group can be given work."""

    SERVING = "serving"
    DRAINING = "draining"
    NOT_SERVING = "not_serving"
    UNREACHABLE = "unreachable"


@dataclasses.dataclass(frozen=True)
class Group(Generic[_Description]):
    """One group as last heard of."""

    name: str
    address: str
    state: State
    # Why it does not serve; empty when it does.
    detail: str
    # The last answer, kept while the group is unreachable; None until it has answered once. Never modified.
    description: _Description | None
    # Tokens of each request that this router has sent and that still is the group's to do: prompts, without what is
    # cached of them, until their first token is sampled; prompts and answers until the decode leg ends.
    sent: tuple[int, ...] = ()
    # Of those, the ones that the description cannot count yet.
    sent_since: tuple[int, ...] = ()
    # Of this router's breaker for it, and whether that lets a request through.
    breaker: BreakerState = BreakerState.CLOSED
    admits: bool = True
    # When the description was asked for, in seconds of the registry's clock.
    described_at: float = 0.0
    # Of the prompt that the snapshot is for: how much of its beginning need not be computed there (`router.prefixes`).
    cached_tokens: int = 0

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"

    @property
    def serving(self) -> bool:
        return self.state is State.SERVING


PrefillGroup: TypeAlias = Group[prefill_pb2.DescribePrefillResponse]
DecodeGroup: TypeAlias = Group[decode_pb2.DescribeDecodeResponse]


class Loss(NamedTuple):
    """Which incarnation of a group failed a request, and when, in seconds of the monotonic clock."""

    epoch: str
    at: float


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """All groups of the cluster file, in its order."""

    prefill: tuple[PrefillGroup, ...]
    decode: tuple[DecodeGroup, ...]
    # Of the tokenizer that the router uses.
    tokenizer_fingerprint: str

    @property
    def groups(self) -> tuple[PrefillGroup | DecodeGroup, ...]:
        """Of both roles."""
        return (*self.prefill, *self.decode)

    def without(self, names: Collection[str]) -> Snapshot:
        """The other groups. With no names, all."""
        if not names:
            return self
        return dataclasses.replace(
            self,
            prefill=tuple(group for group in self.prefill if group.name not in names),
            decode=tuple(group for group in self.decode if group.name not in names),
        )
