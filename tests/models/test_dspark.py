"""The block drafter against the known answers of its specification (14), and across everything that moves its rows about.

The known answers come from the published drafter, in float32, on the tiny model: window 8, blocks of 5, targets 2, 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dsv4lite.debug.watch import OpWatch
from dsv4lite.kernels import dispatch
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.quantize import round_fp8
from dsv4lite.kernels.rope import rope, rope_angles
from dsv4lite.kernels.rows import RowStore, UnquantizedRow
from dsv4lite.models.deepseek_v4 import dspark
from dsv4lite.models.deepseek_v4.batch import Batch
from dsv4lite.models.deepseek_v4.config import V4Config, parse_config
from dsv4lite.models.deepseek_v4.dspark import DraftBlock, Drafts, DSparkDrafter
from dsv4lite.models.deepseek_v4.model import Attention, DeepseekV4
from dsv4lite.models.deepseek_v4.streams import Streams
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS, official_shapes
from dsv4lite.models.family import FAMILIES
from dsv4lite.planning.memory import weight_bytes
from dsv4lite.weights.dummy import dummy_tensors
from dsv4lite.weights.quant import linear
from tests.golden import OFFICIAL, TINY_DSPARK, WIDE, fill, plain, poisoned, rounded, tiny_checkpoint, tiny_ids, tiny_model
from tests.models.paged import PagedModel, PagedSequence
from tests.tiny import TINY_REFRESHED

TOLERANCE = 1e-4
WIDE_DSPARK = replace(
    WIDE, num_mtp_layers=0, ratios=(*WIDE.ratios[:4], 0, 0, 0), dspark=replace(TINY_DSPARK.dspark, targets=(1, 2, 3))
)


def floats(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def assert_values(got: Tensor, expected: str) -> None:
    wanted = torch.tensor(floats(expected))
    assert got.shape == wanted.shape
    assert (got.detach().cpu() - wanted).abs().max() < TOLERANCE


def drafter_of(model: DeepseekV4) -> DSparkDrafter:
    assert model.dspark is not None
    return model.dspark


def draft(state: PagedModel, sequences: Sequence[PagedSequence | None], anchors: Sequence[int], **pick: Any) -> Drafts:
    """Draft after sequences in the pages of the step they have just run; ``None`` is padding."""
    model, device = state.model, state.device
    width = max(len(s.window_pages) for s in sequences if s is not None)
    pages = [[*(s.window_pages if s is not None else ()), *[-1] * width][:width] for s in sequences]
    where = DraftBlock.of(
        torch.tensor([-1 if s is None else s.length for s in sequences], device=device),
        torch.tensor(pages, dtype=torch.int32, device=device),
        torch.tensor([0 if s is None else s.window_first for s in sequences], dtype=torch.int32, device=device),
        drafter_of(model).block,
        model.rotary.main,
    )
    caches = state.cache.layers[model.config.num_hidden_layers :]
    with torch.no_grad():
        out: Drafts = drafter_of(model)(torch.tensor(anchors, device=device), where, caches, model.embedded, model.project, **pick)
    return out


def run(state: PagedModel, sequence: PagedSequence, ids: Sequence[int], cuts: Iterable[int] = ()) -> list[int]:
    """Run tokens, in chunks that end at ``cuts``; return the best next token after each."""
    streams, begin = [], 0
    for end in (*cuts, len(ids)):
        streams.append(state.step([(sequence, ids[begin:end])])[0])
        begin = end
    with torch.no_grad():
        best: list[int] = state.model.logits(torch.cat(streams)).argmax(-1).tolist()
    return best


def drafts_after(
    model: DeepseekV4, ids: Sequence[int], cuts: Iterable[int] = (), *, anchor: int | None = None
) -> tuple[int, Drafts]:
    """Return the next token of a prompt, by default the best one, and the drafts after it."""
    state = PagedModel(model, tokens=len(ids))
    sequence = state.open()
    best = run(state, sequence, ids, cuts)[-1]
    anchor = best if anchor is None else anchor
    return anchor, draft(state, [sequence], [anchor])


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return fill(poisoned(TINY_DSPARK, plain(), with_mtp=True), tiny_checkpoint(TINY_DSPARK)).requires_grad_(False)


def bias(model: DeepseekV4, tokens: Sequence[int]) -> Tensor:
    drafter = drafter_of(model)
    return drafter.markov_w1[torch.tensor(tokens)] @ drafter.markov_w2.weight.T


def test_generated_weights_are_the_published_ones() -> None:
    tensors = tiny_checkpoint(TINY_DSPARK)
    assert_values(tensors["mtp.1.attn.wq_b.weight"][0, :3], "-0.16867 0.19988 -0.31563")
    assert_values(tensors["mtp.0.main_proj.weight"][0, :3], "0.02429 -0.13653 0.03915")
    assert_values(tensors["mtp.2.markov_head.markov_w1.weight"][0, :3], "0.35781 -0.02672 -0.18254")
    assert_values(tensors["mtp.2.confidence_head.proj.weight"][0, :3], "0.20443 0.07199 -0.00796")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Published results after a prompt of ``length`` tokens."""

    length: int
    anchor: int
    base: list[int]
    drafts: list[int]
    confidence: str
    last: str
    norms: str | None = None


