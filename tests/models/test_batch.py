"""Steps as the kernels get them."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from dsv4lite.engine.packing import padding
from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.paging import make_paging
from dsv4lite.state.spec import StateSizes
from dsv4lite.state.store import StateCache
from tests.mla import random_model


@pytest.mark.parametrize("lengths", [(1,), (2,), (3, 5), (1, 1, 7), (301,), (1, 1, 1, 1, 302)])
def test_places_of_a_step_are_aligned_whatever_its_lengths(lengths: tuple[int, ...]) -> None:
    """Triton compiles a kernel anew for addresses that are no multiples of 16: prompts of most lengths met that in traffic."""
    sequences = [
        SequencePlan(
            seq_id=i,
            slot=i,
            start=5 + i,
            token_ids=tuple(range(7, 7 + n)),
            pages=(3 * i, 3 * i + 1),
            window_first=0,
            window_pages=tuple(range(1 + n // 64)),
            sample=True,
        )
        for i, n in enumerate(lengths)
    ]
    token_ids_T, paging, longest = make_paging(sequences, torch.device("cpu"))
    places = [getattr(paging, field.name) for field in fields(paging)]
    tensors = [place for place in places if isinstance(place, Tensor)]
    assert len(tensors) > 8 and longest == max(5 + i + n for i, n in enumerate(lengths))
    assert all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in tensors)
    assert token_ids_T.tolist() == [7 + j for n in lengths for j in range(n)]
    assert paging.positions_T.tolist() == [5 + i + j for i, n in enumerate(lengths) for j in range(n)]
    assert paging.lens_S.tolist() == list(lengths)
    assert paging.grow_SP.tolist() == [[3 * i, 3 * i + 1] for i in range(len(lengths))]


@pytest.mark.parametrize("variant", ["v2_lite", "v32"])
def test_padding_of_several_pages_runs_and_changes_no_state(variant: str) -> None:
    """A step of it finds the kernels that a prompt of as many tokens launches."""
    model = random_model(variant)
    sizes = StateSizes(grow_pages=1, window_pages=0, slots=1, snapshots=0)
    cache = StateCache.allocate(model.state_spec, sizes, torch.device("cpu"))
    with torch.no_grad():
        hidden_TD = model(padding(600, model), cache.layers)
    assert hidden_TD.shape[0] == 600 and hidden_TD.isfinite().all()
    stores = [store for layer in cache.layers for store in layer.stores.values()]
    assert stores and not any(store.memory.any() for store in stores)
