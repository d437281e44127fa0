"""Outputs under random JSON schemas are valid, by another package's validator; the model is random, with the shipped vocabulary."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dsv4lite import LLM, MTP, tiny_model
from tests.e2e.engines import MODEST, SMALL, write_model
from tests.e2e.schemas import problem_of, random_schema, run

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")


@pytest.mark.parametrize(("speculative", "first"), [(None, 0), (MTP(2), 20)], ids=["plain", "mtp"])
def test_outputs_fit_their_schemas(speculative: MTP | None, first: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path, {**SMALL, "vocab_size": 4096})
    schemas = [random_schema(random.Random(i)) for i in range(first, first + 20)]
    with LLM(str(folder), tokenizer=tiny_model(), speculative=speculative, **MODEST) as llm:
        outputs = run(llm, schemas, 400)
    assert [problem_of(schema, output) for schema, output in zip(schemas, outputs, strict=True)] == [None] * len(schemas)
