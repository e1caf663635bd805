"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Examples that write files take uneven time, and a shared machine makes it more uneven.
settings.register_profile("midstride", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("midstride")
