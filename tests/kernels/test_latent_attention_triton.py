"""Kernels of latent attention against the reference, on shuffled pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dsv4lite.kernels.latent_attention import LatentAttentionInputs, by_head, latent_attention, projected_rows, splits_of
from dsv4lite.kernels.latent_attention.decode_fp8_hopper_triton import takes_few_heads
from dsv4lite.kernels.latent_attention.decode_hopper_triton import takes_absorbed
from dsv4lite.kernels.latent_attention.decode_triton import attend_absorbed, widened_rows
from dsv4lite.kernels.latent_attention.prefill_hopper_triton import takes_round
from dsv4lite.kernels.latent_attention.prefill_triton import attend_projected, plan_prompts, selection_bits
from dsv4lite.kernels.latent_attention.triton import by_head_triton
from dsv4lite.kernels.rope import rope_angles, rope_frequencies
from dsv4lite.kernels.rows import Fp8Latent, RowFormat, UnquantizedRow
from tests.kernels.paged import GROW, fill_store, make_paging, pages_of
from tests.kernels.tensors import DEVICE, ON_GPU, kernel_test, launch, random

BF16, FLOAT32 = torch.bfloat16, torch.float32
# Heads, nope, value, and rows.
Layer = tuple[int, int, int, RowFormat]
LAYERS: list[Layer] = [
    (3, 16, 12, UnquantizedRow(32 + 8, FLOAT32)),
    (17, 16, 20, UnquantizedRow(48 + 16, BF16)),
    (3, 16, 12, Fp8Latent(256, 16)),
]
if ON_GPU:
    LAYERS += [(16, 128, 128, UnquantizedRow(512 + 64, dtype)) for dtype in (BF16, FLOAT32)]
    LAYERS += [(heads, 128, 128, UnquantizedRow(512 + 64, BF16)) for heads in (64, 128)]
    LAYERS += [(heads, 128, 128, Fp8Latent(512, 64)) for heads in (8, 16, 32, 64, 128)]
DECODES = [(0, 1), (63, 1), (256, 1), (300, 1)]
VERIFY = [(0, 2), (61, 4), (254, 2)]
if ON_GPU:
    DECODES += [(62, 1), (255, 1), (3000, 1), (4095, 1)]
    VERIFY += [(700, 8)]


def rope_of(fmt: RowFormat) -> int:
    return fmt.rope if isinstance(fmt, Fp8Latent) else {40: 8, 64: 16, 576: 64}[fmt.width]


def inputs(
    layer: Layer, steps: list[tuple[int, int]], *, splits: int = 1, top_k: int = 0, padding: int = 0
) -> LatentAttentionInputs:
    heads, nope, value, fmt = layer
    rope, dtype = rope_of(fmt), fmt.dtype if isinstance(fmt, UnquantizedRow) else BF16
    latent = fmt.width - rope
    paging = replace(make_paging(steps, DEVICE, padding=padding), splits=splits)
    tokens = len(paging.positions_T)
    selected: Tensor | None = None
    if top_k:
        scores = random(tokens, 8192, seed=3).masked_fill(torch.arange(8192, device=DEVICE) > paging.positions_T[:, None], -1e9)
        selected = scores.topk(top_k).indices.sort(-1).values.int()
    return LatentAttentionInputs(
        random(tokens, heads, nope + rope, seed=1, scale=0.3).to(dtype),
        fill_store(fmt, pages_of(paging.grow_SP), GROW, DEVICE),
        paging,
        random(heads, nope + value, latent, seed=2, scale=latent**-0.5).to(dtype),
        rope,
        (nope + rope) ** -0.5,
        selected,
    )


def check(given: LatentAttentionInputs) -> Tensor:
    got, wanted = launch(latent_attention, given), latent_attention.reference(given)
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    bound = 2**-6 if got.dtype == BF16 else 2**-13
    assert ((got.float() - wanted.float()).abs() <= bound * wanted.float().abs().amax(-1, keepdim=True)).all()
    return got


@kernel_test
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("any_order", [False, True])
def test_decode_agrees(layer: Layer, splits: int, any_order: bool) -> None:
    got = check(inputs(layer, DECODES, splits=splits, padding=2)._replace(any_order=any_order))
    assert got[-2:].eq(0).all() and got[:-2].float().abs().amax((1, 2)).min() > 0


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else LAYERS[1:3], ids=str)
@pytest.mark.parametrize("splits", [1, 4])
def test_more_sequences_than_multiprocessors_agree(layer: Layer, splits: int) -> None:
    """Programs of kernels for Hopper compute one token after the other, with any number of pieces each."""
    check(
        inputs(layer, [(97 * i % 700, 1) for i in range(300 if ON_GPU else 3)], splits=splits, padding=1)._replace(any_order=True)
    )


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else LAYERS[1:3], ids=str)
@pytest.mark.parametrize("any_order", [False, True])
def test_rows_past_the_end_do_not_matter(layer: Layer, any_order: bool) -> None:
    given = inputs(layer, DECODES, splits=2)._replace(any_order=any_order)
    before = launch(latent_attention, given)
    rows, grow_SP = given.rows, given.paging.grow_SP
    unused = torch.ones(rows.memory.shape[0], rows.rows_per_page, dtype=torch.bool, device=DEVICE)
    for pages, (context, new) in zip(grow_SP, DECODES, strict=True):
        at = torch.arange(context + new, device=DEVICE)
        unused[pages[at // rows.rows_per_page].long(), at % rows.rows_per_page] = False
    rows.memory.view(unused.numel(), -1)[unused.view(-1)] = 0xFF  # codes, scales and numbers that are NaN
    assert torch.equal(launch(latent_attention, given), before)


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else LAYERS[1:3], ids=str)
@pytest.mark.parametrize("splits", [1, 4])
def test_row_of_zeros_with_nearly_all_weight_leaves_the_others_exact(layer: Layer, splits: int) -> None:
    """As the first token of models that let attention rest there: weights of 1e-9 decide the result."""
    given = inputs(layer, DECODES[2:], splits=splits)._replace(any_order=True)
    nope, fmt = layer[1], given.rows.format
    given.q_THC[..., nope:] = given.q_THC[:1, :1, nope:]
    turned = given.q_THC[0, 0, nope:].float()
    row = torch.cat([turned.new_zeros(fmt.width - len(turned)), turned * 20 / given.scale / turned.square().sum()])
    firsts = given.paging.grow_SP[:, 0].long() * given.rows.rows_per_page
    given.rows.write(firsts, row.to(given.q_THC.dtype).expand(len(firsts), -1))
    assert check(given).float().abs().amax() < 2.0**-12


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else LAYERS[1:3], ids=str)
@pytest.mark.parametrize("top_k", [0, 100])
def test_several_tokens_of_a_sequence_and_padding_agree(layer: Layer, top_k: int) -> None:
    got = check(inputs(layer, VERIFY, splits=8, top_k=top_k, padding=3))
    assert got[-3:].eq(0).all() and got[:-3].float().abs().amax((1, 2)).min() > 0


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else LAYERS[1:3], ids=str)
@pytest.mark.parametrize("top_k", [0, 100])
@pytest.mark.parametrize("splits", [1, 4])
def test_the_kernel_for_any_chip_agrees(layer: Layer, top_k: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper ``attend_absorbed_hopper`` and ``attend_few_heads`` take the sizes of released models otherwise."""
    given = inputs(layer, [(0, 1), (61, 4), (300, 1)], splits=splits, top_k=top_k, padding=1)
    hopper = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
    assert takes_absorbed(given) == (hopper and layer[1] == 128 and given.q_THC.dtype == BF16)
    few_heads = takes_absorbed(given) and layer[0] <= 16 and isinstance(layer[3], Fp8Latent) and not top_k
    assert takes_few_heads(given._replace(any_order=True)) == few_heads and not takes_few_heads(given)
    for name in ("takes_absorbed", "takes_few_heads"):
        monkeypatch.setattr(f"dsv4lite.kernels.latent_attention.decode_triton.{name}", lambda given: False)
    check(given)


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else LAYERS[:2], ids=str)
def test_selections_agree_without_splits(layer: Layer) -> None:
    got = check(inputs(layer, [(0, 2), (98, 3), (300, 1)], top_k=100, padding=1))
    assert got[-1:].eq(0).all()


