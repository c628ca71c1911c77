"""A timeline as something to look at: a trace for Chrome or Perfetto, a picture, and a stage's idle share.

Bars come from a request's events or from a simulation; nothing here knows which. These functions read no
clock and write no file.

Both pictures give a track as many lanes as it has bars at one time, so no bar hides another.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

_NANOSECONDS = 1_000_000_000
_PID = 1

# Of the picture, in pixels. Its text is monospaced, so that how wide it is follows from its length.
_WIDTH = 1200
_LEFT = 160
_PLOT = 1000
_HEADER = 64
_ROW = 28
_FOOTER = 16
# Of a bar in its row, and of a label in its bar.
_INSET = 3
_NARROWEST = 0.5
# Narrower bars have no edge: it would be all one sees of them.
_EDGED = 4
_CHARACTER = 6.7
_MOST_STEPS = 10

# Paul Tol's "light" scheme (https://personal.sron.nl/~pault/), made for black text on cells that colour-blind
# readers can tell apart. In an order that keeps like from like.
_COLOURS = ("#77AADD", "#EE8866", "#44BB99", "#EEDD88", "#AAAA00", "#99DDFF", "#BBCC33", "#FFAABB")
_SHADES = ("#77AADD", "#99DDFF")

_STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #222222 }
.title { font-size: 15px }
.label { fill: #000000; pointer-events: none }
.page { fill: #ffffff }
.line { stroke: #dddddd }
.edged { stroke: #ffffff; stroke-width: 0.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #dddddd }
  .page { fill: #181818 }
  .line { stroke: #444444 }
  .edged { stroke: #181818 }
}
"""

_NOT_IN_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclasses.dataclass(frozen=True, slots=True)
class Bar:
    """One stretch of work on one track. Seconds on one clock.

    Raises:
        ValueError: it ends before it starts.
    """

    track: str
    start: float
    end: float
    # Short: "0–4096".
    label: str
    request_id: str = ""
    # Shown when the bar is selected: {"tokens": [0, 4096], "num_bytes": 123}. What JSON can hold.
    details: dict[str, object] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Worded so that a NaN is refused too.
        if not self.start <= self.end:
            raise ValueError(f"bar {self.label!r} on {self.track!r} starts at {self.start} and ends at {self.end}")


def chrome_trace(bars: Sequence[Bar], tracks: Sequence[str]) -> dict[str, Any]:
    """The bars in the Trace Event Format, for `json.dump`; chrome://tracing and https://ui.perfetto.dev show it.

    Format: "Trace Event Format", Google, 2016. A lane is a thread of one process, numbered from 1 in the order
    of `tracks`. Times are whole microseconds from the earliest start.

    Raises:
        ValueError: a bar's track is not in `tracks`.
    """
    events: list[dict[str, Any]] = [_metadata("process_name", 0, {"name": "headwater"})]
    for tid, lane in enumerate(_lanes(bars, tracks), start=1):
        events.append(_metadata("thread_name", tid, {"name": lane.name}))
        events.append(_metadata("thread_sort_index", tid, {"sort_index": tid}))
        events.extend(_complete_event(tid, piece) for piece in lane.pieces)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def gantt_svg(bars: Sequence[Bar], tracks: Sequence[str], title: str) -> str:
    """The bars as a standalone SVG: a row per lane, time to the right from the earliest start.

    A colour is a request; they repeat after eight. A single request's bars alternate between two shades.

    Raises:
        ValueError: a bar's track is not in `tracks`.
    """
    lanes = _lanes(bars, tracks)
    height = _HEADER + _ROW * (len(lanes) if bars else 1) + _FOOTER
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="title" x="8" y="24">{_escape(title)}</text>',
    ]
    if bars:
        lines.extend(_rows(lanes))
    else:
        lines.append(f'<text x="8" y="{_HEADER}">Nothing to show.</text>')
    lines.append("</svg>\n")
    return "\n".join(lines)


def bubble_share(bars: Sequence[Bar], track: str, start: float, end: float) -> float:
    """The share of [start, end] in which no bar of `track` lies; 1.0 where it has none.

    Raises:
        ValueError: there is no time between `start` and `end`.
    """
    if not start < end:
        raise ValueError(f"no time lies between {start} and {end}")
    idle = 0.0
    reached = start
    for bar in sorted((bar for bar in bars if bar.track == track), key=lambda bar: bar.start):
        idle += max(0.0, min(bar.start, end) - reached)
        reached = max(reached, min(bar.end, end))
    return (idle + (end - reached)) / (end - start)


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A bar in whole nanoseconds from the earliest start: less than that between two bars is no overlap."""

    start: int
    end: int
    bar: Bar


@dataclasses.dataclass(frozen=True, slots=True)
class _Lane:
    """Pieces of one track in order, none of which overlaps another."""

    name: str
    pieces: list[_Piece]

    def is_free(self, at: int) -> bool:
        return not self.pieces or self.pieces[-1].end <= at


def _lanes(bars: Sequence[Bar], tracks: Sequence[str]) -> list[_Lane]:
    """Every track's lanes, at least one each, in the order of `tracks`."""
    origin = min((bar.start for bar in bars), default=0.0)
    pieces: dict[str, list[_Piece]] = {track: [] for track in tracks}
    for bar in bars:
        if bar.track not in pieces:
            raise ValueError(f"bar {bar.label!r} is on track {bar.track!r}, which is not one of {list(tracks)}")
        start, end = (round((time - origin) * _NANOSECONDS) for time in (bar.start, bar.end))
        pieces[bar.track].append(_Piece(start, end, bar))
    return [lane for track in pieces for lane in _split(track, pieces[track])]