KNOWN = [
    Known(
        length=3,
        anchor=54,
        base=[47, 1, 1, 1, 1],
        drafts=[19, 50, 1, 1, 1],
        confidence="0.90830 0.98120 0.97503 0.96240 0.96606",
        last="0.09975 2.88184 -0.88214 -1.56699",
        norms="8.46955 7.03937 8.00877 8.07002 8.18860",
    ),
    Known(
        length=11,
        anchor=25,
        base=[15, 1, 1, 1, 1],
        drafts=[15, 1, 1, 1, 1],
        confidence="0.09710 0.57781 0.44131 0.52542 0.67099",
        last="-0.21714 3.62835 -0.69150 -1.26704",
    ),
    Known(
        length=37,
        anchor=2,
        base=[30, 50, 24, 24, 24],
        drafts=[45, 50, 15, 24, 24],
        confidence="0.02488 0.83126 0.80593 0.80175 0.87582",
        last="-0.18493 0.79019 -1.52152 -0.59784",
        norms="8.90797 8.01864 7.88737 7.35096 7.07590",
    ),
]


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: str(known.length))
def test_drafts_are_the_published_ones(model: DeepseekV4, known: Known) -> None:
    anchor, out = drafts_after(model, tiny_ids(known.length))
    assert anchor == known.anchor
    assert out.token_ids_SG.tolist() == [known.drafts]
    base = out.logits_SGV[0] - bias(model, [anchor, *known.drafts[:-1]])
    assert base.argmax(-1).tolist() == known.base
    assert_values(out.confidence_SG[0], known.confidence)
    assert_values(out.logits_SGV[0, 4, :4], known.last)
    if known.norms is not None:
        assert_values(out.logits_SGV[0].norm(dim=-1), known.norms)


