"""Host memory by address: buffers, copies and digests.

The one place that turns an address into bytes. Callers own the memory and keep it alive.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer.planner import Copy


class HostBuffer:
    """Page-aligned anonymous memory, given back by `close`."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, num_bytes)
        self._export: ctypes.Array[ctypes.c_char] | None = (ctypes.c_char * num_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._export)

    def close(self) -> None:
        self._export = None
        self._map.close()


def view(address: int, num_bytes: int) -> memoryview:
    """Writable bytes at `address`."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def digest(address: int, num_bytes: int) -> bytes:
    """xxh3-128 of the bytes at `address`: against corruption, not against an adversary."""
    return xxhash.xxh3_128_digest(view(address, num_bytes))


def _rows(address: int, rows: int, length: int, stride: int) -> npt.NDArray[np.uint8]:
    flat = np.frombuffer(view(address, (rows - 1) * stride + length), dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (rows, length), (stride, 1))


def pack(copies: Sequence[Copy], paged_address: int, packed_address: int) -> None:
    """Pool → packed box."""
    for copy in copies:
        source, target = paged_address + copy.paged, packed_address + copy.packed
        if copy.rows == 1:
            ctypes.memmove(target, source, copy.length)
        else:
            rows = _rows(source, copy.rows, copy.length, copy.paged_stride)
            np.copyto(_rows(target, copy.rows, copy.length, copy.length), rows)


def unpack(copies: Sequence[Copy], packed_address: int, paged_address: int) -> None:
    """Packed box → pool."""
    for copy in copies:
        source, target = packed_address + copy.packed, paged_address + copy.paged
        if copy.rows == 1:
            ctypes.memmove(target, source, copy.length)
        else:
            rows = _rows(source, copy.rows, copy.length, copy.length)
            np.copyto(_rows(target, copy.rows, copy.length, copy.paged_stride), rows)
