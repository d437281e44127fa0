"""The Prometheus collector, with the real package where it is installed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from dsv4lite.errors import CapacityError
from dsv4lite.llm import LLM
from dsv4lite.request import Phase, SamplingParams
from tests.e2e.engines import MODEST, write_model


@pytest.fixture
def registry() -> Any:
    return pytest.importorskip("prometheus_client").CollectorRegistry(auto_describe=True)


def test_values_of_labels_become_texts(registry: Any, tmp_path: Path) -> None:
    """A number, such as a rank, failed every scrape of the whole registry."""
    from prometheus_client import generate_latest

    from dsv4lite.integrations.prometheus import EngineCollector

    registry.register(EngineCollector(LLM(write_model(tmp_path), **MODEST), {"rank": 0}))
    assert 'dsv4lite_weight_version{rank="0"} 0.0' in generate_latest(registry).decode()


def test_scrape_has_the_engine_s_counters_and_state(registry: Any, tmp_path: Path) -> None:
    from prometheus_client import generate_latest

    from dsv4lite.integrations.prometheus import COUNTERS, GAUGES, EngineCollector

    llm = LLM(write_model(tmp_path), **MODEST)
    registry.register(EngineCollector(llm, {"model": "small"}))
    assert registry.get_sample_value("dsv4lite_state", {"model": "small", "dsv4lite_state": "new"}) == 1
    assert registry.get_sample_value("dsv4lite_generated_tokens_total", {"model": "small"}) is None
    with llm:
        llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
        stats = llm.stats()
        wanted = {"steps_total": stats.steps, "generated_tokens_total": 4, "prompt_tokens_total": 3, "running_sequences": 0}
        assert {name: registry.get_sample_value(f"dsv4lite_{name}", {"model": "small"}) for name in wanted} == wanted
        text = generate_latest(registry).decode()
        names = {*(f"{name}_total" for name in COUNTERS), *GAUGES}
        assert {name for name in names if f"\ndsv4lite_{name}{{" not in text} == set()
    assert registry.get_sample_value("dsv4lite_state", {"model": "small", "dsv4lite_state": "closed"}) == 1


def test_scrape_of_an_engine_whose_state_changes_has_one_state(registry: Any) -> None:
    """The state was read anew for each name: it could be none of them, or two."""
    from dsv4lite.integrations.prometheus import EngineCollector

    states = itertools.cycle(Phase)

    class Changing(LLM):
        @property
        def state(self) -> Phase:
            return next(states)

    registry.register(EngineCollector(Changing("anywhere")))
    for _ in Phase:
        (family,) = [family for family in registry.collect() if family.name == "dsv4lite_state"]
        assert sum(sample.value for sample in family.samples) == 1


def test_failed_engine_has_its_state(registry: Any, tmp_path: Path) -> None:
    """The scrape raised ``EngineDeadError``."""
    from dsv4lite.integrations.prometheus import EngineCollector

    llm = LLM(write_model(tmp_path), **{**MODEST, "kv_cache_memory_bytes": 1})
    registry.register(EngineCollector(llm))
    with pytest.raises(CapacityError), llm:
        pass
    assert registry.get_sample_value("dsv4lite_state", {"dsv4lite_state": "failed"}) == 1
    assert registry.get_sample_value("dsv4lite_steps_total") is None


def test_engines_of_one_registry_differ_by_their_labels(registry: Any, tmp_path: Path) -> None:
    from dsv4lite.integrations.prometheus import EngineCollector

    for name in ("a", "b"):
        registry.register(EngineCollector(LLM("anywhere"), {"model": name}))
    assert [registry.get_sample_value("dsv4lite_weight_version", {"model": name}) for name in ("a", "b")] == [0, 0]
