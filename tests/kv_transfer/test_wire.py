"""Element types on the wire."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from headwater.errors import GeometryMismatch, TransferFailed
from kv_transfer.geometry import ITEM_SIZES, Box, Span
from kv_transfer.wire import FP8, WireFormat, choose, exact

BOX = Box(Span(2, 4), Span(1, 4), Span(10, 27))
KEY, VALUE = 8, 5
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def values(dtype: str, scale: float = 1.0) -> np.ndarray:  # type: ignore[type-arg]
    """A packed box."""
    count = BOX.volume * (KEY + VALUE)
    return (np.random.default_rng(0).standard_normal(count) * scale).astype(NUMPY[dtype])


def through(source: str, wire: str, destination: str, packed: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    out, back = WireFormat(source, wire, KEY, VALUE), WireFormat(destination, wire, KEY, VALUE)
    assert out.num_bytes(BOX) == back.num_bytes(BOX)
    on_wire = np.zeros(out.num_bytes(BOX) + 16, dtype=np.uint8)
    out.encode(BOX, packed.ctypes.data, on_wire.ctypes.data)
    assert not on_wire[-16:].any()
    landed = np.zeros(len(packed), dtype=NUMPY[destination])
    back.decode(BOX, on_wire.ctypes.data, landed.ctypes.data)
    return landed


@pytest.mark.parametrize(("source", "destination"), list(itertools.product(ITEM_SIZES, ITEM_SIZES)))
def test_what_lands_is_what_was_sent_rounded_once(source: str, destination: str) -> None:
    """S26: dtypes that differ are converted, not misread."""
    wire = choose(source, destination)
    assert ITEM_SIZES[wire] == min(ITEM_SIZES[source], ITEM_SIZES[destination])
    packed = values(source)
    landed = through(source, wire, destination, packed)
    np.testing.assert_array_equal(landed, packed.astype(NUMPY[wire]).astype(NUMPY[destination]))
    if exact(source, wire, destination):
        np.testing.assert_array_equal(landed.astype(NUMPY[source]), packed)


def test_only_what_can_be_given_back_counts_as_exact() -> None:
    assert [pair for pair in itertools.product(ITEM_SIZES, ITEM_SIZES) if exact(pair[0], choose(*pair), pair[1])] == [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float16", "float16"),
    ]
    assert not exact("float32", FP8, "float32")


@pytest.mark.parametrize("scale", [1e-20, 1.0, 3e4])
def test_float8_keeps_the_error_that_the_module_states(scale: float) -> None:
    packed = values("float32", scale)
    landed = through("float32", FP8, "float32", packed)
    largest = np.abs(packed).max()
    error = np.abs(landed - packed)
    # One scale for each layer, part and head is at most the largest of all.
    assert (error <= np.maximum(np.abs(packed) / 16, largest / 448 * 2**-10) * 1.0001).all()
    # As a whole: about two and a half percent.
    assert np.linalg.norm(error) / np.linalg.norm(packed) < 0.03


def test_float8_takes_zeros_and_refuses_what_has_no_scale() -> None:
    packed = values("float32") * 0
    assert not through("float32", FP8, "bfloat16", packed).any()
    packed[7] = np.inf
    with pytest.raises(TransferFailed, match="not finite"):
        through("float32", FP8, "float32", packed)


def test_a_type_that_nobody_converts_is_refused() -> None:
    with pytest.raises(GeometryMismatch, match="'int4' cannot be converted"):
        choose("float32", "int4")
