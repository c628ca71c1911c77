"""Host memory by address: buffers, copies and digests.

The one place that turns an address into bytes. Callers own the memory and keep it alive.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer.planner import Copy

# Addresses that a writer may know and that must not become somebody else's.
_RETIRED: list[HostBuffer] = []


class HostBuffer:
    """Page-aligned anonymous memory. Goes with its last reference, unless it is retired."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Fewer pages to look up while copying; benchmarks/transfer.py gains a twentieth. Not every kernel has them.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._export = (ctypes.c_char * num_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._export)

    def view(self) -> memoryview:
        """All of it, writable; keeps it alive."""
        return memoryview(self._map)

    def give_back_memory(self) -> None:
        """Returns the memory to the system, zeroed, and keeps the addresses."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def retire(self) -> None:
        """Keeps the addresses for the rest of the process's life: nobody is ever given them again."""
        _RETIRED.append(self)


def view(address: int, num_bytes: int) -> memoryview:
    """Writable bytes at `address`."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def digest(address: int, num_bytes: int) -> bytes:
    """xxh3-128 of the bytes at `address`: against corruption, not against an adversary."""
    return xxhash.xxh3_128_digest(view(address, num_bytes))


class Digest:
    """xxh3-128 of pieces of memory, as if they lay one after the other."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, address: int, length: int, rows: int = 1, stride: int = 0) -> None:
        """`rows` pieces of `length` bytes, `stride` apart."""
        if rows == 1:
            self._state.update(view(address, length))
        else:
            self._state.update(_rows(address, rows, length, stride).tobytes())

    def value(self) -> bytes:
        return self._state.digest()


def digest_in_place(copies: Iterable[Copy], paged_address: int) -> bytes:
    """xxh3-128 of a box as it lies in its pages: that of the packed box."""
    state = Digest()
    for copy in copies:
        state.add(paged_address + copy.paged, copy.length, copy.rows, copy.paged_stride)
    return state.value()


def copy(source: int, target: int, num_bytes: int) -> None:
    ctypes.memmove(target, source, num_bytes)


def _rows(address: int, rows: int, length: int, stride: int) -> npt.NDArray[np.uint8]:
    flat = np.frombuffer(view(address, (rows - 1) * stride + length), dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (rows, length), (stride, 1))


def pack(copies: Iterable[Copy], paged_address: int, packed_address: int) -> None:
    """Pool → packed box."""
    for copy in copies:
        source, target = paged_address + copy.paged, packed_address + copy.packed
        if copy.rows == 1:
            ctypes.memmove(target, source, copy.length)
        else:
            rows = _rows(source, copy.rows, copy.length, copy.paged_stride)
            np.copyto(_rows(target, copy.rows, copy.length, copy.length), rows)


def unpack(copies: Iterable[Copy], packed_address: int, paged_address: int) -> None:
    """Packed box → pool."""
    for copy in copies:
        source, target = packed_address + copy.packed, paged_address + copy.paged
        if copy.rows == 1:
            ctypes.memmove(target, source, copy.length)
        else:
            rows = _rows(source, copy.rows, copy.length, copy.length)
            np.copyto(_rows(target, copy.rows, copy.length, copy.paged_stride), rows)
