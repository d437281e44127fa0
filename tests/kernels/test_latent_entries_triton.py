"""The kernel of latents and compressors together: its bits are those of each alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dsv4lite.kernels.compress import empty_carry
from dsv4lite.kernels.latent_entries import latent_entries_ref
from dsv4lite.kernels.paging import Paging
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp4Key, Fp8Kv, RowStore
from tests.kernels.steps import step_of

triton = pytest.importorskip("triton")

from dsv4lite.kernels.compress_triton import compress_step_triton  # noqa: E402
from dsv4lite.kernels.latent_entries_triton import latent_entries_triton, variants  # noqa: E402
from dsv4lite.kernels.latent_triton import latent_norms_triton  # noqa: E402

pytestmark = pytest.mark.kernel

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
RANK, WINDOW_TOKENS, EPS = (1024, 128, 1e-6) if CUDA else (128, 6, 1e-6)
KV, KEY = Fp8Kv(448 if CUDA else 64, 64), Fp4Key(128)
TAIL = 64  # columns of ``projected`` that are not for compressors


@dataclass
class Layer:
    """A layer's weights and state."""

    ratio: int
    keyed: bool

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.sets = 2 if self.ratio == 4 else 1

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE)

        self.norms = [random(width).abs() + 0.5 for width in (RANK, KV.width)]
        self.widths = [KV.width, *([KEY.width] if self.keyed else [])]
        self.apes = [random(self.ratio, self.sets * width) for width in self.widths]
        self.pool_norms = [random(width).abs() + 0.5 for width in self.widths]
        self.latent = random(4096, RANK + KV.width).bfloat16()
        self.projected = 2 * random(4096, 2 * self.sets * sum(self.widths) + TAIL)
        self.window = RowStore(KV, 512, 64, DEVICE)
        self.stores = [RowStore(fmt, 80, 256 // self.ratio, DEVICE) for fmt in (KV, KEY)[: len(self.widths)]]
        for store in (self.window, *self.stores):
            store.memory.fill_(0xA5)
        self.carries = [empty_carry(6, 3, self.sets, width, device=DEVICE) for width in self.widths]

    def state(self) -> list[Tensor]:
        return [self.window.memory, *(store.memory for store in self.stores), *self.carries]

    def step(self, paging: Paging, how: str) -> tuple[Tensor, ...]:
        """Run a step ``together``, with the kernels ``apart``, or by reference; what is padding holds NaN."""
        rows = torch.where(paging.positions_T < 0, 4095, paging.positions_T + 7 * paging.sequence_T).long()
        latent, projected = self.latent[rows], self.projected[rows]
        latent[paging.positions_T < 0], projected[paging.positions_T < 0] = float("nan"), float("nan")
        frequencies = rope_frequencies(64, 10000.0).to(DEVICE)
        angles = rope_angles(paging.positions_T, frequencies)
        group = rope_angles(paging.positions_T // self.ratio * self.ratio, frequencies)
        latents = (latent, *self.norms, *angles, EPS, self.window, paging, WINDOW_TOKENS)
        pools = list(zip(self.apes, self.pool_norms, self.carries, self.stores, strict=True))
        if how != "apart":
            op = latent_entries_triton if how == "together" else latent_entries_ref
            missing = () if self.keyed else (None,) * 4
            return op(*latents, projected, *group, self.ratio, *(x for pool in pools for x in pool), *missing)
        begin = 0
        for pool, width in zip(pools, self.widths, strict=True):
            part = projected[:, begin:]
            compress_step_triton(part, *pool, paging, self.ratio, *group, EPS, width == KEY.width and begin > 0)
            begin += 2 * self.sets * width
        found = latent_norms_triton(*latents)
        assert found[1] is not None
        return found


# First positions, lengths, drafts; singles, padding.
STEPS = [
    ([127, 300], [1, 1], [0, 0], True, 1),
    ([2, 127], [3, 2], [2, 1], False, 1),
]


def pagings(starts: list[int], lens: list[int], drafts: list[int], singles: bool, padding: int) -> list[Paging]:
    """Two steps one after the other, the second from the copies behind all drafts."""
    slots = [4, 1]
    then = [start + length for start, length in zip(starts, lens, strict=True)]
    more = {"slots": slots, "singles": singles, "padding": padding, "device": DEVICE}
    return [step_of(starts, lens, drafts=drafts, **more), step_of(then, lens, drafts=drafts, carry=drafts, **more)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("ratio", "keyed"), [(4, True), (128, False)])
@pytest.mark.parametrize(("starts", "lens", "drafts", "singles", "padding"), STEPS)
def test_latent_entries_have_the_bits_of_each_alone(
    ratio: int, keyed: bool, starts: list[int], lens: list[int], drafts: list[int], singles: bool, padding: int
) -> None:
    ours, theirs = Layer(ratio, keyed), Layer(ratio, keyed)
    for paging in pagings(starts, lens, drafts, singles, padding):
        got, wanted = ours.step(paging, "together"), theirs.step(paging, "apart")
        for a, b in zip([*got, *ours.carries], [*wanted, *theirs.carries], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert all(store.memory.ne(0xA5).any() for store in (ours.window, *ours.stores))
    for a, b in zip((ours.window, ours.stores[0]), (theirs.window, theirs.stores[0]), strict=True):
        assert torch.equal(a.memory, b.memory)
    if keyed:  # another order of a sum on a chip
        assert (ours.stores[1].memory != theirs.stores[1].memory).float().mean() <= (2e-3 if CUDA else 0)


def test_latent_entries_agree_with_the_reference() -> None:
    ours, theirs = Layer(4, True), Layer(4, True)
    for paging in pagings(*STEPS[1]):
        got, wanted = ours.step(paging, "together"), theirs.step(paging, "by reference")
        for a, b in zip([*got, *ours.state()], [*wanted, *theirs.state()], strict=True):
            if a.dtype == torch.float32:
                torch.testing.assert_close(a, b, rtol=4e-6, atol=2e-6 * float(ours.projected.abs().max()))
            else:
                assert (a.view(torch.uint8) != b.view(torch.uint8)).float().mean() <= 2e-3


def test_latent_entries_of_no_tokens_change_nothing() -> None:
    layer = Layer(4, True)
    before = [part.clone() for part in layer.state()]
    assert [len(part) for part in layer.step(step_of([], [], device=DEVICE), "together")] == [0, 0, 0]
    assert all(torch.equal(a, b) for a, b in zip(before, layer.state(), strict=True))


def test_variants_name_the_arguments_of_the_kernel() -> None:
    for variant in variants():
        assert {*variant.signature, *variant.constants} == set(variant.kernel.arg_names)
