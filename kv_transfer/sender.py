"""The sending side of transfers, on one rank of a prefill group.

Chunks are sent as they are computed: each is cut into boxes that fit a slot, packed into a registered segment,
written into the decode rank's landing slot, and reported with its digest only when the write has returned; or
written page to page where the grant and the layouts allow it. A transfer goes to every rank of the decode group
that wants some of this rank's layers and heads.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from headwater.errors import HeadwaterError
from headwater.lifecycle import get_logger
from headwater.v1 import common_pb2
from kv_transfer import memory
from kv_transfer.delivery import Delivered, Delivery
from kv_transfer.geometry import Box, PagedLayout, PageTable, Span
from kv_transfer.planner import DIRECT_MIN_BYTES, own_part, plan
from kv_transfer.slots import SlotArena
from kv_transfer.writer import Writer

log = get_logger(__name__)

# One packed box at most. TCP runs at full speed from about 1 MiB; what asks for more is the Python work of a box, 3 ms
# of processor time of both sides together, whatever its size (benchmarks/transfer.py, with its cores busy).
SEGMENT_BYTES = 16 * 1024 * 1024


class Source(Protocol):
    """Where a rank keeps its KV."""

    @property
    def layout(self) -> PagedLayout:
        """The shape of it."""

    @property
    def address(self) -> int | None:
        """Of the layout's first byte, where the engine may read it in place (registered, for RDMA); else None."""

    def pack(self, pages: PageTable, box: Box, address: int) -> None:
        """Puts the packed `box` (form: `kv_transfer.planner`) at `address`. Called from worker threads."""


@dataclasses.dataclass(frozen=True)
class PagedSource:
    """Host memory in the form of a `PagedLayout`."""

    layout: PagedLayout
    address: int

    def pack(self, pages: PageTable, box: Box, address: int) -> None:
        memory.pack(plan(self.layout, pages, box).copies(), self.address, address)


@dataclasses.dataclass(frozen=True)
class WriterRank:
    """Which rank of its group a sender is.

    Attributes:
        epoch: of the group.
        replica, num_replicas: among the ranks with the same layers and heads; each sends its part of them.
        samples: whether this rank knows the first token.
    """

    rank: int
    epoch: str
    replica: int = 0
    num_replicas: int = 1
    samples: bool = True


class Outgoing:
    """One rank's share of one transfer. All methods belong to the sender's event loop."""

    def __init__(self, on_failure: Callable[[HeadwaterError], None]) -> None:
        self._deliveries: list[Delivery] = []
        self._on_failure = on_failure
        self._over = False
        self._closing = asyncio.Event()
        self._tasks: list[asyncio.Future[Delivered]] = []

    def begin(self, delivery: Delivery) -> None:
        """Adds the share of one decode rank."""
        self._deliveries.append(delivery)
        self._tasks.append(asyncio.ensure_future(delivery.run()))

    def failed(self, error: HeadwaterError) -> None:
        """One decode rank without its share makes the others' useless."""
        if not self._over:
            self._over = True
            self._on_failure(error)
            for delivery in self._deliveries:
                delivery.abort()

    def send(self, tokens: Span) -> None:
        """The KV of `tokens` is in the pages."""
        for delivery in self._deliveries:
            delivery.send(tokens)

    def finish(self, first_token: int | None) -> None:
        """No more chunks come. `first_token` is given by the rank that sampled."""
        for delivery in self._deliveries:
            delivery.finish(first_token)
        self._closing.set()

    def abort(self) -> None:
        """Drops what has not been written."""
        self._over = True
        for delivery in self._deliveries:
            delivery.abort()
        self._closing.set()

    async def ended(self) -> Delivered:
        """Waits until `finish` or `abort` was called and nothing of the transfer is under way any more."""
        results = [await asyncio.shield(task) for task in self._tasks]
        await self._closing.wait()
        return Delivered(
            sum(result.num_bytes for result in results),
            sum(result.num_receipts for result in results),
            next((result.error for result in results if result.error is not None), None),
            all(result.quiesced for result in results),
        )


class Sender:
    """Sends from one rank's pool.

    Args:
        writer: over an engine that is already running.
        arena: send segments of at least one token of one layer each, registered with the engine.
        source: where this rank keeps its KV.
        geometry: of the group; its dtype is the source's.
        rank: who writes.
        chunk_tokens: of a usual chunk, to judge whether direct writes pay.
        reply_seconds, acknowledge_seconds: `Deadlines` of the cluster file.
    """

    def __init__(
        self,
        writer: Writer,
        arena: SlotArena,
        source: Source,
        geometry: common_pb2.Geometry,
        rank: WriterRank,
        *,
        chunk_tokens: int = 512,
        reply_seconds: float = 5.0,
        acknowledge_seconds: float = 60.0,
    ) -> None:
        self.writer = writer
        self.arena = arena
        self.source = source
        self.geometry = geometry
        self.rank = rank.rank
        self.epoch = rank.epoch
        self.reply_seconds = reply_seconds
        self.acknowledge_seconds = acknowledge_seconds
        self.pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="pack")
        self._replacing: set[asyncio.Task[None]] = set()
        self._rank = rank
        self._chunk_tokens = chunk_tokens

    def open(
        self,
        grant: common_pb2.Grant,
        pages: Sequence[int],
        on_failure: Callable[[HeadwaterError], None],
        request_id: str = "",
        on_sent: Callable[[Box, int, float], None] | None = None,
    ) -> Outgoing:
        """Starts a transfer. `pages` must stay as they are until it has ended.

        Args:
            on_failure: called once, on the event loop, when the transfer fails by itself (not by `abort`).
            on_sent: called for each box that has been acknowledged, with its bytes and its seconds from begin to
                acknowledgement.
        """
        bound = log.bind(request=request_id, transfer=grant.transfer_id, attempt=grant.attempt)
        outgoing = Outgoing(on_failure)
        for target in grant.targets:
            part = self._part(target)
            if part is not None or self._rank.samples:
                outgoing.begin(Delivery(self, grant, target, part, list(pages), bound, outgoing.failed, on_sent))
        return outgoing

    def replace(self, owner: Hashable) -> None:
        """A peer may still write to the owner's segments: fences them and gives them new memory, in the background."""
        task = asyncio.ensure_future(self.arena.replace(self.arena.quarantine(owner)))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    def close(self) -> None:
        self.pool.shutdown(wait=True)

    def writes_directly(self, target: PagedLayout, part: tuple[Span, Span]) -> bool:
        """Whether the pieces of a chunk are long enough, were its pages to follow each other on both sides."""
        heads = part[1]
        source = self.source.layout
        whole = heads == source.heads == target.heads
        tokens = min(self._chunk_tokens, target.page_size * target.num_pages) if whole else 1
        shortest = min(size for size in (source.cell.key_bytes, source.cell.value_bytes) if size)
        return tokens * len(heads) * shortest >= DIRECT_MIN_BYTES[self.writer.engine.transport]

    def _part(self, target: common_pb2.GrantTarget) -> tuple[Span, Span] | None:
        """Layers and heads that this rank sends to a decode rank."""
        layout = self.source.layout
        own = own_part(layout.layers, self._rank.replica, self._rank.num_replicas)
        layers = own.intersection(Span(target.layer_start, target.layer_end)) if own else None
        heads = layout.heads.intersection(Span(target.head_start, target.head_end))
        return (layers, heads) if layers and heads else None
