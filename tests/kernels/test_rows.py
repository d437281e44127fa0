"""Packed cache rows: byte for byte against a packer that knows only the layout, and what is read against what was written."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.rows import (
    Fp4Key,
    Fp8Key,
    Fp8Kv,
    Fp8Latent,
    GradientStore,
    RowFormat,
    RowStore,
    UnquantizedRow,
    pack_rows,
    page_bytes,
    store_for_pass,
    unpack_rows,
)
from tests.kernels.paged import simulate
from tests.kernels.tensors import CPU
from tests.kernels.test_quantize import E2M1, E4M3

# The packer: Python floats and bytes ---------------------------------------------------------------


def code_of(value: float, table: Sequence[float], sign_bit: int) -> int:
    """Return the code of the nearest value; of two equally near the even one."""
    best = min(range(len(table)), key=lambda code: (abs(table[code] - abs(value)), code % 2))
    return best | (sign_bit if math.copysign(1.0, value) < 0 else 0)


def scale_of(values: Sequence[float], largest: float, floor: float) -> int:
    """Return the exponent of the smallest power of two that brings the values into range."""
    exponent = -140
    while max(floor, *map(abs, values)) > largest * 2.0**exponent:
        exponent += 1
    return exponent


def e4m3_group(values: Sequence[float]) -> tuple[bytes, int]:
    exponent = scale_of(values, 448.0, struct.unpack("f", struct.pack("f", 1e-4))[0])
    return bytes(code_of(value / 2.0**exponent, E4M3, 128) for value in values), exponent


def kv_row(values: Sequence[float], nope: int) -> tuple[bytes, bytes]:
    data, scales = b"", b""
    for begin in range(0, nope, 64):
        codes, exponent = e4m3_group(values[begin : min(begin + 64, nope)])
        data += codes
        scales += bytes([exponent + 127])
    for value in values[nope:]:
        data += struct.pack("<f", value)[2:]  # a bfloat16 is the upper half of a float32
    return data, scales + bytes(-len(scales) % 8)


def fp4_key_row(values: Sequence[float]) -> tuple[bytes, bytes]:
    data, scales = b"", b""
    for begin in range(0, len(values), 32):
        group = values[begin : begin + 32]
        exponent = scale_of(group, 6.0, 6 * 2.0**-126)
        codes = [code_of(value / 2.0**exponent, E2M1, 8) for value in group]
        data += bytes(low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True))
        scales += bytes([exponent + 127])
    return data, scales


def fp8_key_row(values: Sequence[float]) -> tuple[bytes, bytes]:
    codes, exponent = e4m3_group(values)
    return codes, struct.pack("<f", 2.0**exponent)


def page_of(rows: Sequence[tuple[bytes, bytes]], size: int) -> bytes:
    """Lay out a page: the data of all rows, the scales of all rows, padding."""
    page = b"".join(data for data, _ in rows) + b"".join(scales for _, scales in rows)
    return page + bytes(size - len(page))


def latent_row(values: Sequence[float], latent: int) -> tuple[bytes, bytes]:
    groups = [e4m3_group(values[begin : min(begin + 128, latent)]) for begin in range(0, latent, 128)]
    data = b"".join(codes for codes, _ in groups) + b"".join(struct.pack("<f", 2.0**exponent) for _, exponent in groups)
    return data + b"".join(struct.pack("<f", value)[2:] for value in values[latent:]), b""


# Tests ---------------------------------------------------------------------------------------------

FORMATS: dict[str, RowFormat] = {
    "kv_584": Fp8Kv(448, 64),
    "kv_small": Fp8Kv(24, 8),
    "key_68": Fp4Key(128),
    "key_132": Fp8Key(128),
    "latent_656": Fp8Latent(512, 64),
    "latent_small": Fp8Latent(160, 8),
    "float32": UnquantizedRow(32, torch.float32),
    "bfloat16": UnquantizedRow(48, torch.bfloat16),
}


def vectors(count: int, width: int, seed: int = 0) -> Tensor:
    """Random vectors whose 32-wide parts differ in magnitude, with zeros and, in one row, nothing else."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    x *= torch.exp(3 * torch.randn(count, -(-width // 32), generator=generator)).repeat_interleave(32, 1)[:, :width]
    x[torch.rand(count, width, generator=generator) < 0.05] = 0.0
    if count > 2:
        x[2] = 0.0
    return x.to(torch.bfloat16)


@pytest.mark.parametrize(
    ("fmt", "rows", "used", "padded"),
    [
        (Fp8Kv(448, 64), 64, 584 * 64, 37440),
        (Fp8Kv(448, 64), 2, 584 * 2, 1728),
        (Fp4Key(128), 64, 68 * 64, 4352),
        (Fp8Key(128), 64, 132 * 64, 8448),
        (Fp8Latent(512, 64), 64, 656 * 64, 41984),
        (UnquantizedRow(512, torch.bfloat16), 64, 1024 * 64, 65536),
    ],
)
def test_page_has_the_published_size(fmt: RowFormat, rows: int, used: int, padded: int) -> None:
    assert rows * (fmt.data_bytes + fmt.scale_bytes) == used
    assert page_bytes(fmt, rows) == padded
    store = RowStore(fmt, 3, rows, CPU)
    assert store.memory.shape == (3, padded) and store.nbytes == 3 * padded


