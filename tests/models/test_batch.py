"""Steps as the kernels get them."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from dsv4lite.scheduling.step_plan import SequencePlan
from dsv4lite.state.paging import make_paging


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
