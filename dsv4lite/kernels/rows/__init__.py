"""Cache rows in pages: how one vector is stored, written and read.

A page of B rows of a packed format holds the data of all rows first, then the scales of all rows, then padding to a multiple of one
row's data (for 584-byte rows: row i at 576 i, its scales at 576 B + 8 i, page padded to a multiple of 576):

    584-byte kv row   448 e4m3 | 64 bf16 || 7 e8m0 + 1 pad           specification 5.2, any split of nope and rope channels
    68-byte key row   128 e2m1 in 64 bytes || 4 e8m0                  5.3, after the Hadamard transform
    132-byte key row  128 e4m3 || 1 float32 scale                     5.3
    656-byte latent   512 e4m3 | 4 float32 scales | 64 bf16           MLA specification 5.2, any split
    unquantized       the vector itself in float32 or bfloat16

The address of a row is ``page * B + place``. Address -1 means no row: callers must not write it, and reading it returns row 0.
Numerics: reading returns what ``round_fp8`` and ``round_fp4`` return for the written vector, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dsv4lite.kernels.dispatch import ReferenceOnly
from dsv4lite.kernels.quantize import (
    FP8_AMAX_FLOOR,
    FP8_MAX,
    dequantize_fp4,
    dequantize_fp8,
    e8m0_to_float,
    pack_fp4,
    quantize_fp4,
    quantize_fp8,
    scale_bits,
    unpack_fp4,
)

KV_GROUP = 64
KEY_GROUP = 32
LATENT_GROUP = 128


@dataclass(frozen=True, slots=True)
class UnquantizedRow:
    """The vector itself."""

    width: int
    dtype: torch.dtype
    scale_bytes: ClassVar[int] = 0

    @property
    def data_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    def pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        data = rows.to(self.dtype).contiguous()
        if not data.requires_grad:  # bytes have no gradients, so these rows stay numbers; ``unpack`` takes both
            data = data.view(torch.uint8)
        return data, rows.new_empty(rows.shape[0], 0, dtype=torch.uint8)

    def unpack(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = data.view(self.dtype) if data.dtype == torch.uint8 else data  # numbers with gradients
        return numbers.to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Kv:
    """kv row: ``nope`` channels as e4m3 in groups of 64, ``rope`` channels as bfloat16."""

    nope: int
    rope: int

    @property
    def width(self) -> int:
        return self.nope + self.rope

    @property
    def data_bytes(self) -> int:
        return self.nope + 2 * self.rope

    @property
    def groups(self) -> int:
        return -(-self.nope // KV_GROUP)

    @property
    def scale_bytes(self) -> int:
        return -(-self.groups // 8) * 8

    def pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize_fp8(rows[..., : self.nope], KV_GROUP)
        tail = rows[..., self.nope :].to(torch.bfloat16).contiguous()
        data = torch.cat([codes.view(torch.uint8), tail.view(torch.uint8)], -1)
        return data, torch.nn.functional.pad(scales, (0, self.scale_bytes - self.groups))

    def unpack(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        codes = data[..., : self.nope].view(torch.float8_e4m3fn)
        head = dequantize_fp8(codes, scales[..., : self.groups], KV_GROUP)
        tail = data[..., self.nope :].contiguous().view(torch.bfloat16)
        return torch.cat([head.to(dtype), tail.to(dtype)], -1)


@dataclass(frozen=True, slots=True)
class Fp4Key:
    """Index key: e2m1 in groups of 32."""

    width: int

    @property
    def data_bytes(self) -> int:
        return self.width // 2

    @property
    def scale_bytes(self) -> int:
        return -(-self.width // KEY_GROUP)

    def pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize_fp4(rows, KEY_GROUP)
        return pack_fp4(codes), scales

    def unpack(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize_fp4(unpack_fp4(data), scales, KEY_GROUP).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Key:
    """Index key: e4m3 with one float32 scale, a power of two."""

    width: int
    scale_bytes: ClassVar[int] = 4

    @property
    def data_bytes(self) -> int:
        return self.width

    def pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, _ = quantize_fp8(rows, self.width)
        amax = rows.float().abs().amax(-1).clamp_min(FP8_AMAX_FLOOR)
        return codes.view(torch.uint8), scale_bits(amax, FP8_MAX).view(torch.uint8).view(*amax.shape, 4)

    def unpack(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return (data.view(torch.float8_e4m3fn).float() * scales.contiguous().view(torch.float32)).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Latent:
    """Latent row of MLA: ``latent`` channels as e4m3 in groups of 128, ``rope`` channels as bfloat16, in one piece.

    Scales are written as powers of two; any float32 scale is read.
    """

    latent: int
    rope: int
    scale_bytes: ClassVar[int] = 0

    @property
    def width(self) -> int:
        return self.latent + self.rope

    @property
    def groups(self) -> int:
        return -(-self.latent // LATENT_GROUP)

    @property
    def data_bytes(self) -> int:
        return self.latent + 4 * self.groups + 2 * self.rope

    def pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = quantize_fp8(rows[..., : self.latent], LATENT_GROUP)
        tail = rows[..., self.latent :].to(torch.bfloat16).contiguous()
        parts = (codes, e8m0_to_float(scales).contiguous(), tail)
        return torch.cat([part.view(torch.uint8) for part in parts], -1), codes.new_empty(len(rows), 0, dtype=torch.uint8)

    def unpack(self, data: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        codes, scale_bytes, tail = data.split([self.latent, 4 * self.groups, 2 * self.rope], -1)
        latent = dequantize_fp8(codes.view(torch.float8_e4m3fn), scale_bytes.contiguous().view(torch.float32), LATENT_GROUP)
        return torch.cat([latent.to(dtype), tail.contiguous().view(torch.bfloat16).to(dtype)], -1)


RowFormat = UnquantizedRow | Fp8Kv | Fp4Key | Fp8Key | Fp8Latent


def pack_rows(fmt: RowFormat, rows_NC: Tensor) -> Tensor:
    """Return packed rows, uint8 [N, data + scale bytes]; unquantized rows with gradients stay numbers [N, C]."""
    data, scales = fmt.pack(rows_NC)
    return torch.cat([data, scales], -1) if fmt.scale_bytes else data


def unpack_rows(fmt: RowFormat, packed_NB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [N, C] from the result of ``pack_rows``."""
    if not fmt.scale_bytes:
        return fmt.unpack(packed_NB, packed_NB[:, :0], dtype)
    data, scales = packed_NB.split([fmt.data_bytes, fmt.scale_bytes], -1)
    return fmt.unpack(data, scales, dtype)


