"""Waiting for work that must not be abandoned half done."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: asyncio.Future[T]) -> T:
    """Awaits `work`; when cancelled meanwhile, lets it end first."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
