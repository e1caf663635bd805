"""Settings for all tests."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from midstride import waiting
from midstride.save import engine

# Examples that write files take uneven time, and a shared machine makes it more uneven.
settings.register_profile("midstride", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("midstride")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made before it tried again, in seconds; nobody waits for them here."""
    made: list[float] = []
    monkeypatch.setattr(waiting, "_sleep", made.append)
    return made


@pytest.fixture(autouse=True)
def writer_on_a_thread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each of two thousand tests would take minutes: those that are about it say so by a mark."""
    if request.node.get_closest_marker("writer_process") is None:
        monkeypatch.setattr(engine, "_interactive", lambda: True)
