"""`headwater generate`: shows one answer as it comes."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from headwater.client import Answer, AsyncClient
from headwater.v1 import router_pb2
from router.console import open_console
from router.ttft import PARTS


async def run_generate(address: str, request: router_pb2.GenerateRequest, *, as_json: bool, progress: bool) -> int:
    """Streams the answer to standard output and says on standard error where its time went.

    Args:
        as_json: print one JSON object at the end instead.
        progress: show a bar over the prompt's tokens until the first token.
    """
    answer = Answer()
    async with AsyncClient(address) as client, contextlib.aclosing(client.generate(request)) as responses:
        with _Bar(shown=progress) as bar:
            async for response in responses:
                match response.WhichOneof("event"):
                    case "accepted":
                        bar.begin(response.accepted)
                    case "progress":
                        bar.advance(response.progress)
                    case "token":
                        bar.end()
                _show(answer.add(response), shown=not as_json)
    if as_json:
        sys.stdout.write(json.dumps(_as_dict(answer), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
        _show_summary(answer)
    return 0


def _as_dict(answer: Answer) -> dict[str, Any]:
    ttft = answer.finished.ttft
    return {
        "request_id": answer.accepted.request_id,
        "transfer_id": answer.accepted.transfer_id,
        "prefill_group": answer.accepted.prefill_group,
        "decode_group": answer.accepted.decode_group,
        "seed": answer.accepted.seed,
        "num_prompt_tokens": answer.finished.num_prompt_tokens,
        "num_chunks": answer.accepted.num_chunks,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.reason,
        "ttft_seconds": ttft.total,
        "ttft_parts": {name: getattr(ttft, name) for name in PARTS},
        "commit_after_first_token_seconds": answer.finished.commit_after_first_token_seconds,
    }


class _Bar:
    """A progress bar on standard error while the prompt is prefilled."""

    def __init__(self, *, shown: bool) -> None:
        self._progress = Progress(
            TextColumn("prefill"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            # Also when standard error is a file: whoever asks for a bar gets one.
            console=Console(stderr=True, force_terminal=shown or None),
            disable=not shown,
        )
        self._task = self._progress.add_task("prefill", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, accepted: router_pb2.Accepted) -> None:
        self._progress.update(self._task, total=accepted.num_prompt_tokens, completed=0)

    def advance(self, done: router_pb2.Progress) -> None:
        self._progress.update(self._task, completed=done.tokens_done)

    def end(self) -> None:
        """The first token is there."""
        self._progress.update(self._task, completed=self._progress.tasks[0].total)
        self._progress.stop()


def _show(text: str, *, shown: bool) -> None:
    if shown and text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _show_summary(answer: Answer) -> None:
    finished, ttft = answer.finished, answer.finished.ttft
    table = Table("part of TTFT", "seconds", "share", "what it is", title=f"TTFT {ttft.total:.3f} s")
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, meaning in PARTS.items():
        seconds = getattr(ttft, name)
        share = seconds / ttft.total if ttft.total else 0.0
        table.add_row(name, f"{seconds:.4f}", f"{share:.1%}", meaning)
    console = open_console(stderr=True)
    console.print(table)
    where = answer.accepted.prefill_group
    if answer.accepted.transfer_id:
        where += f" and {answer.accepted.decode_group}"
        commit = finished.commit_after_first_token_seconds
        console.print(f"KV committed {commit * 1000:.1f} ms after the first token")
    console.print(
        f"{finished.num_prompt_tokens} prompt tokens, {finished.num_generated_tokens} generated on {where}, "
        f"ended by {answer.reason}"
    )