class RoundedRow(UnquantizedRow):
    """Plain rows whose channels without position went through FP8 in groups of 8."""

    def pack(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return UnquantizedRow.pack(self, torch.cat([round_fp8(rows[:, :24], 8), rows[:, 24:]], -1))


class RoundedStore(RowStore):
    def write(self, addresses_N: Tensor, rows_NC: Tensor) -> None:
        super().write(addresses_N, self.format.pack(rows_NC)[0].view(torch.float32))


def test_rounded_rows_give_the_published_drafts(model: DeepseekV4) -> None:
    """Context rows and the block's own are rounded alike; the main model's are not."""
    state = PagedModel(model, tokens=37)
    for layer in state.cache.layers[5:]:
        window = layer.stores["window"]
        assert isinstance(window, RowStore)
        layer.stores["window"] = RoundedStore(RoundedRow(32, torch.float32), len(window.memory), window.rows_per_page, state.device)
    sequence = state.open()
    out = draft(state, [sequence], run(state, sequence, tiny_ids(37))[-1:])
    assert out.token_ids_SG.tolist() == [[45, 50, 15, 24, 24]]
    assert_values(out.logits_SGV[0, 4, :4], "-0.23626 0.75451 -1.51248 -0.62333")
    assert_values(out.confidence_SG[0, :1], "0.02763")


@dataclass(slots=True)
class Trace:
    """What passes between the parts of a drafter."""

    taps: list[Tensor] = field(default_factory=list)
    attended: list[Tensor] = field(default_factory=list)
    mixed: list[Tensor] = field(default_factory=list)
    streams: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    h: list[Tensor] = field(default_factory=list)


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Record everything that drafters do in this test."""
    found = Trace()

    def spied(name: str, note: Callable[[tuple[Any, ...], Any], None]) -> None:
        inner = getattr(DSparkDrafter, name)

        def spy(*args: Any) -> Any:
            out = inner(*args)
            note(args, out)
            return out

        monkeypatch.setattr(DSparkDrafter, name, spy)

    attend = Attention.forward

    def attended(self: Attention, x_TD: Tensor, rounded: Any, batch: Batch, cache: Any) -> Tensor:
        out = attend(self, x_TD, rounded, batch, cache)
        if batch.ahead:  # of a block
            found.inputs.append(x_TD)
            found.attended.append(out)
        return out

    class Recorded(Streams):
        def enter(self, *args: Any) -> Any:
            out = super().enter(*args)
            found.streams.append(self.value_PND)
            return out

        def leave(self, y_TD: Tensor) -> None:
            found.mixed.append(y_TD)
            super().leave(y_TD)

        def final(self) -> Tensor:
            found.streams.append(super().final())
            return found.streams[-1]

    spied("store_kv", lambda args, out: found.taps.append(args[1]))
    monkeypatch.setattr(Attention, "forward", attended)
    spied("_backbone", lambda args, out: found.h.append(out[0]))
    monkeypatch.setattr(dspark, "Streams", Recorded)
    return found


def test_every_part_gives_the_published_values(model: DeepseekV4, trace: Trace) -> None:
    drafter, state = drafter_of(model), PagedModel(model, tokens=11)
    sequence = state.open()
    out = draft(state, [sequence], run(state, sequence, tiny_ids(11))[-1:])
    taps = trace.taps[0][10]
    assert_values(taps[:4], "-0.23577 0.99502 0.60900 0.78957")
    assert_values(taps[48:52], "0.80428 1.36502 0.41657 -0.20480")
    assert_values(taps[96:100], "1.86860 0.04276 -0.09712 -0.36460")
    x_main = rms_norm(linear(taps[None], drafter.main_proj), drafter.main_norm, TINY_DSPARK.norm_eps)
    assert_values(x_main[0, :4], "-0.46745 1.11374 0.91092 0.42538")
    address = torch.tensor([sequence.window_pages[0] * 64 + 10])
    rows = [layer.stores["window"].read(address, torch.float32)[0] for layer in state.cache.layers[5:]]
    assert_values(rows[0][[0, 1, 2, 3, 24, 25, 26, 27]], "1.84364 -1.08102 -0.09796 0.81314 -2.18957 1.08935 0.53302 -0.04780")
    assert_values(rows[2][[0, 1, 2, 3, 24, 25, 26, 27]], "0.00664 -1.56614 0.84182 -3.18297 -0.92046 1.08570 0.79233 0.85077")
    assert_values(trace.attended[0][0, :4], "-0.30269 -0.58213 -0.48214 -0.25127")
    assert_values(trace.attended[0][4, :4], "0.46514 0.03647 -0.47965 0.61482")
    assert_values(trace.mixed[1][0, :4], "0.08040 -0.08727 -0.31025 0.06709")
    assert_values(trace.mixed[1][4, :4], "0.03170 0.04873 -0.43797 0.02942")
    for stage, norms in enumerate(
        (
            "8.88527 10.12471 10.41920 10.00175",
            "10.42858 10.09044 10.26613 10.76765",
            "10.80349 10.90008 10.82694 11.10560",
        )
    ):
        assert_values(trace.streams[2 * stage + 2][0].norm(dim=-1), norms)
    assert_values(trace.h[0][0, :4], "-3.06824 -6.34760 1.95357 -1.91306")
    assert_values(trace.h[0][4, :4], "2.11678 -5.59338 0.46659 -1.82876")
    assert_values(bias(model, [25])[0, :4], "0.27719 0.05436 -0.01745 -0.13483")
    assert_values((out.logits_SGV[0, 0] - bias(model, [25])[0])[:4], "0.49483 1.39248 1.10964 -0.71484")


def test_round_with_forced_drafts_goes_on_as_published(model: DeepseekV4) -> None:
    """Two of five drafts are accepted; the rows of the others were written, and are not read."""
    state = PagedModel(model, tokens=40)
    sequence = state.open()
    anchor = run(state, sequence, tiny_ids(11))[-1]
    assert run(state, sequence, [anchor, 28, 39, 18, 7, 8]) == [28, 39, 17, 5, 44, 15]
    sequence.length = 14
    out = draft(state, [sequence], [17])
    assert out.token_ids_SG.tolist() == [[15, 10, 1, 1, 1]]
    assert_values(out.logits_SGV[0, 0, :4], "0.18056 0.14192 -0.66043 1.22423")
    assert_values(out.logits_SGV[0, 4, :4], "-0.21970 3.43260 -0.29736 -1.32208")
    assert_values(out.confidence_SG[0], "0.32976 0.30619 0.21029 0.23587 0.46742")


@pytest.mark.parametrize("cuts", [[8], [3, 9, 10, *range(33, 37)]], ids=str)
def test_cutting_the_prompt_changes_no_draft(model: DeepseekV4, cuts: Iterable[int]) -> None:
    (_, whole), (_, cut) = drafts_after(model, tiny_ids(37)), drafts_after(model, tiny_ids(37), cuts)
    torch.testing.assert_close(cut.logits_SGV, whole.logits_SGV, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(cut.confidence_SG, whole.confidence_SG, rtol=0, atol=TOLERANCE)


def test_sequences_of_a_step_do_not_touch_each_other(model: DeepseekV4) -> None:
    """Lengths around the window and the page, in one block of blocks; what is in no page is NaN."""
    lengths = (1, 8, 9, 59, 65)
    state = PagedModel(model, tokens=128, sequences=len(lengths))
    sequences = [state.open() for _ in lengths]
    anchors = [run(state, seq, tiny_ids(n))[-1] for seq, n in zip(sequences, lengths, strict=True)]
    together = draft(state, sequences, anchors)
    for i, length in enumerate(lengths):
        _, alone = drafts_after(model, tiny_ids(length))
        assert together.token_ids_SG[i].tolist() == alone.token_ids_SG[0].tolist()
        torch.testing.assert_close(together.logits_SGV[i], alone.logits_SGV[0], rtol=0, atol=TOLERANCE)
        torch.testing.assert_close(together.confidence_SG[i], alone.confidence_SG[0], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("length", [1, 128, 129, 193])
def test_block_sees_the_window_before_it_and_all_of_itself(trace: Trace, length: int) -> None:
    """The release's window, across pages: attention of every stage against one matrix product over the rows that count."""
    c = WIDE_DSPARK
    model = tiny_model(config=c).requires_grad_(False)
    drafter, heads = drafter_of(model), c.num_attention_heads
    cuts = [max(1, length - 66), max(1, length - 1)] if length > 100 else []
    drafts_after(model, tiny_ids(length, c), cuts)
    x_main = rms_norm(linear(torch.cat(trace.taps), drafter.main_proj), drafter.main_norm, c.norm_eps)
    begin = max(0, length - 128)
    for stage, x in enumerate(trace.inputs):
        attn = drafter.stages[stage].attn

        def row(x: Tensor, first: int, attn: Any = attn) -> Tensor:
            angles = rope_angles(torch.arange(first, first + len(x)), model.rotary.main)
            return rope(rms_norm(linear(x, attn.wq_a_wkv)[:, c.q_lora_rank :], attn.kv_norm, c.norm_eps), *angles)

        keys = torch.cat([row(x_main[begin:length], begin), row(x, length)])
        angles = rope_angles(torch.arange(length, length + 5), model.rotary.main)
        latent = rms_norm(linear(x, attn.wq_a_wkv)[:, : c.q_lora_rank], attn.q_norm, c.norm_eps)
        q = linear(latent, attn.wq_b).view(5, heads, c.head_dim)
        q = rope(q * torch.rsqrt(q.square().mean(-1, keepdim=True) + c.norm_eps), *angles)
        weights = torch.exp(q @ keys.T * c.head_dim**-0.5)
        o = weights @ keys / (weights.sum(-1, keepdim=True) + attn.attn_sink.exp()[:, None])
        wanted = attn.project_out(rope(o, *angles, inverse=True))
        torch.testing.assert_close(trace.attended[stage], wanted, rtol=0, atol=1e-5)


def test_drafts_follow_what_is_picked(model: DeepseekV4) -> None:
    """Each draft's bias goes into the next one's logits, also if it was forced; confidence sees the previous token."""
    state = PagedModel(model, tokens=11)
    sequence = state.open()
    anchor = run(state, sequence, tiny_ids(11))[-1]
    chosen, best = [5, 6, 7, 8, 9], draft(state, [sequence], [anchor])
    out = draft(state, [sequence], [anchor], pick=lambda logits, place: torch.tensor([chosen[place]]))
    assert out.token_ids_SG.tolist() == [chosen]
    change = out.logits_SGV[0] - best.logits_SGV[0]
    before = [anchor, *best.token_ids_SG[0, :4].tolist()]
    torch.testing.assert_close(change, bias(model, [anchor, *chosen[:4]]) - bias(model, before), rtol=0, atol=1e-5)
    weight = drafter_of(model).confidence[0, TINY_DSPARK.hidden_size :]
    shift = (drafter_of(model).markov_w1[[anchor, *chosen[:4]]] - drafter_of(model).markov_w1[before]) @ weight
    torch.testing.assert_close(out.confidence_SG[0].logit() - best.confidence_SG[0].logit(), shift, rtol=0, atol=1e-4)


def test_model_has_a_place_for_every_tensor_of_the_drafter() -> None:
    config, numerics = parse_config(TINY_REFRESHED), plain()
    shapes = {name: spec.shape for name, spec in official_shapes(config).items()}
    with_drafter, without = (DeepseekV4(config, numerics, with_mtp=drafts) for drafts in (True, False))
    assert {name: slot.shape for name, slot in with_drafter.slots().items()} == shapes
    assert without.dspark is None and {name for name in shapes if not name.startswith("mtp.")} == set(without.slots())
    assert len(with_drafter.state_spec.layers) == len(without.state_spec.layers) + 3
    for model, drafts in ((with_drafter, True), (without, False)):
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        assert weight_bytes(FAMILIES["deepseek_v4"], config, numerics, with_mtp=drafts) == held


@pytest.mark.parametrize("deterministic", [False, True])
def test_main_model_is_the_same_with_a_drafter(deterministic: bool) -> None:
    ids, results = tiny_ids(50), []
    for with_drafter in (False, True):
        model = tiny_model(config=TINY_DSPARK, deterministic=deterministic, with_mtp=with_drafter)
        state = PagedModel(model, tokens=50)
        sequence = state.open()
        results.append(torch.cat([state.step([(sequence, part)])[0] for part in (ids[:40], ids[40:41], ids[41:])]))
        with torch.no_grad():
            results.append(model.one_pass(ids))
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


def quantized(config: V4Config, tensors: Mapping[str, Tensor], *, resident: bool, device: str) -> DeepseekV4:
    """A small model in the release's formats, its matrices widened or as they are stored."""
    numerics = rounded()
    if resident:
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        numerics = replace(numerics, device=torch.device(device), matrix_dtype=dtype, resident_fp8=True, resident_experts="fp4")
    return fill(poisoned(config, numerics, with_mtp=True), tensors).requires_grad_(False)


STORED = replace(
    OFFICIAL,
    vocab_size=128,
    num_hidden_layers=2,
    num_hash_layers=1,
    num_mtp_layers=0,
    ratios=(0, 4, 0, 0),
    dspark=replace(TINY_DSPARK.dspark, targets=(0, 1), stages=2, noise_token_id=127, markov_rank=16),
)
"""A model in the release's formats, of 2 layers and 2 stages."""
ANCHORS = [3, 4]


def stored_tensors() -> dict[str, Tensor]:
    return dict(dummy_tensors(STORED, V4_TENSORS, expert_format="fp4", quantized=True, seed=1))


def after_prompts(model: DeepseekV4) -> tuple[PagedModel, list[PagedSequence]]:
    """Run two prompts, the last token of each by itself."""
    state = PagedModel(model, tokens=80, sequences=2)
    sequences = [state.open(), state.open()]
    for sequence, length in zip(sequences, (20, 3), strict=True):
        ids = [(5 * i * i + i) % 128 for i in range(length)]
        state.step([(sequence, ids[:-1])])
        state.step([(sequence, ids[-1:])])
    return state, sequences


def distance(got: Drafts, wanted: Drafts) -> float:
    """Return how far the logits of the first drafts are apart: those of others follow from what was picked."""
    return float((got.logits_SGV - wanted.logits_SGV)[:, 0].norm() / wanted.logits_SGV[:, 0].norm())


def test_stored_formats_draft_as_widened_ones() -> None:
    """The same drafts but for roundings: a bfloat16 that falls on the other side moves logits by some 2^-8 of their size."""
    tensors = stored_tensors()
    wide, stored = (
        draft(*after_prompts(quantized(STORED, tensors, resident=resident, device="cpu")), ANCHORS) for resident in (False, True)
    )
    assert stored.logits_SGV.isfinite().all()
    assert distance(stored, wide) < 0.1
    assert (stored.confidence_SG - wide.confidence_SG).abs().max() < 0.1


@pytest.fixture(scope="module")
def on_gpu() -> tuple[PagedModel, list[PagedSequence]]:
    return after_prompts(quantized(STORED, stored_tensors(), resident=True, device="cuda"))


@pytest.mark.gpu
def test_every_op_of_a_draft_agrees_with_its_reference(on_gpu: tuple[PagedModel, list[PagedSequence]]) -> None:
    """The rows that a step keeps for the drafter, and a draft: each op on the kernels' own inputs."""
    state, sequences = on_gpu
    for slot in state.cache.slots().values():  # of no sequence: its poison would be among what an op writes
        slot.masked_fill_(slot.isnan(), 0.0)
    watch = OpWatch(state.model, state.cache, rows=2, tokens=2)
    with torch.no_grad(), watch.watching():
        state.step([(sequence, [7]) for sequence in sequences])
        draft(state, sequences, ANCHORS)
    assert [str(op) for op in watch.reports if op.problem is not None] == []
    ours = {op.op for op in watch.reports if op.compared and op.place.startswith("dspark")}
    assert ours >= {"latent_norms", "fp8_linear", "head_norms", "paged_attention", "hc_enter", "hc_head", "float_linear"}
    assert ours >= {"rms_norm", "moe_decode_small", "fp8_weight_linear", "hc_expand"}


@pytest.mark.gpu
def test_kernels_draft_like_references_with_other_last_bits(on_gpu: tuple[PagedModel, list[PagedSequence]]) -> None:
    """Codes of 8 and 4 bits make much of little: from the same rows, other last bits of a few embeddings move drafts as far.

    Most of them by some 0.07, one of eight by some 0.17, as if something were chosen otherwise: so it takes many to compare with.
    """
    state, sequences = on_gpu
    ours, embed = draft(state, sequences, ANCHORS), state.model.embed
    whole, moved = embed.clone(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "use_triton", lambda *_: False)
        theirs = draft(state, sequences, ANCHORS)
        for seed in range(24):
            columns = torch.randperm(STORED.hidden_size, generator=torch.Generator().manual_seed(seed))[:50]
            embed.view(torch.int16)[:, columns] ^= 1
            moved.append(distance(draft(state, sequences, ANCHORS), theirs))
            embed.copy_(whole)
    assert 0.01 < max(moved) < 0.5
    assert distance(ours, theirs) < 1.25 * max(moved)


@pytest.mark.parametrize("count", [1, 3])
def test_places_of_blocks_are_laid_out_as_kernels_read_them(count: int) -> None:
    """One block's rows were once a single number in disguise, which a kernel would have read past."""
    firsts = torch.arange(count) * 70
    where = DraftBlock.of(firsts, torch.zeros(count, 3, dtype=torch.int32), firsts.int() // 64, 5, torch.ones(4))
    for paging in (where.own, where.whole):
        tensors = [getattr(paging, name) for name in paging.__slots__ if name not in ("width", "splits", "derived", "host_spans")]
        assert all(t.is_contiguous() and t.dtype == torch.int32 for t in tensors)
    assert where.own.positions_T.tolist() == [70 * i + k for i in range(count) for k in range(5)]
    assert where.whole.positions_T.tolist() == [70 * i + 4 for i in range(count) for _ in range(5)]


def test_padding_drafts_something_and_changes_nothing(model: DeepseekV4) -> None:
    state = PagedModel(model, tokens=40)
    sequence = state.open()
    anchor = run(state, sequence, tiny_ids(11))[-1]
    before = [store.memory.clone() for _, part, store in state.cache.stores() if part.lifetime == "window"]
    out = draft(state, [sequence, None], [anchor, 0])
    assert out.token_ids_SG[0].tolist() == [15, 1, 1, 1, 1] and out.logits_SGV[1].isfinite().all()
    after = [store.memory for _, part, store in state.cache.stores() if part.lifetime == "window"]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
