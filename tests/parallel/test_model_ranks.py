"""V4 on several ranks against V4 on one, by layout and dispatcher."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.layout import Layout
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.weights.dummy import dummy_tensors
from tests.golden import tiny_checkpoint, tiny_ids
from tests.parallel.dispatchers import OwnAllGather, OwnLocal
from tests.parallel.models import PLAIN, QUANTIZED, Job, logits, logits_near, logits_sharded, rebalanced, write
from tests.parallel.ranks import RankError, Ranks

ONE = Layout()
ANY = ["local", "all_gather", "all_to_all"]
TRAVEL = ["all_gather", "all_to_all"]


@pytest.fixture(scope="module")
def plain_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = write(tmp_path_factory.mktemp("plain") / "model", tiny_checkpoint(PLAIN))
    ids = tiny_ids(46, PLAIN)
    # The second replica has fewer tokens, and other numbers of them in every step.
    prompts = (tuple(ids), tuple(reversed(ids[:31])))
    return Job(folder=folder, config=PLAIN, prompts=prompts, cuts=((30, 43, 44, 45), (5, 27, 28, 30)))


@pytest.fixture(scope="module")
def quantized_job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    tensors = dict(dummy_tensors(QUANTIZED, V4_TENSORS, expert_format="fp4", quantized=True))
    folder = write(tmp_path_factory.mktemp("quantized") / "model", tensors)
    ids = [(37 * t * t + 11 * t) % QUANTIZED.vocab_size for t in range(139)]
    prompts = (tuple(ids), tuple(reversed(ids[:70])))
    return Job(folder=folder, config=QUANTIZED, prompts=prompts, cuts=((130, 137, 138), (40, 41, 69)), deterministic=True)


@pytest.fixture(scope="module")
def plain_expected(ranks: Ranks, plain_job: Job) -> list[Tensor]:
    return on_one_rank(ranks, plain_job)


@pytest.fixture(scope="module")
def quantized_expected(ranks: Ranks, quantized_job: Job) -> list[Tensor]:
    return on_one_rank(ranks, quantized_job)


def on_one_rank(ranks: Ranks, job: Job) -> list[Tensor]:
    """Return the logits of each replica's prompt."""
    jobs = [replace(job, prompts=(prompt,), cuts=(cuts,)) for prompt, cuts in zip(job.prompts, job.cuts, strict=True)]
    return [ranks.run(logits, one, layout=ONE)[0] for one in jobs]


@pytest.mark.parametrize(
    ("layout", "dispatchers"),
    [
        (Layout(tp=2), ["auto"]),
        (Layout(tp=4), ["auto"]),
        (Layout(tp=4, ep=2), ["local"]),
        (Layout(tp=2, ep=2), ANY),
        (Layout(tp=2, ep=4), ANY),
        (Layout(ep=2), ANY),
        (Layout(ep=4), ANY),
        (Layout(dp=2), ["auto"]),
        (Layout(dp=2, tp=2), ["auto"]),
        (Layout(dp=2, tp=2, ep=2), ["local"]),
        (Layout(dp=2, ep=2), TRAVEL),
        (Layout(dp=2, tp=2, ep=4), TRAVEL),
        (Layout(pp=2), ["auto"]),
        (Layout(tp=2, pp=2), ["auto"]),
        (Layout(ep=2, pp=2), ["all_to_all"]),
    ],
    ids=str,
)
def test_unquantized_model_gives_the_logits_of_one_rank(
    ranks: Ranks, plain_job: Job, plain_expected: list[Tensor], layout: Layout, dispatchers: list[str]
) -> None:
    for dispatcher in dispatchers:
        answers = ranks.run(logits, replace(plain_job, dispatcher=dispatcher), layout=layout)
        for rank, got in enumerate(answers):
            place = layout.place(rank)
            assert (got is None) == (place.pp < layout.pp - 1)
            if got is not None:
                torch.testing.assert_close(got, plain_expected[place.dp], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "dispatcher"),
    [
        (Layout(ep=2), "all_to_all"),
        (Layout(ep=4), "all_to_all"),
        (Layout(dp=2), "auto"),
        (Layout(dp=2, ep=2), "all_to_all"),
        (Layout(pp=2), "auto"),
        (Layout(ep=2, pp=2), "all_to_all"),
    ],
    ids=str,
)
def test_official_formats_give_the_bits_of_one_rank_where_no_sum_is_cut(
    ranks: Ranks, quantized_job: Job, quantized_expected: list[Tensor], layout: Layout, dispatcher: str
) -> None:
    answers = ranks.run(logits, replace(quantized_job, dispatcher=dispatcher), layout=layout)
    for rank, got in enumerate(answers):
        place = layout.place(rank)
        assert (got is None) == (place.pp < layout.pp - 1)
        assert got is None or torch.equal(got, quantized_expected[place.dp])


