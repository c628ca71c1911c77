"""What is imported is this checkout, and what is shipped is the four packages and nothing else."""

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "headwater": ROOT / "proto" / "headwater",
    "kv_transfer": ROOT / "kv_transfer",
    "prefill_node": ROOT / "prefill_node",
    "router": ROOT / "router",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_ours_and_not_a_namesake(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == PACKAGES[name]


@pytest.mark.parametrize("name", PACKAGES)
def test_package_is_ours_outside_the_checkout(name: str, tmp_path: Path) -> None:
    located = subprocess.run(
        [sys.executable, "-c", f"import {name}; print({name}.__file__)"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(located.stdout.strip()).parent == PACKAGES[name]


def test_proto_is_an_import_root_and_not_a_package() -> None:
    # Else it would hide the package `proto` of proto-plus, or install loose modules at top level.
    assert not list((ROOT / "proto").glob("*.py"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def test_wheel_has_nothing_else_at_top_level(wheel: set[str]) -> None:
    top_level = {name.split("/")[0] for name in wheel}
    assert {name for name in top_level if not name.endswith(".dist-info")} == set(PACKAGES)


def test_wheel_has_every_module_stub_page_and_type_marker(wheel: set[str]) -> None:
    expected = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for pattern in ("*.py", "*.pyi", "*.proto", "*.html", "*.css", "*.js")
        for path in folder.rglob(pattern)
    }
    assert {"headwater/v1/prefill_pb2.py", "headwater/v1/prefill_pb2_grpc.pyi"} <= expected
    assert {f"router/page/static/page.{kind}" for kind in ("html", "css", "js")} <= expected
    # Of `headwater up --observe`.
    expected |= {"router/rules/alerts.yml", "router/rules/recording.yml"}
    assert expected <= wheel
    assert {f"{name}/py.typed" for name in PACKAGES} <= wheel


def test_wheel_carries_the_licence(wheel: set[str]) -> None:
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel)
