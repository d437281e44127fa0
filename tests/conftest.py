"""Settings for the whole test suite."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No test may depend on how fast, or how busy, the machine is.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