@pytest.mark.parametrize("rows", [1, 2, 64])
@pytest.mark.parametrize("name", ["kv_584", "kv_small", "key_68", "key_132", "latent_656", "latent_small"])
def test_page_equals_the_byte_packer(name: str, rows: int) -> None:
    fmt = FORMATS[name]
    x = vectors(rows, fmt.width, rows)
    store = RowStore(fmt, 2, rows, CPU)
    store.write(torch.arange(rows, 2 * rows), x)
    pack = {"key_68": fp4_key_row, "key_132": fp8_key_row}.get(name)
    if isinstance(fmt, Fp8Latent):
        pack = partial(latent_row, latent=fmt.latent)
    packed = [pack(row) if pack else kv_row(row, fmt.nope) for row in x.tolist()]  # type: ignore[union-attr]
    assert bytes(store.memory[1].tolist()) == page_of(packed, page_bytes(fmt, rows))
    assert not store.memory[0].any()


formats = pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)


@formats
def test_cleared_rows_are_zero_and_the_others_are_not(fmt: RowFormat) -> None:
    store = RowStore(fmt, 3, 4, CPU)
    store.memory.fill_(255)
    store.write(torch.arange(12), vectors(12, fmt.width, 4))
    before, cleared = store.read(torch.arange(12), torch.float32), torch.tensor([1, 6, 7, 11])
    store.clear(cleared)
    after = store.read(torch.arange(12), torch.float32)
    rest = [i for i in range(12) if i not in cleared]
    assert not after[cleared].any() and torch.equal(after[rest], before[rest]) and before[cleared].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@formats
@pytest.mark.parametrize("count", [0, 1, 63])
def test_reading_gives_what_simulate_says(fmt: RowFormat, count: int, dtype: torch.dtype) -> None:
    x = vectors(count, fmt.width).to(dtype)
    store = RowStore(fmt, 9, 8, CPU)
    store.memory.fill_(0xFF)
    addresses = torch.randperm(72, generator=torch.Generator().manual_seed(1))[:count]
    store.write(addresses, x)
    got = store.read(addresses, dtype)
    assert got.dtype == dtype and torch.equal(got, simulate(fmt, x))


@formats
def test_writing_a_row_touches_no_other(fmt: RowFormat) -> None:
    """Rows at the boundaries of pages, their neighbours among them."""
    store = RowStore(fmt, 4, 4, CPU)
    everything = vectors(16, fmt.width)
    store.write(torch.arange(16), everything)
    before = store.memory.clone()
    changed = torch.tensor([0, 3, 4, 11, 15])
    store.write(changed, vectors(5, fmt.width, seed=7))
    kept = torch.tensor([i for i in range(16) if i not in changed.tolist()])
    assert torch.equal(store.read(kept, torch.float32), simulate(fmt, everything.float())[kept])
    store.write(changed, everything[changed])
    assert torch.equal(store.memory, before)


@formats
def test_missing_row_reads_row_zero(fmt: RowFormat) -> None:
    store = RowStore(fmt, 2, 4, CPU)
    x = vectors(8, fmt.width)
    store.write(torch.arange(8), x)
    got = store.read(torch.tensor([[-1, 5], [7, -1]]), torch.float32)
    assert got.shape == (2, 2, fmt.width)
    assert torch.equal(got, simulate(fmt, x.float())[torch.tensor([[0, 5], [7, 0]])])


@formats
def test_pages_are_copied_whole(fmt: RowFormat) -> None:
    store = RowStore(fmt, 5, 4, CPU)
    store.write(torch.arange(20), vectors(20, fmt.width))
    before = store.memory.clone()
    store.copy_pages(torch.tensor([4, 0]), torch.tensor([1, 3]))
    assert torch.equal(store.memory, before[[0, 4, 2, 0, 4]])


@formats
def test_packing_a_row_does_not_depend_on_the_others(fmt: RowFormat) -> None:
    x = vectors(65, fmt.width)
    data, scales = fmt.pack(x)
    for a, b in ((0, 1), (7, 8), (3, 40), (64, 65)):
        part = fmt.pack(x[a:b])
        assert torch.equal(part[0], data[a:b]) and torch.equal(part[1], scales[a:b])


@formats
def test_packed_rows_are_read_as_simulate_says(fmt: RowFormat) -> None:
    rows = vectors(5, fmt.width).float()
    packed = pack_rows(fmt, rows)
    assert packed.dtype == torch.uint8 and packed.shape == (5, fmt.data_bytes + fmt.scale_bytes)
    assert torch.equal(unpack_rows(fmt, packed, torch.float32), simulate(fmt, rows))


def test_gradients_flow_through_plain_rows() -> None:
    """From what is read, packed or stored, to what was written last at each address."""
    fmt = UnquantizedRow(3, torch.float32)
    store, rows = store_for_pass(fmt, 2, 4, CPU), torch.randn(4, 3, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with torch.no_grad():
        assert isinstance(store, GradientStore) and not isinstance(store_for_pass(fmt, 2, 4, CPU), GradientStore)
    store.write(torch.tensor([1, 6]), rows[:2])
    store.write(torch.tensor([1]), rows[2:3])
    read = store.read(torch.tensor([1, 6, 3]), torch.float32)
    assert torch.equal(read[:2], rows[[2, 1]]) and not read[2].any()
    (read.sum() + 2 * unpack_rows(fmt, pack_rows(fmt, rows), torch.float32)[3].sum()).backward()
    assert rows.grad is not None and rows.grad[:, 0].tolist() == [0, 1, 1, 2]


def test_latent_rows_are_read_with_any_scale() -> None:
    """Other writers store scales that are no powers of two; the channels with position keep their bits."""
    fmt, x = Fp8Latent(512, 64), vectors(3, 576).float()
    data, _ = fmt.pack(x)
    data.view(torch.float32)[:, 128:132] *= 1.25
    got = fmt.unpack(data, data[:, :0], torch.float32)
    assert torch.equal(got[:, 512:], x[:, 512:]) and torch.equal(got[:, :512], 1.25 * simulate(fmt, x)[:, :512])
