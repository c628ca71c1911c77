"""Chunked attention over scattered pages against attention over the whole sequence."""

from __future__ import annotations

import itertools

import pytest
import torch

from headwater.errors import UnsupportedModel
from headwater.v1 import common_pb2
from kv_transfer.geometry import Box, Span
from kv_transfer.planner import packed_bytes
from prefill_node.attention import chunked_attention
from prefill_node.kv_pool import KvPool, PlacedChunk
from prefill_node.step_cache import StepCache

HEADS, KV_HEADS, SIZE, PAGE = 6, 2, 16, 4


class Layer(torch.nn.Module):
    layer_idx = 3


def whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[T, N, V] of plain causal attention in float64."""
    query, key, value = (part.double() for part in (query, key, value))
    key, value = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (key, value))
    scores = query @ key.transpose(1, 2) * SIZE**-0.5
    scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("pages", [[0, 1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 0, 1, 6, 3, 4]])
@pytest.mark.parametrize("cuts", [[0, 31], [0, 1, 31], [0, 8, 16, 31], [0, 5, 6, 30, 31]])
def test_chunks_give_what_the_whole_sequence_gives(dtype: str, bound: float, pages: list[int], cuts: list[int]) -> None:
    geometry = common_pb2.Geometry(key_size=SIZE, value_size=SIZE, dtype=dtype, page_size=PAGE)
    pool = KvPool(geometry, Span(3, 4), Span(0, KV_HEADS), len(pages), torch.device("cpu"))
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(heads, 31, SIZE, generator=generator).to(kind) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    expected = whole(query, key, value)
    for start, end in itertools.pairwise(cuts):
        runs = pool.layout.runs
        before = runs(pages, Span(0, start)) if start else []
        chunk = PlacedChunk("r", Span(start, end), 0, before, runs(pages, Span(start, end)))
        cache = StepCache(pool, [chunk])
        part = slice(start, end)
        keys, values = cache.update(key[None, :, part], value[None, :, part], 3)
        output, _ = chunked_attention(
            Layer(), query[None, :, part], keys, values, None, scaling=SIZE**-0.5, step_cache=cache
        )
        assert output.shape == (1, end - start, HEADS, SIZE)
        assert (output[0].double() - expected[part]).abs().max() <= bound


def test_two_requests_in_one_step_do_not_see_each_other() -> None:
    geometry = common_pb2.Geometry(key_size=SIZE, value_size=SIZE, dtype="float32", page_size=PAGE)
    pool = KvPool(geometry, Span(3, 4), Span(0, KV_HEADS), 8, torch.device("cpu"))
    query, key, value = (torch.randn(heads, 11, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    layout = pool.layout
    chunks = [
        PlacedChunk("a", Span(0, 4), 0, [], layout.runs([6], Span(0, 4))),
        PlacedChunk("b", Span(0, 7), 4, [], layout.runs([2, 0], Span(0, 7))),
    ]
    cache = StepCache(pool, chunks)
    keys, values = cache.update(key[None], value[None], 3)
    output, _ = chunked_attention(Layer(), query[None], keys, values, None, scaling=SIZE**-0.5, step_cache=cache)
    for part in (slice(0, 4), slice(4, 11)):
        expected = whole(query[:, part], key[:, part], value[:, part])
        assert (output[0, part].double() - expected).abs().max() <= 2e-6


def test_what_it_does_not_compute_is_refused() -> None:
    geometry = common_pb2.Geometry(key_size=1, value_size=1, dtype="float32", page_size=1)
    cache = StepCache(KvPool(geometry, Span(0, 1), Span(0, 1), 1, torch.device("cpu")), [])
    nothing = torch.zeros(1, 1, 1, 1)
    with pytest.raises(UnsupportedModel, match="Layer uses sliding_window"):
        chunked_attention(Layer(), nothing, nothing, nothing, None, sliding_window=128, step_cache=cache)


def test_packing_by_tensors_gives_the_bytes_of_the_copy_planner() -> None:
    geometry = common_pb2.Geometry(key_size=3, value_size=5, dtype="bfloat16", page_size=4)
    pool = KvPool(geometry, Span(2, 5), Span(1, 4), 6, torch.device("cpu"))
    pages = [4, 5, 0, 2]
    for layer in range(2, 5):
        chunk = PlacedChunk("r", Span(0, 15), 0, [], pool.layout.runs(pages, Span(0, 15)))
        pool.write(layer, chunk, torch.randn(15, 3, 3).bfloat16(), torch.randn(15, 3, 5).bfloat16())
    for box in (Box(Span(2, 5), Span(1, 4), Span(0, 15)), Box(Span(3, 4), Span(2, 3), Span(3, 11))):
        by_copies, by_tensors = (torch.zeros(packed_bytes(box, pool.layout.cell), dtype=torch.uint8) for _ in range(2))
        pool.pack(pages, box, by_copies.data_ptr())
        pool.pack_by_tensors(pages, box, by_tensors.data_ptr())
        assert torch.equal(by_copies, by_tensors)
        assert by_copies.any()
        # And back, as KV that is fetched from a decode node.
        others = [KvPool(geometry, Span(2, 5), Span(1, 4), 6, torch.device("cpu")) for _ in range(2)]
        others[0].unpack(pages, box, by_copies.data_ptr())
        others[1].unpack_by_tensors(pages, box, by_copies.data_ptr())
        for other in others:
            again = torch.zeros_like(by_copies)
            other.pack(pages, box, again.data_ptr())
            assert torch.equal(again, by_copies)
