"""Timelines by their exact numbers, and lanes by a rule that holds for any bars."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.timeline import Bar, bubble_share, chrome_trace, gantt_svg

BLUE, CYAN, ORANGE = "#77AADD", "#99DDFF", "#EE8866"
# The picture puts time 0 at 160 pixels and the last bar's end 1000 pixels further.
LEFT, PLOT = 160, 1000

times = st.floats(0, 1e-5) | st.floats(0, 1e6) | st.integers(0, 12).map(float)
tracks = st.sampled_from(["stage 0", "stage 1"])
texts = st.text(st.characters(codec=None))


@st.composite
def any_bars(draw: st.DrawFn, instants: st.SearchStrategy[float] = times) -> Bar:
    start, end = sorted((draw(instants), draw(instants)))
    return Bar(draw(tracks), start, end, draw(texts), draw(texts))


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def placed(trace: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    return [(event["name"], event["tid"], event["ts"], event["dur"]) for event in of_phase(trace, "X")]


def thread_names(trace: dict[str, Any]) -> dict[int, str]:
    return {event["tid"]: event["args"]["name"] for event in of_phase(trace, "M") if event["name"] == "thread_name"}


class Picture:
    """What a viewer of the SVG sees."""

    def __init__(self, svg: str) -> None:
        self.root = ET.fromstring(svg)

    def of(self, tag: str, name: str) -> list[ET.Element]:
        elements = self.root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")
        return [element for element in elements if name in element.get("class", "").split()]

    def texts(self, name: str) -> list[str]:
        return ["".join(element.itertext()) for element in self.of("text", name)]

    def bars(self) -> list[tuple[float, float, float]]:
        """Of each bar left, top and width."""
        rects = [bar.attrib for bar in self.of("rect", "bar")]
        return [(float(rect["x"]), float(rect["y"]), float(rect["width"])) for rect in rects]

    def hover_texts(self) -> list[str]:
        return ["".join(bar.itertext()) for bar in self.of("rect", "bar")]

    def colours(self) -> list[str]:
        return [bar.attrib["fill"] for bar in self.of("rect", "bar")]


def test_a_trace_as_the_format_has_it() -> None:
    bars = [
        Bar("stage 1", 10.25, 10.5, "0–4096", "a", {"tokens": [0, 4096]}),
        Bar("stage 0", 10.0, 10.25, "0–4096"),
    ]
    trace = chrome_trace(bars, ["stage 0", "stage 1"])
    assert json.loads(json.dumps(trace)) == {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": "headwater"}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "stage 0"}},
            {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 1, "args": {"sort_index": 1}},
            {"name": "0–4096", "ph": "X", "pid": 1, "tid": 1, "ts": 0, "dur": 250_000, "args": {}},
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": 2, "args": {"name": "stage 1"}},
            {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": 2, "args": {"sort_index": 2}},
            {
                "name": "0–4096",
                "ph": "X",
                "pid": 1,
                "tid": 2,
                "ts": 250_000,
                "dur": 250_000,
                "args": {"tokens": [0, 4096], "request": "a"},
            },
        ],
    }
    assert bars[0].details == {"tokens": [0, 4096]}


def test_overlapping_bars_take_the_first_lane_that_is_free() -> None:
    bars = [
        Bar("other", 0, 8, "e"),
        # Given out of order.
        Bar("transfer", 3, 6, "d"),
        Bar("transfer", 0, 4, "a"),
        Bar("transfer", 1, 3, "b"),
        Bar("transfer", 2, 5, "c"),
        Bar("transfer", 4, 5, "f"),
    ]
    trace = chrome_trace(bars, ["transfer", "other"])
    assert thread_names(trace) == {1: "transfer", 2: "transfer (2)", 3: "transfer (3)", 4: "other"}
    second = 1_000_000
    assert placed(trace) == [
        ("a", 1, 0, 4 * second),
        ("f", 1, 4 * second, second),
        ("b", 2, second, 2 * second),
        ("d", 2, 3 * second, 3 * second),
        ("c", 3, 2 * second, 3 * second),
        ("e", 4, 0, 8 * second),
    ]


def test_bars_that_meet_share_a_lane_despite_floats() -> None:
    # 0.1 + 0.2 is a little more than 0.3.
    trace = chrome_trace([Bar("stage 0", 0, 0.1 + 0.2, "a"), Bar("stage 0", 0.3, 0.4, "b")], ["stage 0"])
    assert placed(trace) == [("a", 1, 0, 300_000), ("b", 1, 300_000, 100_000)]


def test_a_bar_of_no_length_shares_a_lane_with_one_that_starts_there() -> None:
    trace = chrome_trace([Bar("stage 0", 1, 2, "a"), Bar("stage 0", 1, 1, "b")], ["stage 0"])
    assert placed(trace) == [("b", 1, 0, 0), ("a", 1, 0, 1_000_000)]


def test_both_ends_are_rounded_so_that_bars_below_a_microsecond_still_meet() -> None:
    trace = chrome_trace([Bar("stage 0", 0, 1.4e-6, "a"), Bar("stage 0", 1.4e-6, 2.8e-6, "b")], ["stage 0"])
    assert placed(trace) == [("a", 1, 0, 1), ("b", 1, 1, 2)]


@given(st.lists(any_bars(), max_size=30))
def test_no_two_events_of_a_thread_overlap(bars: list[Bar]) -> None:
    trace = chrome_trace(bars, ["stage 0", "stage 1"])
    events = placed(trace)
    assert sorted(name for name, *_ in events) == sorted(bar.label for bar in bars)
    by_thread = defaultdict(list)
    for _, tid, start, duration in events:
        by_thread[tid].append((start, start + duration))
    for spans in by_thread.values():
        spans.sort()
        assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


@given(st.lists(any_bars(st.integers(0, 12).map(float)).filter(lambda bar: bar.start < bar.end), max_size=30))
def test_a_track_has_as_many_lanes_as_bars_at_one_time(bars: list[Bar]) -> None:
    at_once = {
        track: max(sum(bar.track == track and bar.start <= at < bar.end for bar in bars) for at in range(12))
        for track in ("stage 0", "stage 1")
    }
    names = thread_names(chrome_trace(bars, list(at_once))).values()
    for track, most in at_once.items():
        expected = [track, *(f"{track} ({number})" for number in range(2, most + 1))]
        assert [name for name in names if name.startswith(track)] == expected


def test_without_bars_a_trace_has_threads_and_no_events() -> None:
    trace = chrome_trace([], ["stage 0"])
    assert of_phase(trace, "X") == []
    assert thread_names(trace) == {1: "stage 0"}


def test_a_bar_on_an_unknown_track_is_refused() -> None:
    bars = [Bar("stage 7", 0, 1, "a")]
    with pytest.raises(ValueError, match="'stage 7'"):
        chrome_trace(bars, ["stage 0"])
    with pytest.raises(ValueError, match="'stage 7'"):
        gantt_svg(bars, ["stage 0"], "title")


@pytest.mark.parametrize(("start", "end"), [(1.0, 0.5), (0.0, math.nan), (math.nan, 0.0)])
def test_a_bar_that_ends_before_it_starts_is_refused(start: float, end: float) -> None:
    with pytest.raises(ValueError, match="'stage 0' starts at"):
        Bar("stage 0", start, end, "a")


def test_bars_are_drawn_to_scale_in_the_rows_of_their_lanes() -> None:
    bars = [
        Bar("stage 1", 5.5, 7.0, "c"),
        Bar("stage 0", 5.0, 6.0, "a"),
        Bar("stage 0", 5.5, 7.0, "b"),
    ]
    picture = Picture(gantt_svg(bars, ["stage 0", "stage 1"], "title"))
    assert picture.bars() == [(160, 67, 500), (410, 95, 750), (410, 123, 750)]
    # The name, and again for who hovers over it.
    assert picture.texts("track") == ["stage 0" * 2, "stage 0 (2)" * 2, "stage 1" * 2]
    assert [float(text.attrib["y"]) for text in picture.of("text", "track")] == [82, 110, 138]
    # Three rows of 28 between header and footer.
    assert (picture.root.get("width"), picture.root.get("height")) == ("1200", "164")


@pytest.mark.parametrize(
    ("span", "ticks", "step"),
    [
        (1.0, ["0 s", "0.1 s", "0.2 s", "0.3 s", "0.4 s", "0.5 s", "0.6 s", "0.7 s", "0.8 s", "0.9 s", "1 s"], 0.1),
        (1.1, ["0 s", "0.2 s", "0.4 s", "0.6 s", "0.8 s", "1 s"], 0.2),
        (0.25, ["0 ms", "50 ms", "100 ms", "150 ms", "200 ms", "250 ms"], 0.05),
        (0.0021, ["0 ms", "0.5 ms", "1 ms", "1.5 ms", "2 ms"], 0.0005),
        (70.0, ["0 s", "10 s", "20 s", "30 s", "40 s", "50 s", "60 s", "70 s"], 10),
    ],
)
def test_ticks_are_round_and_stand_where_they_say(span: float, ticks: list[str], step: float) -> None:
    picture = Picture(gantt_svg([Bar("stage 0", 100.0, 100.0 + span, "a")], ["stage 0"], "title"))
    assert picture.texts("tick") == ticks
    places = [float(tick.attrib["x"]) for tick in picture.of("text", "tick")]
    assert places == pytest.approx([LEFT + PLOT * step * index / span for index in range(len(ticks))], abs=0.01)


def test_a_single_requests_bars_alternate_along_each_lane() -> None:
    bars = [Bar(f"stage {stage}", stage + at, stage + at + 1, "", "a") for stage in range(2) for at in range(3)]
    picture = Picture(gantt_svg(bars, ["stage 0", "stage 1"], "title"))
    assert picture.colours() == [BLUE, CYAN, BLUE] * 2


def test_with_several_requests_each_has_a_colour_everywhere_by_order_of_start() -> None:
    bars = [
        Bar("stage 0", 3, 4, "", "late"),
        Bar("stage 0", 1, 2, "", "early"),
        Bar("stage 0", 2, 3, "", "late"),
        Bar("stage 1", 1, 2, "", "late"),
        Bar("stage 1", 0, 1, "", "early"),
    ]
    picture = Picture(gantt_svg(bars, ["stage 0", "stage 1"], "title"))
    assert picture.colours() == [BLUE, ORANGE, ORANGE, BLUE, ORANGE]
    # Also where the request that starts first is drawn last.
    picture = Picture(gantt_svg([bars[0], bars[4]], ["stage 0", "stage 1"], "title"))
    assert picture.colours() == [ORANGE, BLUE]


def test_the_ninth_request_has_the_first_ones_colour() -> None:
    bars = [Bar("stage 0", at, at + 1, "", str(at)) for at in range(9)]
    colours = Picture(gantt_svg(bars, ["stage 0"], "title")).colours()
    assert len(set(colours[:8])) == 8
    assert colours[8] == colours[0]


def test_a_label_is_written_where_it_fits() -> None:
    # Six characters take 46.2 pixels with what is left free at both sides: of 1000 in all, 46 are too few.
    bars = [
        Bar("stage 0", 0.0, 0.046, "0–4096"),
        Bar("stage 0", 0.1, 0.147, "1–4096"),
        Bar("stage 0", 0.5, 1.0, ""),
    ]
    picture = Picture(gantt_svg(bars, ["stage 0"], "title"))
    assert picture.texts("label") == ["1–4096"]
    assert [float(label.attrib["x"]) for label in picture.of("text", "label")] == [263]


def test_a_bar_of_no_length_can_still_be_seen() -> None:
    assert Picture(gantt_svg([Bar("stage 0", 3, 3, "a")], ["stage 0"], "title")).bars() == [(160, 67, 0.5)]


def test_only_bars_wide_enough_have_an_edge() -> None:
    bars = [Bar("stage 0", 0.0, 0.004, "a"), Bar("stage 0", 0.1, 0.103, "b"), Bar("stage 0", 0.5, 1.0, "c")]
    picture = Picture(gantt_svg(bars, ["stage 0"], "title"))
    assert [bar.attrib["class"] for bar in picture.of("rect", "bar")] == ["bar edged", "bar", "bar edged"]


def test_hovering_over_a_bar_tells_all_about_it() -> None:
    bars = [
        Bar("stage 0", 1.0, 1.5, "0–4096", "a", {"tokens": [0, 4096], "num_bytes": 123}),
        Bar("stage 0", 1.5, 3.0, ""),
    ]
    assert Picture(gantt_svg(bars, ["stage 0"], "title")).hover_texts() == [
        "0–4096\na\n0 s – 0.5 s (0.5 s)\ntokens: [0, 4096]\nnum_bytes: 123",
        "0.5 s – 2 s (1.5 s)",
    ]


def test_text_is_escaped() -> None:
    bars = [Bar("<stage> & co", 0, 1, '<b> & "c"', "a\x00b", {"<key>": "<value>"})]
    svg = gantt_svg(bars, ["<stage> & co"], "</svg> & more")
    assert "&lt;/svg&gt; &amp; more" in svg
    picture = Picture(svg)
    assert picture.texts("title") == ["</svg> & more"]
    assert picture.texts("track") == ["<stage> & co" * 2]
    assert picture.texts("label") == ['<b> & "c"']
    assert picture.hover_texts() == ['<b> & "c"\na�b\n0 s – 1 s (1 s)\n<key>: <value>']


@given(st.lists(any_bars(), max_size=5), texts)
def test_any_bars_and_any_text_give_an_svg_that_parses(bars: list[Bar], title: str) -> None:
    picture = Picture(gantt_svg(bars, ["stage 0", "stage 1"], title))
    assert len(picture.bars()) == len(bars)


def test_a_long_track_name_is_cut_and_whole_for_who_hovers() -> None:
    name = "transfer of rank 13 to decode-7"
    (text,) = Picture(gantt_svg([Bar(name, 0, 1, "a")], [name], "title")).of("text", "track")
    assert [text[0].text, text[0].tail] == [name, "transfer of rank 13 …"]


def test_the_picture_needs_nothing_else_and_knows_the_dark() -> None:
    svg = gantt_svg([Bar("stage 0", 0, 1, "a")], ["stage 0"], "title")
    assert "@media (prefers-color-scheme: dark)" in svg
    assert "script" not in svg
    assert [part for part in svg.split('"') if "://" in part] == ["http://www.w3.org/2000/svg"]


def test_without_bars_the_picture_says_so() -> None:
    picture = Picture(gantt_svg([], ["stage 0"], "A title"))
    assert [element.text for element in picture.root if element.tag.endswith("text")] == ["A title", "Nothing to show."]
    assert picture.bars() == []


def test_ten_thousand_bars() -> None:
    bars = [Bar(f"stage {at % 4}", at, at + 4, "a", str(at % 7)) for at in range(10_000)]
    picture = Picture(gantt_svg(bars, [f"stage {stage}" for stage in range(4)], "title"))
    assert len(picture.bars()) == 10_000
    assert len(picture.texts("track")) == 4


@pytest.mark.parametrize(
    ("bars", "share"),
    [
        ([], 1.0),
        ([(4, 12)], 0.0),
        ([(0, 20)], 0.0),
        ([(0, 4), (12, 20)], 1.0),
        # Overlapping, one within another, given out of order: 5 to 10 is busy.
        ([(7, 10), (5, 9), (6, 8)], 0.375),
        # Sticking out at both ends, a gap of 2 between.
        ([(0, 6), (8, 20)], 0.25),
        ([(4, 8), (8, 12)], 0.0),
        ([(6, 6)], 1.0),
    ],
)
def test_bubble_share(bars: list[tuple[float, float]], share: float) -> None:
    all_bars = [Bar("stage 0", start, end, "") for start, end in bars]
    assert bubble_share([*all_bars, Bar("stage 1", 4, 12, "")], "stage 0", 4, 12) == share


@given(st.lists(any_bars(st.integers(0, 12).map(float)), max_size=10))
def test_bubble_share_against_counting_seconds(bars: list[Bar]) -> None:
    idle = sum(not any(bar.track == "stage 0" and bar.start <= at < bar.end for bar in bars) for at in range(2, 10))
    assert bubble_share(bars, "stage 0", 2, 10) == idle / 8


def test_bubble_share_of_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="no time lies between 2 and 2"):
        bubble_share([], "stage 0", 2, 2)
