"""What KV looks like between two ranks whose element types may differ.

A packed box on the wire is `[layer][key|value][token, head, size]` of the wire type. Where the types of the
two sides differ, the narrower one travels: the writer rounds once, or the receiver widens exactly. As an
option `float8_e4m3fn` travels, a quarter of float32: each (layer, key|value, head) of a box has one float32
scale, its largest magnitude divided by 448, and the scales of a part precede its elements.

Error of float8_e4m3fn, which has three mantissa bits and subnormals down to 2⁻⁹: |error| ≤ |x|/16 for
elements of at least scale·2⁻⁶, and ≤ scale·2⁻¹⁰ below (format: Micikevicius et al., "FP8 Formats for Deep
Learning", 2022). Infinities and NaN are refused, because they have no scale.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from headwater.errors import GeometryMismatch, TransferFailed
from headwater.v1 import common_pb2
from kv_transfer import memory
from kv_transfer.geometry import ITEM_SIZES, Box, CellSize

FP8 = "float8_e4m3fn"
_LARGEST_FP8 = 448.0
_SCALE_BYTES = 4

_NUMPY: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    FP8: ml_dtypes.float8_e4m3fn,
}


def choose(source: str, destination: str, option: str = "auto") -> str:
    """The wire type between two element types.

    Args:
        option: "auto" for the narrower of the two (the source's, when they are equally wide), or "float8_e4m3fn".

    Raises:
        GeometryMismatch: a type is not one that this library converts.
    """
    for dtype in (source, destination):
        if dtype not in ITEM_SIZES:
            raise GeometryMismatch(f"KV of dtype {dtype!r} cannot be converted; use one of {', '.join(ITEM_SIZES)}.")
    if option == FP8:
        return FP8
    return source if ITEM_SIZES[source] <= ITEM_SIZES[destination] else destination


def exact(source: str, wire: str, destination: str) -> bool:
    """Whether the destination holds every element as the source does, so that it can be given back."""
    return wire == source and destination in (source, "float32")


@dataclasses.dataclass(frozen=True, slots=True)
class WireFormat:
    """Packed boxes between one side's own element type and the wire's.

    Args:
        local: element type of this side's KV.
        wire: element type on the wire, possibly `FP8`.
        key_size, value_size: elements of one head of one token.
    """

    local: str
    wire: str
    key_size: int
    value_size: int

    @staticmethod
    def of(geometry: common_pb2.Geometry, wire: str) -> WireFormat:
        if wire not in _NUMPY:
            raise TransferFailed(f"wire type {wire!r} is unknown here; the two sides run different releases.")
        return WireFormat(geometry.dtype, wire, geometry.key_size, geometry.value_size)

    @property
    def converts(self) -> bool:
        return self.local != self.wire

    @property
    def local_cell(self) -> CellSize:
        item = np.dtype(_NUMPY[self.local]).itemsize
        return CellSize(self.key_size * item, self.value_size * item)

    @property
    def wire_cell(self) -> CellSize:
        """Without the scales."""
        item = np.dtype(_NUMPY[self.wire]).itemsize
        return CellSize(self.key_size * item, self.value_size * item)

    def num_bytes(self, box: Box) -> int:
        """Of the packed `box` on the wire."""
        num_parts = (self.key_size > 0) + (self.value_size > 0)
        scales = len(box.layers) * len(box.heads) * num_parts * _SCALE_BYTES if self.wire == FP8 else 0
        return box.volume * self.wire_cell.total + scales

    def room(self, max_bytes: int, layers: int, heads: int) -> int:
        """Bytes of elements that fit into a slot of `max_bytes` beside the scales of a box."""
        return max_bytes - (layers * heads * 2 * _SCALE_BYTES if self.wire == FP8 else 0)

    def encode(self, box: Box, local_address: int, wire_address: int) -> None:
        """Packed box of the local type → packed box of the wire type.

        Raises:
            TransferFailed: an element is not finite and the wire type needs a scale.
        """
        wire_at = wire_address
        for part in self._parts(box, self.local, local_address):
            elements = part
            if self.wire == FP8:
                values = part.astype(np.float32)
                largest = np.abs(values).max(axis=(0, 2))
                if not np.isfinite(largest).all():
                    raise TransferFailed(
                        f"the KV of {box} has elements that are not finite, which {FP8} cannot carry. "
                        'Set wire_dtype = "auto", and check the model: its answers will be wrong.'
                    )
                scale = np.where(largest > 0, largest / np.float32(_LARGEST_FP8), np.float32(1)).astype(np.float32)
                self._array(wire_at, "float32", scale.shape)[...] = scale
                wire_at += scale.nbytes
                elements = np.clip(values / scale[None, :, None], -_LARGEST_FP8, _LARGEST_FP8)
            target = self._array(wire_at, self.wire, elements.shape)
            target[...] = elements.astype(target.dtype)
            wire_at += target.nbytes

    def decode(self, box: Box, wire_address: int, local_address: int) -> None:
        """The inverse of `encode`, up to rounding."""
        wire_at = wire_address
        for target in self._parts(box, self.local, local_address):
            scale = None
            if self.wire == FP8:
                scale = self._array(wire_at, "float32", (target.shape[1],)).copy()
                wire_at += scale.nbytes
            source = self._array(wire_at, self.wire, target.shape)
            wire_at += source.nbytes
            values = source.astype(np.float32) * scale[None, :, None] if scale is not None else source
            target[...] = values.astype(target.dtype)

    def _parts(self, box: Box, dtype: str, address: int) -> list[npt.NDArray[Any]]:
        """[token, head, size] arrays of a packed box without scales, in order."""
        parts = []
        for _ in range(len(box.layers)):
            for size in (self.key_size, self.value_size):
                if size:
                    parts.append(self._array(address, dtype, (len(box.tokens), len(box.heads), size)))
                    address += parts[-1].nbytes
        return parts

    @staticmethod
    def _array(address: int, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        kind = np.dtype(_NUMPY[dtype])
        num_bytes = int(np.prod(shape)) * kind.itemsize
        return np.frombuffer(memory.view(address, num_bytes), dtype=kind).reshape(shape)
