"""How Hypothesis runs in the suite: the same examples everywhere, and a slow machine is no failure.

New examples are the campaigns' business (`tests/campaign.py`).
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")