@pytest.mark.parametrize(
    ("layout", "dispatcher"),
    [(Layout(tp=2), "auto"), (Layout(tp=2, ep=2), "local"), (Layout(ep=4), "local"), (Layout(dp=2, ep=2), "all_gather")],
    ids=str,
)
def test_official_formats_stay_within_their_limits_where_sums_are_cut(
    ranks: Ranks, quantized_job: Job, quantized_expected: list[Tensor], layout: Layout, dispatcher: str
) -> None:
    """The limits for whole models of the reference data: a moved rounding grows to the noise of the quantization."""
    answers = ranks.run(logits, replace(quantized_job, dispatcher=dispatcher), layout=layout)
    for rank, got in enumerate(answers):
        expected = quantized_expected[layout.place(rank).dp]
        off = (got - expected).norm(dim=1) / expected.norm(dim=1)
        assert off.median() < 9e-2 and off.quantile(0.9) < 0.25
        assert (got.argmax(1) == expected.argmax(1)).float().mean() > 0.75


@pytest.mark.parametrize(
    ("layout", "dispatcher"),
    [
        (Layout(tp=2), "auto"),
        (Layout(tp=4), "auto"),
        (Layout(tp=2, ep=4), "all_to_all"),
        (Layout(ep=2), "local"),
        (Layout(dp=2, tp=2, ep=4), "all_gather"),
        (Layout(tp=2, pp=2), "auto"),
    ],
    ids=str,
)
def test_residual_streams_in_shards_of_tokens_give_the_same_logits(
    ranks: Ranks,
    plain_job: Job,
    plain_expected: list[Tensor],
    quantized_job: Job,
    layout: Layout,
    dispatcher: str,
) -> None:
    """Steps of 13, 23 and 30 tokens do not divide evenly; in official formats, bits are those of whole streams."""
    answers = ranks.run(logits_sharded, replace(plain_job, dispatcher=dispatcher), layout=layout)
    for rank, got in enumerate(answers):
        if got is not None:
            torch.testing.assert_close(got, plain_expected[layout.place(rank).dp], rtol=0, atol=1e-5)
    if layout.tp <= 2 and layout.ep <= 2:
        job = replace(quantized_job, dispatcher=dispatcher)
        for got, whole in zip(ranks.run(logits_sharded, job, layout=layout), ranks.run(logits, job, layout=layout), strict=True):
            assert (got is None and whole is None) or torch.equal(got, whole)


@pytest.mark.parametrize(
    ("layout", "dispatcher"),
    [
        (Layout(tp=2), "auto"),
        (Layout(tp=2, ep=2), "local"),
        (Layout(dp=2, ep=2), "all_gather"),
        (Layout(dp=2, ep=2), "all_to_all"),
        (Layout(dp=2, tp=2, ep=4), "all_gather"),
    ],
    ids=str,
)
def test_weights_that_stay_quantized_can_be_shared(ranks: Ranks, quantized_job: Job, layout: Layout, dispatcher: str) -> None:
    """The formats of a GPU, on the references: FP8 matrices, experts in tiles."""
    first, second = quantized_job.prompts
    job = replace(quantized_job, prompts=(first[:70], second[:41]), cuts=((60, 69), (5, 40)), resident=True)
    wanted = on_one_rank(ranks, job)
    answers = ranks.run(logits, replace(job, dispatcher=dispatcher), layout=layout)
    for rank, got in enumerate(answers):
        expected = wanted[layout.place(rank).dp]
        off = (got - expected).norm(dim=1) / expected.norm(dim=1)
        assert off.median() < (9e-2 if layout.tp > 1 else 1e-2) and off.quantile(0.9) < 0.25
        assert dispatcher != "all_to_all" or torch.equal(got, expected)


