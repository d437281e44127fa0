"""The sampling ops against plain Python: hash, noise, draws, truncation, scores, and their independence of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv4lite.kernels import sampling

INF = math.inf
KNOWN_BITS = [676146704, 3463462994, 2181951770, 105591155]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mix(x: int, key: int) -> int:
    """The hash of the module's docstring, in Python's integers."""
    x ^= x >> 16
    x = (x * 0x21F0AAAD + key) % 2**32
    x ^= x >> 15
    x = (x * 0x735A2D97) % 2**32
    return x ^ (x >> 15)


def bits_of(stream: tuple[int, int], position: int, token_id: int) -> int:
    a, b = (mix((half ^ position) % 2**32, 0) for half in stream)
    return mix(token_id ^ a, b)


# --------------------------------------------------------------------------------------------------------- randomness


@pytest.mark.parametrize("vocab_size", [1, 3, 8, 61, 257, 4097])
def test_random_bits_are_those_of_the_written_formula(vocab_size: int) -> None:
    streams = [(0, 0), (-1, -1), (2**31 - 1, -(2**31)), (123456789, -987654321)]
    positions = [0, 2**31 - 1, 1, 77]
    got = sampling.random_bits(int32(streams), int32(positions), vocab_size)
    assert got.dtype == torch.int32
    expected = [[bits_of(s, p, t) for t in range(vocab_size)] for s, p in zip(streams, positions)]
    assert [[x % 2**32 for x in row] for row in got.tolist()] == expected


def test_random_bits_keep_known_values() -> None:
    """A seed gives the same text in every version."""
    got = sampling.random_bits(int32([[1, 2]]), int32([3]), 4)
    assert [x % 2**32 for x in got[0].tolist()] == [bits_of((1, 2), 3, t) for t in range(4)] == KNOWN_BITS


def z_scores_of_bits(bits: Tensor) -> Tensor:
    flat = bits.flatten()
    ones = torch.stack([(flat >> i & 1).sum() for i in range(32)]).double()
    return (ones - len(flat) / 2) / math.sqrt(len(flat) / 4)


def test_random_bits_are_balanced_and_unrelated_between_neighbours() -> None:
    streams = torch.randint(-(2**31), 2**31, (2, 2), generator=seeded(), dtype=torch.int64).to(torch.int32)
    positions = torch.arange(256, dtype=torch.int32)
    one = sampling.random_bits(streams[:1].expand(256, 2), positions, 1024)
    other = sampling.random_bits(streams[1:].expand(256, 2), positions, 1024)
    half_same = torch.stack([streams[0, 0], streams[1, 1]])
    third = sampling.random_bits(half_same.expand(256, 2), positions, 1024)
    for name, bits in {
        "alone": one,
        "next token": one[:, 1:] ^ one[:, :-1],
        "next position": one[1:] ^ one[:-1],
        "far token": one[:, 512:] ^ one[:, :512],
        "other stream": one ^ other,
        "half of the stream": one ^ third,
        "neighbouring bits": one ^ (one << 1),
    }.items():
        z = z_scores_of_bits(bits)[1:] if name == "neighbouring bits" else z_scores_of_bits(bits)
        assert z.abs().max() < 5, name


def test_random_bits_follow_every_input_bit() -> None:
    """Flipping any bit of stream, position or token id flips about half of the output bits."""
    base = torch.randint(-(2**31), 2**31, (4096, 3), generator=seeded(1), dtype=torch.int64).to(torch.int32)
    reference = sampling.random_bits(base[:, :2], base[:, 2], 1)
    for column in range(3):
        for bit in range(31):
            flipped = base.clone()
            flipped[:, column] ^= 1 << bit
            changed = sampling.random_bits(flipped[:, :2], flipped[:, 2], 1) ^ reference
            share = torch.stack([(changed >> i & 1).double().mean() for i in range(32)])
            assert share.min() > 0.4 and share.max() < 0.6, (column, bit)


def test_log_exponential_is_finite_and_increasing_at_the_extremes() -> None:
    bits = int32([0, 1, 2, 2**30, 2**31 - 2**8, 2**31 - 65, 2**31 - 64, 2**31 - 1, -1, -(2**31)])
    values = sampling.log_exponential(bits.clone())
    assert values.isfinite().all()
    assert values[0] == values[-1] == values.min() and values.min() > -22.3
    assert values[7] == values[8] == values.max() and values.max() < 2.9
    assert (values[:8].diff() >= 0).all() and (values[:5].diff() > 0).all()


def test_log_exponential_has_the_exponential_distribution() -> None:
    values = sampling.log_exponential(sampling.random_bits(int32([[5, 6]]), int32([0]), 200_000)).double().exp().flatten()
    ordered = (1 - torch.exp(-values)).sort().values
    ideal = (torch.arange(len(ordered), dtype=torch.float64) + 0.5) / len(ordered)
    assert (ordered - ideal).abs().max() < 1.95 / math.sqrt(len(ordered))  # Kolmogorov-Smirnov at 0.1 %


# ---------------------------------------------------------------------------------------------------------------- draws

DRAWS = 200_000


def chi_square(tokens: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """Return the statistic and the value that it exceeds by chance once in a million (Wilson and Hilferty)."""
    possible = probabilities > 0
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() * len(tokens)
    assert expected.min() > 5
    freedom = int(possible.sum()) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 4.753 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts[possible] - expected) ** 2 / expected).sum()), limit


def many_draws(scaled: Tensor, stream: tuple[int, int] = (11, -12)) -> Tensor:
    tokens = []
    for begin in range(0, DRAWS, 20_000):
        positions = torch.arange(begin, begin + 20_000, dtype=torch.int32)
        tokens.append(sampling.draw(scaled.expand(20_000, -1), int32([stream]).expand(20_000, 2), positions))
    return torch.cat(tokens)


def logits_of(vocab_size: int) -> Tensor:
    return torch.randn((1, vocab_size), generator=seeded(3)) * 1.5


def assert_softmax(tokens: Tensor, scaled: Tensor) -> None:
    statistic, limit = chi_square(tokens, scaled.double().softmax(-1)[0])
    assert statistic < limit


@pytest.mark.parametrize("stream", [(11, -12), (0, 0), (2**31 - 1, -(2**31))])
def test_draw_has_the_softmax_distribution(stream: tuple[int, int]) -> None:
    scaled = logits_of(61)
    assert_softmax(many_draws(scaled, stream), scaled)


def test_draw_over_streams_and_over_token_places_has_the_same_distribution() -> None:
    scaled = logits_of(17)
    streams = torch.stack([torch.arange(DRAWS, dtype=torch.int32), torch.full((DRAWS,), 9, dtype=torch.int32)], dim=1)
    assert_softmax(sampling.draw(scaled.expand(DRAWS, -1), streams, torch.zeros(DRAWS, dtype=torch.int32)), scaled)


def test_draw_test_detects_a_bias_of_one_percent() -> None:
    """The tests above can fail: one percent of mass moved between two tokens is seen."""
    scaled = logits_of(61)
    biased = scaled.double().softmax(-1)[0]
    order = biased.argsort(descending=True)
    biased[order[0]] -= 0.01
    biased[order[1]] += 0.01
    statistic, limit = chi_square(many_draws(scaled), biased)
    assert statistic > limit


def test_draw_of_a_truncated_distribution_is_exact() -> None:
    scaled = sampling.drop_below(logits_of(61) - logits_of(61).max(), torch.tensor([[math.log(0.02)]]))
    kept = sampling.keep_best(scaled, torch.tensor([[20]]), torch.tensor([[0.9]], dtype=torch.float64), width=20)
    assert 1 < int(kept.isfinite().sum()) < 20
    assert_softmax(many_draws(kept), kept)


def test_draw_takes_the_only_possible_token_whatever_the_noise() -> None:
    rows = 5_000
    scaled = torch.full((rows, 61), -INF)
    scaled[:, 37] = 0
    assert (sampling.draw(scaled, int32([[3, 4]]).expand(rows, 2), torch.arange(rows, dtype=torch.int32)) == 37).all()


def test_draw_depends_on_stream_and_position() -> None:
    scaled = torch.zeros((64, 4096))
    positions = torch.arange(64, dtype=torch.int32)
    one = sampling.draw(scaled, int32([[1, 1]]).expand(64, 2), positions)
    assert len(set(one.tolist())) > 60
    for stream in ((1, 2), (2, 1)):
        assert (sampling.draw(scaled, int32([stream]).expand(64, 2), positions) != one).sum() > 60
    assert torch.equal(sampling.draw(scaled, int32([[1, 1]]).expand(64, 2), positions), one)


# ------------------------------------------------------------------------------------------------------ batch invariance


needs_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("place", ["cpu", "two threads", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("vocab_size", [61, 4096, 129280])
def test_rows_have_the_same_bits_alone_and_in_a_batch(vocab_size: int, place: str) -> None:
    torch.set_num_threads(2 if place == "two threads" else 1)
    device = "cuda" if place == "cuda" else "cpu"
    rows = 64
    logits = torch.randn((rows, vocab_size), generator=seeded()) * 3
    logits[:, ::9] += 12
    token_ids = torch.randint(vocab_size, (rows,), generator=seeded(1))
    streams = torch.randint(-(2**31), 2**31, (rows, 2), generator=seeded(2), dtype=torch.int64).to(torch.int32)
    positions = torch.arange(1000, 1000 + rows, dtype=torch.int32)
    top_k = torch.arange(1, rows + 1).clamp_max(vocab_size).unsqueeze(-1)
    top_p = torch.linspace(0.05, 0.99, rows, dtype=torch.float64).unsqueeze(-1)
    # Sorting a whole large vocabulary takes long on the CPU; a small nucleus needs none of it.
    nucleus = top_p * 1e-3 if vocab_size == 129280 else top_p
    counts = torch.randint(3, (rows, vocab_size), generator=seeded(3), dtype=torch.int32)
    column = torch.linspace(0.3, 1.7, rows).unsqueeze(-1)
    everything = (logits, token_ids, streams, positions, top_k, top_p, nucleus, counts, column)

    def results(part: slice) -> list[Tensor]:
        x, ids, stream, position, k, p, small_p, count, factor = (t[part].to(device) for t in everything)
        top, best, _ = sampling.argmax_finite(x)
        scaled = sampling.scale(x, top, factor)
        return [
            best,
            scaled,
            sampling.penalize(x, count > 1, count, repetition=factor, frequency=factor, presence=factor),
            sampling.drop_below(scaled, -3 * factor),
            sampling.keep_best(scaled, k, p, width=int(k.max())),
            sampling.keep_nucleus(scaled, small_p),
            sampling.log_exponential(sampling.random_bits(stream, position, vocab_size)),
            sampling.draw(scaled, stream, position),
            *sampling.token_logprobs(x, ids, 5),
        ]

    batch = results(slice(None))
    for part in [*(slice(i, i + 1) for i in (0, 1, 7, 33, 63)), slice(3, 8)]:
        for together, alone in zip(batch, results(part)):
            assert torch.equal(together[part], alone)
    bits = sampling.random_bits(streams.to(device), positions.to(device), vocab_size)
    assert torch.equal(bits.cpu(), sampling.random_bits(streams, positions, vocab_size))


# --------------------------------------------------------------------------------------------------------------- choices


def test_argmax_finite_prefers_the_lowest_id_and_marks_unusable_rows() -> None:
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 2.0],
            [-0.0, 0.0, -1.0, 0.0],
            [-INF, -INF, 5.0, -INF],
            [0.0, math.nan, 1.0, 1.0],
            [0.0, INF, 1.0, 1.0],
            [-INF, -INF, -INF, -INF],
        ]
    )
    top, token_ids, finite = sampling.argmax_finite(logits)
    assert finite.tolist() == [True, True, True, False, False, False]
    assert token_ids[:3].tolist() == [1, 0, 2] and top[:3, 0].tolist() == [3.0, 0.0, 5.0]
    assert ((token_ids >= 0) & (token_ids < 4)).all()


@pytest.mark.parametrize("vocab_size", [61, 4097])
def test_argmax_finite_finds_one_bad_logit_anywhere(vocab_size: int) -> None:
    for bad in (math.nan, INF):
        for place in (0, 1, vocab_size // 2, vocab_size - 1):
            logits = torch.zeros((3, vocab_size))
            logits[1, place] = bad
            assert sampling.argmax_finite(logits)[2].tolist() == [True, False, True]


tied_logits = st.lists(st.sampled_from([-INF, -3.0, -0.0, 0.0, 1e-45, 0.5, 2.0, 7.25, -1e38, 3e38]), min_size=1, max_size=40)


@given(row=tied_logits, data=st.data())
@settings(max_examples=150, deadline=None)
def test_best_tokens_are_those_of_a_stable_sort(row: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(0, len(row)))
    expected = sorted(range(len(row)), key=lambda t: (-row[t], t))[:k]
    assert sampling.best_tokens(torch.tensor([row], dtype=torch.float32), k).tolist() == [expected]


@given(
    row=st.lists(st.integers(-40, 0), min_size=1, max_size=40),
    k=st.integers(1, 50),
    p=st.floats(0.01, 1.0),
    spare=st.integers(0, 10),
)
@settings(max_examples=200, deadline=None)
def test_keep_best_is_the_smallest_prefix_of_the_ranking(row: list[int], k: int, p: float, spare: int) -> None:
    size = len(row)
    k = min(k, size)
    scaled = [x / 8 - max(row) / 8 for x in row]
    order = sorted(range(size), key=lambda t: (-scaled[t], t))[:k]
    total = sum(math.exp(scaled[t]) for t in order)
    kept, mass = set(), 0.0
    for t in order:
        if p < 1 and mass >= p * total - 1e-7 * total:
            if abs(mass - p * total) < 1e-6 * total:
                return  # decided by rounding
            break
        kept.add(t)
        mass += math.exp(scaled[t])
    tensor = torch.tensor([scaled], dtype=torch.float32)
    got = sampling.keep_best(tensor, torch.tensor([[k]]), torch.tensor([[p]], dtype=torch.float64), width=min(k + spare, size))
    assert {t for t in range(size) if got[0, t] > -INF} == kept
    assert torch.equal(got[0, sorted(kept)], tensor[0, sorted(kept)])
    if k == size and p < 1:
        assert torch.equal(sampling.keep_nucleus(tensor, torch.tensor([[p]], dtype=torch.float64)), got)


def test_keep_nucleus_reaches_past_the_first_candidates() -> None:
    """A flat distribution needs nearly all tokens, a peaked one beside it a single one."""
    scaled = torch.zeros((2, 1000))
    scaled[1, 1:] = -50
    got = sampling.keep_nucleus(scaled, torch.tensor([[0.9], [0.9]], dtype=torch.float64))
    assert got[0].isfinite().nonzero().flatten().tolist() == list(range(900))
    assert got[1].isfinite().nonzero().flatten().tolist() == [0]


def test_keep_best_never_drops_the_best_token() -> None:
    scaled = torch.tensor([[-30.0, 0.0, -1.0]])
    got = sampling.keep_best(scaled, torch.tensor([[3]]), torch.tensor([[1e-300]], dtype=torch.float64), width=3)
    assert got.isfinite().tolist() == [[False, True, False]]
    got = sampling.keep_nucleus(scaled, torch.tensor([[1e-300]], dtype=torch.float64))
    assert got.isfinite().tolist() == [[False, True, False]]


def test_keep_best_with_p_of_one_keeps_even_the_least_probable() -> None:
    scaled = torch.tensor([[0.0, -80.0, -90.0]])
    got = sampling.keep_best(scaled, torch.tensor([[2]]), torch.tensor([[1.0]], dtype=torch.float64), width=3)
    assert got.isfinite().tolist() == [[True, True, False]]


def test_nucleus_ends_where_its_share_is_reached_exactly() -> None:
    scaled = torch.zeros((1, 4))
    half = torch.tensor([[0.5]], dtype=torch.float64)
    for got in (sampling.keep_nucleus(scaled, half), sampling.keep_best(scaled, torch.tensor([[4]]), half, width=4)):
        assert got.tolist() == [[0.0, 0.0, -INF, -INF]]


def test_drop_below_keeps_tokens_on_the_border() -> None:
    scaled = torch.tensor([[-1.0, 0.0, 0.0, -0.5], [-1.0, 0.0, -90.0, -0.5]])
    got = sampling.drop_below(scaled, torch.tensor([[0.0], [-INF]]))
    assert got.tolist() == [[-INF, 0.0, 0.0, -INF], scaled[1].tolist()]


def test_scale_stays_in_range_for_extreme_temperatures_and_logits() -> None:
    logits = torch.tensor([[3e38, -3e38, 3e38, -INF]]).expand(3, 4)
    scaled = sampling.scale(logits, logits.amax(-1, keepdim=True), torch.tensor([[1.2e-38], [1.0], [3.4e38]]))
    assert scaled[0].tolist() == [0.0, -INF, 0.0, -INF] and scaled[1].tolist() == [0.0, -INF, 0.0, -INF]
    assert not scaled.isnan().any() and scaled[2, 3] == -INF


def test_penalize_follows_its_definition_token_by_token() -> None:
    logits = torch.randn((3, 50), generator=seeded()) * 4
    logits[0, 3] = -INF
    in_prompt = torch.rand((3, 50), generator=seeded(1)) < 0.3
    counts = torch.randint(4, (3, 50), generator=seeded(2), dtype=torch.int32)
    repetition, frequency, presence = [1.0, 1.5, 0.25], [0.5, -2.0, 0.0], [2.0, 0.25, 0.0]
    columns = [torch.tensor(x).unsqueeze(-1) for x in (repetition, frequency, presence)]
    got = sampling.penalize(logits, in_prompt, counts, repetition=columns[0], frequency=columns[1], presence=columns[2])
    for r in range(3):
        for t in range(50):
            x, count = float(logits[r, t]), int(counts[r, t])
            if in_prompt[r, t] or count:
                x = x / repetition[r] if x > 0 else x * repetition[r]
            x -= frequency[r] * count + presence[r] * (count > 0)
            assert float(got[r, t]) == pytest.approx(x, rel=1e-6, abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------- scores


def test_token_logprobs_match_double_precision() -> None:
    logits = torch.randn((5, 300), generator=seeded()) * 6
    token_ids = torch.tensor([0, 299, 17, 4, 5])
    values, ranks, top_ids, top_values = sampling.token_logprobs(logits, token_ids, 7)
    assert (values.dtype, ranks.dtype, top_ids.dtype, top_values.dtype) == (torch.float32, torch.int32, torch.int32, torch.float32)
    exact = logits.double().log_softmax(-1)
    assert torch.allclose(values.double(), exact[torch.arange(5), token_ids], atol=2e-5, rtol=0)
    best = exact.topk(7)
    assert torch.equal(top_ids.long(), best.indices) and torch.allclose(top_values.double(), best.values, atol=2e-5, rtol=0)
    for r, t in enumerate(token_ids.tolist()):
        assert int(ranks[r]) == 1 + sum(x > float(logits[r, t]) for x in logits[r].tolist())


def test_token_logprobs_give_tied_tokens_the_same_rank() -> None:
    logits = torch.tensor([[2.0, 5.0, 2.0, 5.0, 1.0]]).expand(5, 5)
    _, ranks, top_ids, _ = sampling.token_logprobs(logits, torch.arange(5), 3)
    assert ranks.tolist() == [3, 1, 3, 1, 5]
    assert top_ids.tolist() == [[1, 3, 0]] * 5


def test_token_logprobs_without_alternatives_and_of_no_tokens_are_empty() -> None:
    values, ranks, top_ids, top_values = sampling.token_logprobs(torch.zeros((2, 9)), torch.tensor([1, 2]), 0)
    assert values.shape == ranks.shape == (2,) and top_ids.shape == top_values.shape == (2, 0)
    values, ranks, top_ids, top_values = sampling.token_logprobs(torch.zeros((0, 9)), torch.zeros(0, dtype=torch.int64), 3)
    assert values.shape == ranks.shape == (0,) and top_ids.shape == top_values.shape == (0, 3)


def test_token_logprobs_of_forbidden_tokens_are_minus_infinity() -> None:
    values, ranks, top_ids, top_values = sampling.token_logprobs(torch.tensor([[0.0, -INF, -INF]]), torch.tensor([2]), 3)
    assert values.tolist() == [-INF] and ranks.tolist() == [2]
    assert top_ids.tolist() == [[0, 1, 2]] and top_values.tolist() == [[0.0, -INF, -INF]]
