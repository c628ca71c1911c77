"""The profiles: they split as groups do, and reproduce what they were fitted to."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.fit_profiles import SETUPS, Figure, recurrent_seconds, simulated_seconds
from headwater.errors import InvalidConfig
from prefill_node.profiles import PROFILES, Profile


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
@pytest.mark.parametrize("pp", [1, 4, 8])
def test_stages_share_the_layers(profile: Profile, pp: int) -> None:
    stages = profile.cost(pp).stages
    assert len(stages) == pp
    assert all(stage.seconds(0, 1) > 0 for stage in stages)
    whole = [sum(values) for values in zip(*(dataclasses.astuple(stage) for stage in stages), strict=True)]
    expected = dataclasses.replace(profile.layers, base=profile.layers.base + pp * profile.step_seconds)
    assert whole == pytest.approx(dataclasses.astuple(expected), rel=1e-9, abs=1e-20)
    # The larger shares are late.
    assert [stage.per_token for stage in stages] == sorted(stage.per_token for stage in stages)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_there_are_no_stages_without_layers(profile: Profile) -> None:
    assert len(profile.cost(profile.num_layers).stages) == profile.num_layers
    with pytest.raises(InvalidConfig, match=f"{profile.num_layers} layers"):
        profile.cost(profile.num_layers + 1)


def test_every_profile_says_how_far_off_each_figure_is() -> None:
    assert {setup.profile: [figure.name for figure in setup.figures] for setup in SETUPS} == {
        name: list(profile.residuals) for name, profile in PROFILES.items()
    }
    assert max(abs(residual) for profile in PROFILES.values() for residual in profile.residuals.values()) < 0.03


@pytest.mark.parametrize(
    ("name", "figure"),
    [pytest.param(setup.profile, figure, id=figure.name) for setup in SETUPS for figure in setup.figures],
)
def test_a_figure_is_reproduced_as_well_as_the_profile_says(name: str, figure: Figure) -> None:
    profile = PROFILES[name]
    simulated = figure.value(profile, simulated_seconds)
    assert simulated == pytest.approx(figure.published * (1 + profile.residuals[figure.name]), rel=0.01)
    # What the fit searched with.
    assert simulated == pytest.approx(figure.value(profile, recurrent_seconds))
