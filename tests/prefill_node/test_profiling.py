"""What is measured at start-up, and where it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.v1 import common_pb2, worker_pb2
from prefill_node.profiling import load, load_boundaries, profile_points, save, save_boundaries, saved_at


def config(**changes: int) -> worker_pb2.WorkerConfig:
    return worker_pb2.WorkerConfig(
        **{"pp": 2, "tp": 1, "num_pages": 64, "chunk_tokens": 512} | changes,  # type: ignore[arg-type]
        layer_boundaries=[0, 2, 5],
        geometry=common_pb2.Geometry(page_size=64, model_fingerprint="m", dtype="float32"),
    )


def test_points_span_prefixes_and_chunks_and_fit_the_pool() -> None:
    points = profile_points(8192, 512)
    assert {count for _, count in points} == {128, 256, 512}
    assert {prefix for prefix, count in points if count == 512} == {0, 1024, 4096, 7680}
    assert all(prefix + count <= 8192 for prefix, count in points)
    # Cheap ones first, so that running out of time costs the expensive ones.
    assert points[0] == (0, 128)
    assert points[-1] == (7680, 512)
    assert profile_points(100, 512) == [(0, 100)]


def test_what_was_measured_is_found_again_by_the_same_layout_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    samples = [[([(0, 128)], 0.5)], [([(0, 128)], 0.25)]]
    path = saved_at(config())
    assert load(path, 2) is None
    save(path, samples)  # type: ignore[arg-type]
    assert load(path, 2) == [[([(0, 128)], 0.5)], [([(0, 128)], 0.25)]]
    assert load(path, 3) is None
    assert saved_at(config(tp=2)) != path
    assert load_boundaries(config()) is None
    save_boundaries(config(), [0, 2, 5])
    assert load_boundaries(config()) == [0, 2, 5]
    assert load_boundaries(config(pp=3)) is None
    # Damaged files are measured anew.
    path.write_text("{", encoding="utf-8")
    assert load(path, 2) is None
