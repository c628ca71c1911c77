"""The `headwater` command: composition, exit codes, and its output against fake groups."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import router.main
from headwater.errors import HeadwaterError, InvalidConfig, InvalidRequest, PeerUnavailable
from headwater.exits import MEANINGS, Exit
from headwater.v1 import router_pb2
from router.commands import add_commands
from router.generate import run_generate
from router.main import build_parser, main
from router.show import show_status
from tests.router.fakes import Rig, rig, text_request, tiny_tokenizer

ANSWER = [70, 80, 90]


def raising(error: BaseException) -> Callable[[argparse.ArgumentParser], None]:
    def run(_: argparse.Namespace) -> int:
        raise error

    return lambda parser: parser.set_defaults(run=run)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InvalidConfig("a key is wrong"), 2, "headwater: error: a key is wrong\n"),
        (InvalidRequest("too long"), 2, "headwater: error: too long\n"),
        (PeerUnavailable("nobody there"), 1, "headwater: error: nobody there\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    raising(error)(parser)
    monkeypatch.setattr(router.main, "build_parser", lambda: parser)
    assert main([]) == code
    assert capsys.readouterr().err == line


def test_help_and_readme_have_the_exit_codes() -> None:
    shown = build_parser().format_help()
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| code | meaning |\n| --- | --- |\n")[2].partition("\n\n")[0]
    assert table.splitlines() == [f"| {code:d} | {meaning} |" for code, meaning in MEANINGS.items()]
    assert list(MEANINGS) == list(Exit)
    for code, meaning in MEANINGS.items():
        assert f"  {code:<19d} {meaning}\n" in shown


def test_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["status", "--watch", "often"])
    assert ended.value.code == Exit.LOCAL
    assert capsys.readouterr().err == (
        "headwater: error: argument --watch: invalid float value: 'often'; see headwater status --help.\n"
    )
    parser = argparse.ArgumentParser()
    raising(PeerUnavailable("d0 is gone:\n  connection refused"))(parser)
    monkeypatch.setattr(router.main, "build_parser", lambda: parser)
    assert main([]) == Exit.PEER
    assert capsys.readouterr().err == "headwater: error: d0 is gone: connection refused\n"


def leaves(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Every command that can be run."""
    found: dict[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                found |= leaves(child)
    return found or {parser.prog.removeprefix("headwater "): parser}


def test_whatever_prints_for_people_takes_json() -> None:
    commands = leaves(build_parser())
    without = {name for name, parser in commands.items() if "--json" not in parser.format_help()}
    servers = {"router serve", "prefill serve", "prefill worker", "decode serve"}
    silent = {"init", "drain", "undrain", "abort", "import-model"}
    for_programs = {"config schema", "completion"}
    assert without == servers | silent | for_programs


def test_plug_ins_add_commands_and_broken_ones_are_named() -> None:
    ours = EntryPoint("router", "router.commands:add_commands", "headwater.commands")
    assert build_parser([ours]).parse_args(["status"]).router == "127.0.0.1:7000"
    with pytest.raises(InvalidConfig, match=r"commands of 'no\.such:thing' cannot be loaded"):
        build_parser([ours, EntryPoint("x", "no.such:thing", "headwater.commands")])
    with pytest.raises(InvalidConfig, match="not installed"):
        build_parser([])


def test_help_loads_no_model_library() -> None:
    """Of the whole command as installed, with every package's subcommands."""
    script = (
        "import sys; from router.main import build_parser; build_parser().format_help(); "
        "print([name for name in ('torch', 'transformers', 'mooncake') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"


def test_unreadable_prompt_is_a_local_error(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    args = parser.parse_args(["generate", "--prompt-file", str(tmp_path / "missing")])
    with pytest.raises(InvalidRequest, match="cannot read the prompt: .*missing"):
        args.run(args)
    args = parser.parse_args(["generate", "--prompt", "x", "--max-tokens", "99999999999"])
    with pytest.raises(InvalidRequest, match="out of range"):
        args.run(args)


def with_rig(use: Callable[[Rig, str], Awaitable[None]]) -> None:
    async def run() -> None:
        async with rig(ANSWER) as it:
            await use(it, it.address)

    asyncio.run(run())


def test_generate_streams_text_and_shows_where_the_time_went(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(_: Rig, address: str) -> None:
        assert await run_generate(address, text_request(max_tokens=3), as_json=False, progress=True) == 0

    with_rig(use)
    shown = capsys.readouterr()
    assert shown.out == tiny_tokenizer().decode(ANSWER) + "\n"
    for part in ("TTFT", "routing", "compute", "relay", "3 generated on p0 and d0, ended by length"):
        assert part in shown.err
    assert "prefill" in shown.err


def test_generate_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(_: Rig, address: str) -> None:
        assert await run_generate(address, text_request(max_tokens=3), as_json=True, progress=False) == 0

    with_rig(use)
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert shown.err == ""
    assert result["token_ids"] == ANSWER
    assert result["text"] == tiny_tokenizer().decode(ANSWER)
    assert (result["finish_reason"], result["prefill_group"], result["decode_group"]) == ("length", "p0", "d0")
    assert sum(result["ttft_parts"].values()) == result["ttft_seconds"]


def test_generate_without_a_router() -> None:
    with pytest.raises(HeadwaterError, match=r"router at 127\.0\.0\.1:1"):
        asyncio.run(run_generate("127.0.0.1:1", text_request(), as_json=True, progress=False))


def test_status_as_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    async def use(it: Rig, _: str) -> None:
        status = await it.client.status()
        show_status(status, as_json=False)
        show_status(status, as_json=True)

    with_rig(use)
    table, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    assert "PP2 TP1" in table
    assert [group["state"] for group in json.loads(last)["groups"]] == ["serving", "serving"]
    assert set(json.loads(last)["groups"][0]) == set(router_pb2.GroupStatus.DESCRIPTOR.fields_by_name)


def test_prompt_comes_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    async def run(_: str, request: router_pb2.GenerateRequest, **_options: bool) -> int:
        sent.append(request)
        return 0

    monkeypatch.setattr("router.generate.run_generate", run)
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    args = parser.parse_args(["generate", "--chat", "--seed", "7", "--stop", "a", "--stop", "b"])
    assert args.run(args) == 0
    (request,) = sent
    assert request.chat.messages[0].content == "from a pipe"
    assert (request.has_seed, request.sampling.seed, list(request.stop)) == (True, 7, ["a", "b"])