@kernel_test
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if isinstance(layer[3], Fp8Latent)], ids=str)
@pytest.mark.parametrize("top_k", [0, 100])
def test_rows_that_are_widened_first_change_no_bit(layer: Layer, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(layer, [(0, 70), (250, 25), (3, 1)], top_k=top_k, padding=2)
    assert given.widens(97) and not given.widens(1) and not inputs(layer, [(0, 70), (25, 2)], splits=2).widens(72)
    assert not inputs(LAYERS[1], [(0, 70)]).widens(70)  # rows of bfloat16
    got = check(given)
    monkeypatch.setattr(LatentAttentionInputs, "widens", lambda given, tokens: False)
    assert torch.equal(launch(latent_attention, given), got)


PREFILLS = [[(0, 130)], [(0, 1), (70, 1), (0, 70), (3, 2), (100, 66), (5, 1)]]
if ON_GPU:
    PREFILLS += [[(3000, 1), (0, 1000), (1500, 700), (2, 1), (0, 129), (4000, 3), (77, 400), (0, 2)]]


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else LAYERS[:1], ids=str)
@pytest.mark.parametrize("chunk", [None, 100])
@pytest.mark.parametrize("steps", PREFILLS, ids=len)
@pytest.mark.parametrize("top_k", [0, 60])
@pytest.mark.parametrize("least", [0, 1 << 30] if ON_GPU else [0], ids=["hopper", "any chip"] if ON_GPU else None)
def test_prefill_agrees(
    layer: Layer, chunk: int | None, steps: list[tuple[int, int]], top_k: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in one round, or in several, which begin inside of sequences; single tokens between prompts are absorbed."""
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._FLOPS_PER_BYTE", 0)  # small layers else are never up-projected
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._LISTED_COST", 1000)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.prefill_hopper_triton._LEAST_TOKENS", least)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.prefill_hopper_triton._LEAST_MEAN", 0)
    given = inputs(layer, steps, padding=2, top_k=top_k)._replace(any_order=True, chunk_rows=chunk)
    paging = replace(given.paging, host_spans=tuple(given.paging.spans()))
    given = given._replace(paging=paging)
    assert given.projected and (len(steps) == 1 or len(given.projected) < len(steps))
    # ``attend_round`` is for the sizes of released models, on Hopper.
    hopper = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
    assert takes_round(given) == (hopper and layer[1] == 128 and given.q_THC.dtype == BF16 and not least)
    got, out = check(given), torch.full_like(given.q_THC[..., : layer[2]], float("nan"))
    assert got[-2:].eq(0).all()
    attend_projected(given, plan_prompts(given), out)
    found = ~out.isnan().all(-1).all(-1)
    assert torch.equal(out[found], got[found]) and found.sum() == sum(steps[sequence][1] for sequence in given.projected)


@kernel_test
@pytest.mark.parametrize("layer", [LAYERS[1], *((LAYERS[3], LAYERS[-1]) if ON_GPU else ())], ids=str)
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
def test_rows_of_other_sequences_may_hold_nan(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._FLOPS_PER_BYTE", 0)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.prefill_hopper_triton._LEAST_TOKENS", 0)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.prefill_hopper_triton._LEAST_MEAN", 0)
    given = inputs(layer, [(0, 70), (3, 66), (3, 40)])._replace(any_order=True)
    given = given._replace(paging=replace(given.paging, host_spans=tuple(given.paging.spans())))
    assert given.projected == [0, 1, 2]
    wanted = launch(latent_attention, given)
    at = torch.arange(69, device=DEVICE)
    addresses = given.paging.grow_SP[1].long()[at // GROW] * GROW + at % GROW
    given.rows.write(addresses, torch.full((69, given.rows.format.width), float("nan"), device=DEVICE))
    got = launch(latent_attention, given)
    assert torch.equal(got[:70], wanted[:70]) and torch.equal(got[136:], wanted[136:]) and got[70:136].isnan().all()


@kernel_test
def test_copies_of_rows_and_bits_of_selections_are_exact() -> None:
    given = inputs(LAYERS[2], [(0, 70), (250, 25), (3, 1)], top_k=60, padding=2)
    rows, wide, bits, row = given.rows, widened_rows(given), selection_bits(given), 0
    for sequence, (first, new) in enumerate([(0, 70), (250, 25), (3, 1)]):
        at = torch.arange(first + new, device=DEVICE)
        addresses = given.paging.grow_SP[sequence].long()[at // GROW] * GROW + at % GROW
        assert torch.equal(wide[sequence, : first + new], rows.read(addresses, BF16))
        for position in range(first, first + new):
            found = [p for p in range(32 * bits.shape[1]) if int(bits[row, p // 32]) >> (p % 32) & 1]
            assert found == (given.selected_TK[row].tolist() if position >= 60 else list(range(position + 1)))
            row += 1
    assert not bits[row:].any()


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else [LAYERS[0], (5, *LAYERS[1][1:])], ids=str)
@pytest.mark.parametrize("steps", [*PREFILLS, [(0, 120), (0, 1), (5, 2), (40, 80), (0, 90), (9, 1)]], ids=len)
@pytest.mark.parametrize("top_k", [0, 60])
def test_captured_steps_choose_forms_on_the_device(
    layer: Layer, steps: list[tuple[int, int]], top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that fit are up-projected, others absorbed; the rest of a shape's tokens and sequences is padding."""
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._FLOPS_PER_BYTE", 0)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._LISTED_COST", 1000)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.CAPTURED_TOKENS", 100)
    given = inputs(layer, steps, padding=30, top_k=top_k)._replace(any_order=True)
    assert given.captured and given.projected
    got = check(given)
    assert got[-30:].eq(0).all() and got[:-30].float().abs().amax((1, 2)).min() > 0
    prompts = plan_prompts(given)
    assert len(prompts.rounds) == 1 and not prompts.spans
    masked = prompts.rest.positions_T < 0
    assert masked[:-30].tolist() == [sequence in given.projected for sequence, (_, new) in enumerate(steps) for _ in range(new)]


