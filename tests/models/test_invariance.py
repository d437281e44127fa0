"""A token's result depends on its own sequence only: not on how the prompt is cut, nor on the others in the batch.

With ``deterministic`` to the bit, without it up to the order of summation. Everything runs through pages in a shuffled physical
order, and what a sequence does not own is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dsv4lite.errors import UnsupportedError
from dsv4lite.models.config import ModelConfig
from dsv4lite.models.deepseek_mla.model import DeepseekMla
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from tests.golden import TINY, WIDE, official_ids, tiny_ids, tiny_model
from tests.mla import random_model
from tests.models.paged import PagedModel, PagedSequence, make_batch, run_in_cuts

CONFIGS = {"short_groups": TINY, "release_ratios": WIDE}
LENGTH = {"short_groups": 280, "release_ratios": 400, "v3": 280, "v32": 280}
AnyModel = DeepseekV4 | DeepseekMla


def model_of(name: str, *, deterministic: bool) -> AnyModel:
    """Return a model with its MTP block, of V4 or of the MLA family."""
    if name in CONFIGS:
        return tiny_model(config=CONFIGS[name], deterministic=deterministic).requires_grad_(False)
    return random_model(name, deterministic=deterministic).requires_grad_(False)


@pytest.fixture(scope="module", params=LENGTH)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def exact(name: str) -> AnyModel:
    return model_of(name, deterministic=True)


@pytest.fixture(scope="module")
def loose(name: str) -> AnyModel:
    return model_of(name, deterministic=False)


@pytest.fixture(scope="module")
def whole(exact: AnyModel, name: str) -> Tensor:
    """Logits of the longest prompt in one pass."""
    return exact.logits(exact.one_pass(tiny_ids(LENGTH[name], exact.config)))


def random_cuts(length: int, seed: int) -> list[int]:
    """Cut mostly at boundaries of groups and pages, or one token beside them."""
    rng = random.Random(seed)
    near = [boundary + d for boundary in (4, 8, 64, 128, 192, 256, 320) for d in (-1, 0, 1)]
    places = {rng.choice(near) if rng.random() < 0.5 else rng.randrange(1, length) for _ in range(rng.randrange(1, 14))}
    return sorted(place for place in places if place < length)


def random_ids(config: ModelConfig, length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(config.vocab_size) for _ in range(length)]


# How a prompt is cut -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_cutting_a_prompt_changes_no_bit(exact: AnyModel, name: str, whole: Tensor, seed: int) -> None:
    ids = tiny_ids(LENGTH[name], exact.config)
    cuts = random_cuts(len(ids), seed)
    assert torch.equal(exact.logits(run_in_cuts(exact, ids, cuts, seed=seed)), whole), cuts


def test_token_by_token_changes_no_bit(exact: AnyModel, name: str, whole: Tensor) -> None:
    """From nothing, and across boundaries of groups, windows and pages; in between a chunk saves time."""
    ids = tiny_ids(LENGTH[name], exact.config)[:133]
    cuts = [*range(1, 20), *range(60, 68), *range(122, len(ids))]
    assert torch.equal(exact.logits(run_in_cuts(exact, ids, cuts)), whole[: len(ids)])


def test_steps_after_a_long_prompt_change_no_bit(exact: AnyModel, name: str, whole: Tensor) -> None:
    ids = tiny_ids(LENGTH[name], exact.config)
    first = len(ids) - 20
    assert torch.equal(exact.logits(run_in_cuts(exact, ids, range(first, len(ids)))), whole)


def test_shorter_prompt_is_a_prefix_to_the_bit(exact: AnyModel, name: str, whole: Tensor) -> None:
    ids = tiny_ids(LENGTH[name], exact.config)
    for count in (1, 2, 3, 4, 5, 63, 64, 65, 127, 129):
        assert torch.equal(exact.logits(exact.one_pass(ids[:count])), whole[:count]), count


def test_sequences_of_one_pass_are_as_each_alone(exact: DeepseekV4) -> None:
    """Also across boundaries of groups, windows and pages, and of one token."""
    prompts = [random_ids(exact.config, length, length) for length in (133, 1, 260, 64)]
    together = exact.logits(exact.one_pass(*prompts)).split([len(prompt) for prompt in prompts])
    for prompt, found in zip(prompts, together, strict=True):
        assert torch.equal(found, exact.logits(exact.one_pass(prompt)))


@pytest.mark.parametrize("seed", range(3))
def test_cutting_a_prompt_changes_next_to_nothing_otherwise(loose: AnyModel, name: str, whole: Tensor, seed: int) -> None:
    ids = tiny_ids(LENGTH[name], loose.config)
    cuts = sorted({*random_cuts(len(ids), seed), *range(len(ids) - 5, len(ids))})
    assert (loose.logits(run_in_cuts(loose, ids, cuts, seed=seed)) - whole).abs().max() < 1e-5


# Others in the batch ------------------------------------------------------------------------------


def run_together(model: AnyModel, prompts: Sequence[Sequence[int]], seed: int) -> list[Tensor]:
    """Run prompts together, each step a random choice of sequences and numbers of tokens; return each one's logits."""
    rng = random.Random(seed)
    paged = PagedModel(model, tokens=max(len(p) for p in prompts), sequences=len(prompts), seed=seed)
    sequences = [paged.open() for _ in prompts]
    done: list[list[Tensor]] = [[] for _ in prompts]
    while waiting := [i for i, s in enumerate(sequences) if s.length < len(prompts[i])]:
        parts: list[tuple[PagedSequence, Sequence[int]]] = []
        chosen = rng.sample(waiting, rng.randrange(1, len(waiting) + 1))
        for i in chosen:
            begin = sequences[i].length
            count = rng.choice((1, 1, 2, 3, 5, 17, 70, 200))
            parts.append((sequences[i], prompts[i][begin : begin + count]))
        for i, streams in zip(chosen, paged.step(parts), strict=True):
            done[i].append(streams)
    return [model.logits(torch.cat(parts)) for parts in done]