@pytest.mark.parametrize(
    ("layout", "dispatcher", "redundant", "resident"),
    [
        (Layout(ep=2), "all_to_all", 2, False),
        (Layout(ep=4), "all_to_all", 4, True),
        (Layout(ep=2), "local", 0, True),
        (Layout(dp=2, ep=2), "all_gather", 2, True),
        (Layout(tp=2, ep=2), "local", 4, False),
    ],
    ids=str,
)
def test_experts_move_where_they_are_needed_and_results_stay(
    ranks: Ranks, quantized_job: Job, layout: Layout, dispatcher: str, redundant: int, resident: bool
) -> None:
    prompts, cuts = tuple(prompt[:40] for prompt in quantized_job.prompts), ((30, 39), (30, 39))
    change = {
        "prompts": prompts,
        "cuts": cuts,
        "dispatcher": dispatcher,
        "redundant_experts": redundant,
        "resident": resident,
        "known_shapes": True,
    }
    answers = ranks.run(rebalanced, replace(quantized_job, **change), layout=layout)
    assert sum(moved for _, _, moved, _, _ in answers) > 0
    for before, after, _, uneven, even in answers:
        off = (after - before).norm(dim=1) / before.norm(dim=1)
        assert off.median() < 1e-2 and off.quantile(0.9) < 0.25
        assert dispatcher != "all_to_all" or torch.equal(before, after)
        assert sum(even) < sum(uneven)


@pytest.mark.parametrize(
    ("layout", "redundant"),
    [(Layout(ep=2), 2), (Layout(tp=2, ep=2), None), (Layout(tp=2), None), (Layout(dp=2, ep=2), None)],
    ids=str,
)
def test_steps_of_few_tokens_have_the_bits_of_each_part_by_itself(
    ranks: Ranks, quantized_job: Job, layout: Layout, redundant: int | None
) -> None:
    prompts, cuts = tuple(prompt[:30] for prompt in quantized_job.prompts), ((20, 27, 29), (22, 27, 28))
    job = replace(quantized_job, prompts=prompts, cuts=cuts, resident=True, redundant_experts=redundant, known_shapes=True)
    ways = ("all_gather", OwnAllGather) if layout.dp > 1 else ("local", OwnLocal)
    together, apart = (ranks.run(logits, replace(job, dispatcher=way), layout=layout) for way in ways)
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))
    if layout.dp > 1:
        near = ranks.run(logits_near, replace(job, dispatcher="all_gather"), layout=layout)
        assert all(torch.equal(a, b) for a, b in zip(near, apart, strict=True))


def test_layout_that_does_not_suit_the_model_is_refused_on_every_rank(ranks: Ranks, plain_job: Job) -> None:
    with pytest.raises(RankError) as raised:
        ranks.run(logits, replace(plain_job, config=replace(PLAIN, vocab_size=61)), layout=Layout(tp=2))
    assert str(raised.value).count("ConfigError: vocab_size=61 cannot be shared equally by tp=2 ranks") == 2


def test_cut_through_scale_blocks_is_refused(ranks: Ranks, quantized_job: Job) -> None:
    with pytest.raises(
        RankError, match=r"shared_experts\.w1.weight: tp=4 cuts dimension 0 of \[256, 256\] every 64 .*blocks of 128"
    ):
        ranks.run(logits, quantized_job, layout=Layout(tp=4))
