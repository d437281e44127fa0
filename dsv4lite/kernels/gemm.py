"""Matrix products whose bits do not depend on how many rows share the call.

Library GEMMs pick their kernel, and so their order of summation, from the number of rows. With ``row_tile`` every product runs
in tiles of exactly that many rows (the last one padded), so that a row's result is a function of the row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear as _linear
from torch.nn.functional import pad

ROW_TILE = 16


def matmul_rows(x_MK: Tensor, w_NK: Tensor, row_tile: int | None = None) -> Tensor:
    """Return ``x @ w.T`` [M, N] in the operands' dtype.

    Args:
        x_MK: Rows.
        w_NK: Weights, ``[out, in]``.
        row_tile: ``None`` leaves the order of summation to the library; a number makes each row independent of the others.
    """
    rows = x_MK.shape[0]
    if row_tile is None or rows == row_tile:
        return _linear(x_MK, w_NK)
    if rows == 0:
        return x_MK.new_empty(0, w_NK.shape[0])
    padded = pad(x_MK, (0, 0, 0, -rows % row_tile)) if rows % row_tile else x_MK
    tiles = [_linear(tile, w_NK) for tile in padded.contiguous().split(row_tile)]
    return torch.cat(tiles)[:rows]