def test_rounds_take_all_rows_once_and_blocks_see_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a sequence begin at multiples of a piece, of 32 rows or of 128; the rows between repeat its last."""
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._FLOPS_PER_BYTE", 0)
    given = inputs(LAYERS[0], [(0, 70), (200, 66)])._replace(any_order=True, chunk_rows=220)
    table = given.paging.grow_SP.long()

    def fresh(**change: object) -> LatentAttentionInputs:
        return given._replace(paging=replace(given.paging, host_spans=tuple(given.paging.spans())), **change)

    def addresses(sequence: int, positions: list[int]) -> list[int]:
        return [int(table[sequence, p // GROW]) * GROW + p % GROW for p in positions]

    first, second = plan_prompts(fresh()).rounds
    assert first.addresses_R.tolist() == addresses(0, [*range(70), *[69] * 26]) + addresses(1, [*range(160)])
    assert second.addresses_R.tolist() == addresses(1, [*range(160, 266), *[265] * 22])
    assert first.blocks[:3].tolist() == [[at, size, at, 0, 70, 0, 0, 1] for at, size in ((0, 32), (32, 32), (64, 6))]
    cut = [(70, 32, 200), (102, 32, 232), (134, 2, 264)]
    assert first.blocks[3:].tolist() == [[*queries, 0, 160, 96, 0, 0] for queries in cut] and first.used.tolist() == [6]
    assert second.blocks.tolist() == [[*queries, 160, 106, 0, 1, 1] for queries in cut] and second.used.tolist() == [3]
    assert [len(found.addresses_R) for found in plan_prompts(fresh(chunk_rows=100)).rounds] == [128, 128, 128]
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.prefill_triton.capability_of", lambda device: 90)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.prefill_triton.takes_round", lambda given: True)
    bfloat16 = fresh(q_THC=given.q_THC.to(BF16), up_HCL=given.up_HCL.to(BF16))
    first, second = plan_prompts(bfloat16).rounds
    assert first.addresses_R.tolist() == addresses(0, [*range(70), *[69] * 58]) + addresses(1, [*range(128)])
    assert second.addresses_R.tolist() == addresses(1, [*range(128, 266), *[265] * 118])
    assert first.blocks.tolist() == [[0, 70, 0, 0, 70, 0, 0, 1], [70, 66, 200, 0, 128, 128, 0, 0]]
    assert second.blocks.tolist() == [[70, 66, 200, 128, 138, 0, 1, 1]]


def test_the_device_plans_what_the_host_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured step has one round of fixed size; blocks past the last are zeros."""
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._FLOPS_PER_BYTE", 0)
    monkeypatch.setattr("dsv4lite.kernels.latent_attention.CAPTURED_TOKENS", 100)
    given = inputs(LAYERS[0], [(0, 70), (9, 1), (200, 66), (0, 2)], padding=400)._replace(any_order=True)
    known = given._replace(paging=replace(given.paging, host_spans=tuple(given.paging.spans())))
    (device,), (host,) = plan_prompts(given).rounds, plan_prompts(known).rounds
    used, rows = len(host.blocks), len(host.addresses_R)
    assert given.projected == known.projected == [0, 2, 3] and device.used.tolist() == host.used.tolist() == [used]
    assert torch.equal(device.blocks[:used], host.blocks) and not device.blocks[used:].any() and len(device.blocks) > used
    assert torch.equal(device.addresses_R[:rows], host.addresses_R) and len(device.addresses_R) == 2 * len(given.q_THC)


