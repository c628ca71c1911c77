"""What a rank delivers of a request whose beginning others have computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from headwater.errors import HeadwaterError
from headwater.v1 import common_pb2, worker_pb2
from kv_transfer.geometry import Box, Span
from kv_transfer.landing import Unpacks
from kv_transfer.sender import Outgoing, Sender
from prefill_node.deliveries import Deliveries


class Recorded(Outgoing):
    """Notes what it is given, and is over when it is closed."""

    def __init__(self, on_failure: Callable[[HeadwaterError], None]) -> None:
        super().__init__(on_failure)
        self.sent: list[Span] = []

    def send(self, tokens: Span) -> None:
        self.sent.append(tokens)


class Recording(Sender):
    """Opens nothing."""

    def __init__(self) -> None:
        self.outgoing: list[Recorded] = []

    def open(
        self,
        grant: common_pb2.Grant,
        pages: Sequence[int],
        on_failure: Callable[[HeadwaterError], None],
        request_id: str = "",
        on_sent: Callable[[Box, int, float], None] | None = None,
    ) -> Outgoing:
        self.outgoing.append(Recorded(on_failure))
        return self.outgoing[-1]


def nothing_is_fetched(pages: Sequence[int]) -> Unpacks:
    raise AssertionError(f"fetching into {pages}")


@pytest.mark.parametrize(("verified", "first"), [(0, Span(0, 8)), (4, Span(4, 8))])
def test_what_is_cached_is_delivered_at_once_and_again_when_it_is_redirected(verified: int, first: Span) -> None:
    async def run() -> None:
        sender, reports = Recording(), list[worker_pb2.Report]()
        deliveries = Deliveries(sender, nothing_is_fetched, reports.append)
        deliveries.open(
            worker_pb2.OpenRequest(
                request_id="r",
                num_tokens=14,
                pages=[5, 6, 1, 2],
                grant=common_pb2.Grant(attempt=1, verified_tokens=verified),
                cached_tokens=8,
            )
        )
        assert sender.outgoing[0].sent == [first]
        deliveries.computed("r", Span(8, 12))
        assert sender.outgoing[0].sent == [first, Span(8, 12)]
        deliveries.redirect(worker_pb2.RedirectDelivery(request_id="r", grant=common_pb2.Grant(attempt=2)))
        deliveries.computed("r", Span(12, 14))
        assert sender.outgoing[1].sent == [Span(0, 12), Span(12, 14)]
        deliveries.close("r", 7, abort=False)
        while not reports:
            await asyncio.sleep(0)
        assert [(report.released.request_id, report.released.attempt) for report in reports] == [("r", 2)]

    asyncio.run(run())


def test_without_a_grant_nothing_is_delivered() -> None:
    async def run() -> None:
        sender, reports = Recording(), list[worker_pb2.Report]()
        deliveries = Deliveries(sender, nothing_is_fetched, reports.append)
        deliveries.open(worker_pb2.OpenRequest(request_id="r", num_tokens=9, pages=[0, 1, 2], cached_tokens=8))
        deliveries.computed("r", Span(8, 9))
        deliveries.close("r", 7, abort=False)
        while not reports:
            await asyncio.sleep(0)
        assert sender.outgoing == []

    asyncio.run(run())