@pytest.mark.parametrize("seed", range(3))
def test_others_in_the_batch_change_no_bit(exact: AnyModel, name: str, whole: Tensor, seed: int) -> None:
    prompts = [tiny_ids(LENGTH[name], exact.config), random_ids(exact.config, 133, seed), random_ids(exact.config, 60, seed + 9)]
    together = run_together(exact, prompts, seed)
    assert torch.equal(together[0], whole)
    for prompt, got in zip(prompts[1:], together[1:], strict=True):
        assert torch.equal(got, exact.logits(exact.one_pass(prompt)))


def test_others_in_the_batch_change_next_to_nothing_otherwise(loose: AnyModel, name: str, whole: Tensor) -> None:
    prompts = [tiny_ids(LENGTH[name], loose.config), random_ids(loose.config, 133, 0), random_ids(loose.config, 60, 9)]
    assert (run_together(loose, prompts, 0)[0] - whole).abs().max() < 1e-5


def test_sequence_full_of_nan_changes_no_bit_of_others(name: str, whole: Tensor) -> None:
    """Nothing of one sequence reaches another: not through a batch, a page or a slot that both have had."""
    model = model_of(name, deterministic=True)
    ids = tiny_ids(LENGTH[name], model.config)[:140]
    sick_id = next(i for i in range(model.config.vocab_size) if i not in ids)
    with torch.no_grad():
        model.embed[sick_id] = float("nan")
    paged = PagedModel(model, tokens=300)
    for _ in range(2):  # the second time in the pages that the sick sequence has left
        well, sick = paged.open(), paged.open()
        got = []
        for begin, end in ((0, 1), (1, 40), (40, 41), (41, 139), (139, 140)):
            parts = [(sick, [sick_id] * (end - begin)), (well, ids[begin:end])]
            streams = paged.step(parts)
            assert streams[0].isnan().all()
            got.append(streams[1])
        assert torch.equal(model.logits(torch.cat(got)), whole[: len(ids)])
        paged.close(sick)
        paged.close(well)


# What an engine does to a sequence -----------------------------------------------------------------


def test_rejected_drafts_leave_no_trace(exact: AnyModel, name: str, whole: Tensor) -> None:
    """Wrong tokens are run across boundaries of groups and pages, then taken back: only the compressor state is put back."""
    ids = tiny_ids(LENGTH[name], exact.config)[:136]
    paged = PagedModel(exact, tokens=len(ids) + 8)
    sequence = paged.open()
    got = [paged.step([(sequence, ids[:58])])[0]]
    backup = torch.tensor([next(slot for slot in range(paged.cache.sizes.slots) if slot != sequence.slot)])
    slot = torch.tensor([sequence.slot])
    while sequence.length < len(ids):
        begin = sequence.length
        paged.cache.copy_slots(slot, backup)
        paged.step([(sequence, random_ids(exact.config, 5, begin))])
        paged.cache.copy_slots(backup, slot)
        sequence.length = begin
        got.append(paged.step([(sequence, ids[begin : begin + 3])])[0])
    assert torch.equal(exact.logits(torch.cat(got)), whole[: len(ids)])


