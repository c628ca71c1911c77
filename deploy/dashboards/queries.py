"""PromQL that panels have in common."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.dashboards.panels import Query

# What $node selects of a process's series.
NODE = 'node=~"$node"'


def quantiles(histogram: str, *quantiles: float, by: str = "", only: str = NODE) -> list[Query]:
    """Of a histogram, by labels ("node, stage") that name the series."""
    labels = [label.strip() for label in by.split(",") if label]
    name = " ".join(["p{percent}", *(f"{{{{{label}}}}}" for label in labels)])
    kept = ", ".join(["le", *labels])
    return [
        Query(
            f"histogram_quantile({quantile:g}, sum by ({kept}) (rate({histogram}_bucket{{{only}}}[$__rate_interval])))",
            name.replace("{percent}", f"{100 * quantile:g}"),
        )
        for quantile in quantiles
    ]


def rate(counter: str, by: str, legend: str, only: str = NODE) -> Query:
    return Query(f"sum by ({by}) (rate({counter}{{{only}}}[$__rate_interval]))", legend)


def increase(counter: str, by: str, legend: str, only: str = NODE) -> Query:
    return Query(f"sum by ({by}) (increase({counter}{{{only}}}[$__rate_interval]))", legend)


def buckets(histogram: str) -> list[Query]:
    return [increase(f"{histogram}_bucket", "le", "{{le}}")]


def states(metric: str, meanings: Sequence[tuple[int, str, str]]) -> list[Query]:
    """One series a group, whose value is the number of its state: the worst that any router sees.

    Args:
        meanings: number, state and colour, the worst last.
    """
    numbered = (
        f'(max by (group) (headwater_{metric}{{{NODE}, state="{state}"}} == 1) * {number})'
        for number, state, _ in reversed(meanings)
    )
    return [Query(" or ".join(numbered), "{{group}}")]
