"""A Prometheus collector of an engine's counters; written for prometheus_client 0.26.

registry.register(EngineCollector(llm))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, StateSetMetricFamily
from prometheus_client.registry import Collector

from dsv4lite.engine.engine import EngineStats
from dsv4lite.errors import EngineDeadError, EngineStateError
from dsv4lite.llm import LLM, AsyncLLM
from dsv4lite.request import Phase

COUNTERS: Mapping[str, str] = MappingProxyType(
    {
        "steps": "Steps of the engine.",
        "prompt_tokens": "Tokens of sequences that started or started again, cached ones included.",
        "cached_tokens": "Prompt tokens from the prefix cache.",
        "generated_tokens": "Tokens sampled.",
        "preemptions": "How often a sequence gave up its state.",
        "draft_tokens": "Draft tokens that steps verified.",
        "accepted_draft_tokens": "Draft tokens that were accepted.",
    }
)
GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "running_sequences": "Sequences that hold state.",
        "waiting_sequences": "Sequences that wait for a place.",
        "kv_usage_ratio": "Pages in use, cached prefixes excluded, from 0 to 1.",
        "step_seconds": "Seconds of the last step.",
        "step_host_seconds": "The host's part of the last step.",
        "weight_version": "The version of the last weight update.",
    }
)


class EngineCollector(Collector):
    """Reads ``stats()`` when the registry is scraped; nothing runs in between.

    Names begin with ``dsv4lite_``. An engine that has not started, was closed or has failed has ``dsv4lite_state``
    and ``dsv4lite_weight_version`` alone.

    Args:
        llm: The engine.
        labels: Labels of all metrics, such as ``{"model": "v4-flash"}``, by which several engines in one registry differ. Values
            become texts, as with the package's own metrics.
    """

    def __init__(self, llm: LLM | AsyncLLM, labels: Mapping[str, object] | None = None) -> None:
        self._llm = llm
        self._labels = {name: str(value) for name, value in (labels or {}).items()}

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: metrics of several engines in one registry have the same names and differ by labels."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now."""
        names, values, now = list(self._labels), list(self._labels.values()), self._llm.state
        state = StateSetMetricFamily("dsv4lite_state", "The engine's state.", labels=names)
        state.add_metric(values, {phase.value: phase is now for phase in Phase})
        yield state
        found: dict[str, float] = {"weight_version": self._llm.weight_version}
        with suppress(EngineStateError, EngineDeadError):  # new, closed or failed
            found |= _numbers(self._llm.stats())
        for kind, table in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name in table.keys() & found.keys():
                metric = kind(f"dsv4lite_{name}", table[name], labels=names)
                metric.add_metric(values, found[name])
                yield metric


def _numbers(stats: EngineStats) -> dict[str, float]:
    return {
        **{name: getattr(stats, name) for name in ("steps", "prompt_tokens", "cached_tokens", "generated_tokens", "preemptions")},
        "draft_tokens": stats.speculation.drafted,
        "accepted_draft_tokens": stats.speculation.accepted,
        "running_sequences": stats.num_running,
        "waiting_sequences": stats.num_waiting,
        "kv_usage_ratio": stats.kv_usage,
        "step_seconds": stats.step_s,
        "step_host_seconds": stats.host_s,
    }
