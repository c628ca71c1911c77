"""The checked-in protobuf stubs are what the .proto files and the pinned generators give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_stubs(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*_pb2*") if path.is_file()}


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    subprocess.run(["bash", ROOT / "deploy" / "gen-stubs.sh", tmp_path, sys.executable], check=True)
    generated = read_stubs(tmp_path / "headwater" / "v1")
    checked_in = read_stubs(ROOT / "proto" / "headwater" / "v1")
    assert generated
    different = sorted(
        name for name in generated.keys() | checked_in.keys() if generated.get(name) != checked_in.get(name)
    )
    assert not different, "regenerate with: bash deploy/gen-stubs.sh"