def page_bytes(fmt: RowFormat, rows_per_page: int) -> int:
    """Return the bytes of one page, padding included."""
    used = rows_per_page * (fmt.data_bytes + fmt.scale_bytes)
    return used if fmt.scale_bytes == 0 else -(-used // fmt.data_bytes) * fmt.data_bytes


class RowStore:
    """Pages of rows on one device.

    Attributes:
        memory: uint8 [pages, page_bytes], the bytes of all pages; zero at first.
    """

    def __init__(self, fmt: RowFormat, num_pages: int, rows_per_page: int, device: torch.device) -> None:
        self.format = fmt
        self.rows_per_page = rows_per_page
        self.memory = torch.zeros(num_pages, page_bytes(fmt, rows_per_page), dtype=torch.uint8, device=device)
        split = rows_per_page * fmt.data_bytes
        self._data = self.memory[:, :split].unflatten(1, (rows_per_page, fmt.data_bytes))
        scales = self.memory[:, split : split + rows_per_page * fmt.scale_bytes]
        self._scales = scales.unflatten(1, (rows_per_page, fmt.scale_bytes)) if fmt.scale_bytes else None
        # Unquantized pages have no padding, so all rows of all pages form one matrix: a single gather instead of three.
        self._matrix = self.memory.view(-1, fmt.data_bytes).view(fmt.dtype) if isinstance(fmt, UnquantizedRow) else None

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def write(self, addresses_N: Tensor, rows_NC: Tensor) -> None:
        """Store rows at addresses int64 [N], all valid and different."""
        if self._matrix is not None:
            self._matrix.index_copy_(0, addresses_N, rows_NC.to(self._matrix.dtype))
            return
        page, place = addresses_N // self.rows_per_page, addresses_N % self.rows_per_page
        data, scales = self.format.pack(rows_NC)
        self._data[page, place] = data
        if self._scales is not None:
            self._scales[page, place] = scales

    def read(self, addresses: Tensor, dtype: torch.dtype) -> Tensor:
        """Return rows [..., C] at int64 addresses [...]; -1 reads row 0."""
        safe = addresses.clamp_min(0)
        if self._matrix is not None:
            return self._matrix.index_select(0, safe.flatten()).to(dtype).view(*addresses.shape, self._matrix.shape[1])
        page, place = safe // self.rows_per_page, safe % self.rows_per_page
        data = self._data[page, place]
        scales = self._scales[page, place] if self._scales is not None else data[..., :0]
        return self.format.unpack(data, scales, dtype)

    def clear(self, addresses_N: Tensor) -> None:
        """Set the rows at addresses int64 [N] to zero."""
        page, place = addresses_N // self.rows_per_page, addresses_N % self.rows_per_page
        self._data[page, place] = 0
        if self._scales is not None:
            self._scales[page, place] = 0

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages, int64 [N] each."""
        self.memory[target] = self.memory[source]


class GradientStore(RowStore, ReferenceOnly):
    """Rows of one differentiable pass: gradients flow from reads to writes. Unquantized only.

    Each write puts the pages into a new tensor instead of ``memory``.
    """

    def write(self, addresses_N: Tensor, rows_NC: Tensor) -> None:
        """Store rows at addresses int64 [N], all valid and different."""
        assert self._matrix is not None
        self._matrix = self._matrix.index_copy(0, addresses_N, rows_NC.to(self._matrix.dtype))


def store_for_pass(fmt: RowFormat, num_pages: int, rows_per_page: int, device: torch.device) -> RowStore:
    """Return a store for one pass; gradients flow through it if they are enabled and rows are unquantized."""
    kind = GradientStore if torch.is_grad_enabled() and isinstance(fmt, UnquantizedRow) else RowStore
    return kind(fmt, num_pages, rows_per_page, device)