def test_rounds_of_kernels_are_bounded() -> None:
    assert [projected_rows(*sizes) for sizes in ((128, 256, 2), (16, 256, 2), (1024, 1024, 4))] == [4096, 32768, 1024]


@kernel_test
@pytest.mark.parametrize("layer", [layer for layer in LAYERS if isinstance(layer[3], Fp8Latent)], ids=str)
def test_fp8_rows_of_a_model_in_float32_agree(layer: Layer) -> None:
    given = inputs(layer, [(0, 1), (63, 2)], splits=2)
    check(given._replace(q_THC=given.q_THC.float(), up_HCL=given.up_HCL.float()))


@kernel_test
@pytest.mark.parametrize("layer", LAYERS if ON_GPU else LAYERS[:2], ids=str)
@pytest.mark.parametrize("projects", [False, True])
def test_queries_are_rotated_and_may_be_a_slice(layer: Layer, projects: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper ``angles_of`` finds the angles of a block of queries, or of one token's heads."""
    monkeypatch.setattr("dsv4lite.kernels.latent_attention._FLOPS_PER_BYTE", 0)
    given = inputs(layer, [(0, 1), (3, 70)] if projects else [(0, 1), (70, 2)], padding=1)
    angles = rope_angles(given.paging.positions_T, rope_frequencies(given.rope, 100.0).to(DEVICE))
    wide = torch.cat([given.q_THC.flatten(1), given.q_THC.flatten(1)[:, :16]], 1)[:, :-16].unflatten(1, given.q_THC.shape[1:])
    paging = replace(given.paging, host_spans=tuple(given.paging.spans()) if projects else None)
    given = given._replace(q_THC=wide, paging=paging, any_order=True, cos=angles[0], sin=angles[1])
    assert given.projected == ([1] if projects else [])
    check(given)


@kernel_test
def test_no_tokens() -> None:
    assert check(inputs(LAYERS[0], [])).shape == (0, 3, 12)


@kernel_test
@pytest.mark.parametrize("splits", [1, 4])
def test_a_token_has_the_same_bits_beside_others(splits: int) -> None:
    layer = LAYERS[-1]
    together = launch(latent_attention, inputs(layer, DECODES, splits=splits))
    for row in (0, 3):
        given = inputs(layer, DECODES, splits=splits)
        paging = replace(
            given.paging, positions_T=given.paging.positions_T[row : row + 1], sequence_T=given.paging.sequence_T[row : row + 1]
        )
        alone = launch(latent_attention, given._replace(q_THC=given.q_THC[row : row + 1], paging=paging))
        assert torch.equal(alone[0], together[row])


@kernel_test
@pytest.mark.parametrize(("tokens", "any_order"), [(1, False), (17, False), (65, True)])
@pytest.mark.parametrize("outs", [70, 72])  # tensor descriptors can describe weights of 72
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_products_of_each_head_take_weights_of_any_strides(tokens: int, any_order: bool, outs: int, dtype: torch.dtype) -> None:
    x, w = random(tokens, 2, 40, seed=1).to(dtype)[..., :24], random(2, 24, outs, seed=2).to(dtype).transpose(1, 2)
    bound = 2**-7 if dtype == BF16 else 2**-18
    for weights in (w, w.contiguous()):
        got, wanted = by_head_triton(x, weights, any_order=any_order), by_head(x.double(), weights.double(), None)
        assert (got - wanted).abs().max() <= bound * wanted.abs().max()


@kernel_test
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_products_of_each_head_leave_out_blocks_of_other_tokens(dtype: torch.dtype) -> None:
    x, w, positions = random(40, 2, 24, seed=1).to(dtype), random(2, 72, 24, seed=2).to(dtype), torch.full((40,), -1, device=DEVICE)
    positions[[5, 39]] = 7
    out = torch.full((40, 2, 72), float("nan"), dtype=dtype, device=DEVICE)
    by_head_triton(x, w, any_order=True, out=out, positions_T=positions.int())
    assert torch.equal(out[:16], by_head_triton(x[:16], w, any_order=False)) and out[16:32].isnan().all()
    assert torch.equal(out[32:], by_head_triton(x[32:], w, any_order=False))


@kernel_test
@pytest.mark.parametrize("splits", [1, 2])
def test_without_a_query_results_are_mean_latents(splits: int) -> None:
    given = inputs(LAYERS[0], [(0, 2), (299, 1)], splits=splits)
    given = given._replace(q_THC=torch.zeros_like(given.q_THC))
    got = attend_absorbed(given, torch.zeros(3, 3, 32, device=DEVICE))
    for row, sequence, count in ((0, 0, 1), (1, 0, 2), (2, 1, 300)):
        at = torch.arange(count, device=DEVICE)
        latents = given.rows.read(given.paging.grow_SP[sequence].long()[at // GROW] * GROW + at % GROW, FLOAT32)[:, :32]
        torch.testing.assert_close(got[row], latents.mean(0).expand(3, -1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("heads", [8, 16, 128])
def test_splits_fill_a_chip_and_no_more(heads: int) -> None:
    blocks = 1 if heads <= 64 else 2
    for tokens in range(1, 600):
        splits = splits_of(tokens, heads)
        assert splits & (splits - 1) == 0 and (splits == 1 or tokens * blocks * splits <= 132)
        assert splits == 64 or tokens * blocks * splits * 2 > 132