def _split(track: str, pieces: list[_Piece]) -> list[_Lane]:
    lanes = [_Lane(track, [])]
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.end)):
        lane = next((lane for lane in lanes if lane.is_free(piece.start)), None)
        if lane is None:
            lane = _Lane(f"{track} ({len(lanes) + 1})", [])
            lanes.append(lane)
        lane.pieces.append(piece)
    return lanes


def _metadata(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": _PID, "tid": tid, "args": args}


def _complete_event(tid: int, piece: _Piece) -> dict[str, Any]:
    bar = piece.bar
    # Both ends are rounded, not the duration: neighbours then still meet and never overlap.
    start, end = (round(time / 1000) for time in (piece.start, piece.end))
    args = bar.details | ({"request": bar.request_id} if bar.request_id else {})
    return {"name": bar.label, "ph": "X", "pid": _PID, "tid": tid, "ts": start, "dur": end - start, "args": args}


class _Scale:
    """From nanoseconds to pixels and to text."""

    def __init__(self, span: int) -> None:
        self.span = span
        self._unit, self._unit_name = (_NANOSECONDS, "s") if span >= _NANOSECONDS else (_NANOSECONDS // 1000, "ms")

    def pixels(self, time: int) -> float:
        return _PLOT * time / self.span

    def text(self, time: int) -> str:
        return f"{time / self._unit:g} {self._unit_name}"

    def ticks(self) -> range:
        """At most ten steps of 1, 2 or 5 times a power of ten."""
        steps = (factor * 10**power for power in itertools.count() for factor in (1, 2, 5))
        step = next(step for step in steps if step * _MOST_STEPS >= self.span)
        return range(0, self.span + 1, step)


def _rows(lanes: list[_Lane]) -> Iterator[str]:
    pieces = [piece for lane in lanes for piece in lane.pieces]
    # Were all bars without length at one time, any scale would do.
    scale = _Scale(max(1, *(piece.end for piece in pieces)))
    bottom = _HEADER + _ROW * len(lanes)
    for tick in scale.ticks():
        x = f"{_LEFT + scale.pixels(tick):.2f}"
        yield f'<line class="line" x1="{x}" x2="{x}" y1="{_HEADER - 6}" y2="{bottom}"/>'
        yield f'<text class="tick" text-anchor="middle" x="{x}" y="{_HEADER - 12}">{scale.text(tick)}</text>'
    requests = list(dict.fromkeys(piece.bar.request_id for piece in sorted(pieces, key=lambda piece: piece.start)))
    colours = {request: _COLOURS[index % len(_COLOURS)] for index, request in enumerate(requests)}
    for row, lane in enumerate(lanes):
        top = _HEADER + _ROW * row
        yield f'<line class="line" x1="0" x2="{_WIDTH}" y1="{top}" y2="{top}"/>'
        yield f'<text class="track" x="8" y="{top + 18}"><title>{_escape(lane.name)}</title>{_name(lane.name)}</text>'
        for index, piece in enumerate(lane.pieces):
            colour = colours[piece.bar.request_id] if len(requests) > 1 else _SHADES[index % len(_SHADES)]
            yield _drawn(piece, scale, top, colour)


def _drawn(piece: _Piece, scale: _Scale, top: int, colour: str) -> str:
    x = _LEFT + scale.pixels(piece.start)
    width = max(_NARROWEST, scale.pixels(piece.end - piece.start))
    style = "bar edged" if width >= _EDGED else "bar"
    rect = (
        f'<rect class="{style}" x="{x:.2f}" y="{top + _INSET}" width="{width:.2f}" height="{_ROW - 2 * _INSET}" '
        f'fill="{colour}"><title>{_escape(_hover_text(piece, scale))}</title></rect>'
    )
    label = piece.bar.label
    if not label or _CHARACTER * len(label) + 2 * _INSET > width:
        return rect
    return f'{rect}<text class="label" x="{x + _INSET:.2f}" y="{top + 18}">{_escape(label)}</text>'


def _hover_text(piece: _Piece, scale: _Scale) -> str:
    bar = piece.bar
    start, end, duration = (scale.text(time) for time in (piece.start, piece.end, piece.end - piece.start))
    lines = [bar.label, bar.request_id, f"{start} – {end} ({duration})"]
    lines.extend(f"{key}: {value}" for key, value in bar.details.items())
    return "\n".join(line for line in lines if line)


def _name(lane: str) -> str:
    room = int((_LEFT - 16) / _CHARACTER)
    return _escape(lane if len(lane) <= room else f"{lane[: room - 1]}…")


def _escape(text: str) -> str:
    """For XML. What XML cannot hold at all becomes "�"."""
    return html.escape(_NOT_IN_XML.sub("\ufffd", text))
