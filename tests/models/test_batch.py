"""Steps as the kernels get them."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from dsv4lite.models.deepseek_v4.batch import Rotary, make_batch
from dsv4lite.state.paging import SequenceInput

CPU = torch.device("cpu")
ROTARY = Rotary.of(main=torch.ones(32), compress=torch.ones(32), ratios=(0, 4, 128), device=CPU)


@pytest.mark.parametrize("lengths", [(1,), (2,), (3, 5), (1, 1, 7), (301,), (1, 1, 1, 1, 302)])
def test_places_of_a_step_are_aligned_whatever_its_lengths(lengths: tuple[int, ...]) -> None:
    """Triton compiles a kernel anew for addresses that are no multiples of 16: prompts of most lengths met that in traffic."""
    sequences = [
        SequenceInput(
            token_ids=range(7, 7 + n),
            start=5 + i,
            slot=i,
            pages=[3 * i, 3 * i + 1],
            window_first=0,
            window_pages=range(1 + n // 64),
        )
        for i, n in enumerate(lengths)
    ]
    batch = make_batch(sequences, ROTARY, CPU, deterministic=False)
    places = [getattr(batch.paging, field.name) for field in fields(batch.paging)]
    tensors = [place for place in places if isinstance(place, Tensor)]
    assert len(tensors) > 8
    assert all(tensor.storage_offset() * tensor.element_size() % 16 == 0 for tensor in tensors)
    assert batch.token_ids_T.tolist() == [7 + j for n in lengths for j in range(n)]
    assert batch.paging.positions_T.tolist() == [5 + i + j for i, n in enumerate(lengths) for j in range(n)]
    assert batch.paging.lens_S.tolist() == list(lengths)
    assert batch.paging.grow_SP.tolist() == [[3 * i, 3 * i + 1] for i in range(len(lengths))]
