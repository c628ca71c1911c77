"""Which layers each stage gets, by what layers were measured to take. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# Sums in another order differ by less.
_TIE = 1e-9


def partition(layer_seconds: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """First layer of each stage, and the number of layers: the split whose slowest stage takes least, and of those the
    most even one, with larger shares on later stages (published advice for 61 layers on 4 stages: 15, 15, 15, 16).

    Args:
        layer_seconds: of each layer.
        first: what the first stage does beside its layers (embedding).
        last: what the last one does (norm, head).

    Raises:
        ValueError: there are more stages than layers.
    """
    num_layers = len(layer_seconds)
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be spread over {num_stages} stages")
    before = [0.0]
    for seconds in layer_seconds:
        before.append(before[-1] + seconds)

    def stage_seconds(stage: int, start: int, end: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return before[end] - before[start] + extra

    def split(worth: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """The least value of all stages, where `worth` joins a stage's seconds to the value of those after it."""
        value = [worth(stage_seconds(num_stages - 1, start, num_layers), 0.0) for start in range(num_layers)]
        choices: list[list[int]] = []
        for stage in range(num_stages - 2, -1, -1):
            choice, following, value = [0] * num_layers, value, [float("inf")] * num_layers
            for start in range(num_layers - (num_stages - 1 - stage)):
                # From small shares to large ones: a larger one must be better.
                for end in range(start + 1, num_layers - (num_stages - 2 - stage)):
                    candidate = worth(stage_seconds(stage, start, end), following[end])
                    if candidate < value[start] * (1 - _TIE) or value[start] == float("inf"):
                        value[start], choice[start] = candidate, end
            choices.append(choice)
        boundaries = [0]
        for choice in reversed(choices):
            boundaries.append(choice[boundaries[-1]])
        return value[0], [*boundaries, num_layers]

    slowest, _ = split(max)
    # Of those, the most even one.
    _, boundaries = split(lambda seconds, rest: seconds**2 + rest if seconds <= slowest * (1 + _TIE) else float("inf"))
    return boundaries
