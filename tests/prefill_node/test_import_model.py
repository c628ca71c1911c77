"""What `headwater import-model` refuses, and that a folder appears whole or not at all.

The conversion itself is shown by the model that every end-to-end test uses: deploy/setup.sh imports it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from headwater.errors import InvalidConfig, ModelFolderError
from prefill_node import import_model as module
from prefill_node.import_model import import_model


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """Starts like a GGUF, and ends there."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0")
    return path


def write_files(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).write_text("{}")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no file .*absent\.gguf"):
        import_model(tmp_path / "absent.gguf", tmp_path / "out")


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "page.gguf").write_bytes(b"<html>")
    with pytest.raises(ModelFolderError, match=r"page\.gguf is not a GGUF file: it starts with b'<htm'"):
        import_model(tmp_path / "page.gguf", tmp_path / "out")


def test_a_damaged_file_leaves_nothing_behind(gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match=r"model\.gguf cannot be loaded"):
        import_model(gguf, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [gguf]


def test_a_target_that_holds_something(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(InvalidConfig, match="out exists and is not an empty folder"):
        import_model(gguf, target)
    assert (target / "notes.txt").read_text() == "mine"


def test_missing_packages_are_named(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match=r"needs gguf and accelerate.*headwater\[gguf\]"):
        import_model(gguf, tmp_path / "out")


def test_an_interrupted_import_leaves_no_folder(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, made: Path) -> None:
        write_files(made, ("config.json",))
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        import_model(gguf, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [gguf]


def test_an_incomplete_result_is_refused(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_convert", lambda _, made: write_files(made, module._FILES[:-2]))
    with pytest.raises(ModelFolderError, match=r"gave no tokenizer\.json, tokenizer_config\.json"):
        import_model(gguf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prepared", [True, False])
def test_a_whole_result_takes_its_place(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, prepared: bool
) -> None:
    monkeypatch.setattr(module, "_convert", lambda _, made: write_files(made, module._FILES))
    target = tmp_path / "deep" / "out"
    if prepared:
        target.mkdir(parents=True)
    import_model(gguf, target)
    assert {path.name for path in target.iterdir()} == set(module._FILES)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
