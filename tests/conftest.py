"""Settings for all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from midstride import waiting

# Examples that write files take uneven time, and a shared machine makes it more uneven.
settings.register_profile("midstride", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("midstride")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made before it tried again, in seconds; nobody waits for them here."""
    made: list[float] = []
    monkeypatch.setattr(waiting, "_sleep", made.append)
    return made
