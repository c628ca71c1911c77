"""The policies by the names that the cluster file knows them by."""

from __future__ import annotations

from router.policies import (
    Policy,
    least_loaded,
    power_of_two,
    predicted_ttft,
    prefix_affinity,
    round_robin,
)

POLICIES: dict[str, Policy] = {
    "round_robin": round_robin.choose,
    "least_loaded": least_loaded.choose,
    "power_of_two": power_of_two.choose,
    "predicted_ttft": predicted_ttft.choose,
    "prefix_affinity": prefix_affinity.choose,
}