def test_prefix_continues_from_a_snapshot_to_the_bit(exact: AnyModel, name: str, whole: Tensor) -> None:
    """Grow pages, the window and a snapshot at a 256-token boundary are all that a cached prefix needs."""
    ids = tiny_ids(LENGTH[name], exact.config)
    paged = PagedModel(exact, tokens=len(ids), sequences=2)
    first = paged.open()
    paged.step([(first, ids[:100])])
    paged.step([(first, ids[100:256])])
    paged.cache.save(torch.tensor([first.slot]), torch.tensor([1]))
    second = paged.open()
    for slot in paged.cache.slots().values():
        slot[second.slot] = float("nan")
    paged.cache.restore(torch.tensor([1]), torch.tensor([second.slot]))
    second.length, second.pages = 256, list(first.pages)
    second.window_first = first.window_first
    second.window_pages = [page if page < 0 else paged.take_window() for page in first.window_pages]
    held = [i for i, page in enumerate(first.window_pages) if page >= 0]
    paged.cache.copy_pages(
        "window", torch.tensor([first.window_pages[i] for i in held]), torch.tensor([second.window_pages[i] for i in held])
    )
    paged.step([(first, random_ids(exact.config, 70, 1))])
    got = [paged.step([(second, ids[a:b])])[0] for a, b in ((256, 257), (257, 271), (271, len(ids)))]
    assert torch.equal(exact.logits(torch.cat(got)), whole[256:])


def test_mtp_block_through_pages_changes_no_bit(exact: AnyModel, name: str) -> None:
    """The MTP block sees the streams at t and the token at t + 1, in chunks as in one pass."""
    ids = tiny_ids(141, exact.config)
    batch, caches = exact.prepare(ids[1:], drafter=True)
    expected = exact.mtp_forward(exact.one_pass(ids[:-1]), batch, caches[-1])
    paged = PagedModel(exact, tokens=len(ids))
    sequence = paged.open()
    got = []
    for a, b in ((0, 1), (1, 62), (62, 63), (63, 64), (64, 130), (130, 131), (131, 140)):
        inputs = paged.prepare(sequence, ids[a:b])
        streams = exact(make_batch(exact, [inputs]), paged.cache.layers)
        shifted = make_batch(exact, [inputs._replace(token_ids=tuple(ids[a + 1 : b + 1]))])
        got.append(exact.mtp_forward(streams, shifted, paged.cache.layers[-1]))
        sequence.length = b
    assert torch.equal(exact.mtp_logits(torch.cat(got)), exact.mtp_logits(expected))


@pytest.mark.parametrize("ratio", [6, 100, 512])
def test_groups_that_do_not_fill_a_page_are_refused(ratio: int) -> None:
    """The 85th group of 6 tokens ends on the second page, but its entry would be the first row of the third."""
    with pytest.raises(UnsupportedError, match=f"compress_ratios has {ratio}: it must divide 256"):
        replace(TINY, ratios=(0, 4, ratio, 4, ratio, 0))


# The quantized model -------------------------------------------------------------------------------


def test_cutting_a_prompt_of_the_quantized_model_changes_no_bit(official_deterministic: DeepseekV4) -> None:
    model, ids = official_deterministic, official_ids(280)
    whole = model.logits(model.one_pass(ids))
    cuts = [1, 2, 63, 64, 70, 255, 256, 278, 279]
    assert torch.equal(model.logits(run_in_cuts(model, ids, cuts)), whole)


def test_others_in_the_batch_of_the_quantized_model_change_no_bit(official_deterministic: DeepseekV4) -> None:
    model = official_deterministic
    prompts = [official_ids(45), random_ids(model.config, 20, 1), random_ids(model.config, 7, 2)]
    for prompt, got in zip(prompts, run_together(model, prompts, 3), strict=True):
        assert torch.equal(got, model.logits(model.one_pass(prompt)))


@pytest.mark.parametrize("variant", ["v3", "v32"])
def test_cutting_a_prompt_of_fp8_rows_changes_no_bit(variant: str) -> None:
    model = random_model(variant, deterministic=True, fp8_rows=True).requires_grad_(False)
    ids = tiny_ids(280, model.config)
    whole = model.logits(model.one_pass(ids))
    assert torch.equal(model.logits(run_in_cuts(model, ids, [1, 2, 63, 64, 70, 255, 256, 278, 279])), whole)
    plain = random_model(variant, deterministic=True).requires_grad_(False)
    assert not torch.equal(plain.logits(plain.one_pass(ids)), whole)
