"""What ``deterministic=True`` promises on a CPU: ``test_cpu_paths.py`` runs this in processes that use other instruction sets.

    python -m tests.e2e.cpu_paths THREADS...

Everything runs once with each number of threads, and the results must have the same bits.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from dsv4lite.device import own_thread
from dsv4lite.kernels.attention import sparse_attention
from dsv4lite.kernels.gemm import ROW_TILE, matmul_rows
from dsv4lite.kernels.hc import HcMix, hc_expand, hc_project, hc_split, weighted_sum
from dsv4lite.kernels.indexer import index_scores
from dsv4lite.kernels.norm import rms_norm
from dsv4lite.kernels.rope import rope_angles
from dsv4lite.kernels.routing import softplus
from dsv4lite.kernels.sampling import token_logprobs
from dsv4lite.kernels.swiglu import silu
from dsv4lite.request import SamplingParams
from tests.e2e.engines import SMALL, opened, write_model
from tests.golden import TINY, tiny_ids, tiny_model
from tests.models.paged import run_in_cuts

TOKENS = 21
PARTS = ((0, 1), (3, 4), (0, 2), (2, 7), (4, 21), (20, 21))


def ops() -> Iterator[tuple[str, Tensor]]:
    """Yield what ops make of some tokens together, which has to be what they make of a part of them."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def on_parts(name: str, op, *tokens: Tensor) -> Iterator[tuple[str, Tensor]]:  # type: ignore[no-untyped-def]
        whole = op(*tokens)
        yield name, whole
        for begin, end in PARTS:
            # As a part of the batch, whose rows may begin anywhere, and alone.
            for part in ([x[begin:end] for x in tokens], [x[begin:end].clone() for x in tokens]):
                assert torch.equal(op(*part), whole[begin:end]), (name, begin, end)

    # Widths at which libraries have one thread or several, and whole vectors or rests.
    for inputs, outputs in ((17, 8), (20, 33), (48, 96), (96, 64), (128, 48), (512, 33), (1024, 32), (4096, 16)):
        weight = random(outputs, inputs)
        yield from on_parts(f"product {inputs}", lambda x, w=weight: matmul_rows(x, w, ROW_TILE), random(TOKENS, inputs))
    for heads, channels, rows in ((1, 8, 8), (3, 9, 70), (2, 16, 12), (4, 32, 136), (16, 128, 64), (64, 24, 64)):
        valid = torch.rand(TOKENS, rows, generator=generator) < 0.6
        valid[:, 0] = True
        given = (random(TOKENS, heads, channels), random(TOKENS, rows, channels), valid)
        sink = random(heads)
        yield from on_parts(f"attention {heads}", lambda q, k, v, s=sink: sparse_attention(q, k, v, s, 0.2), *given)
        short = sparse_attention(given[0], given[1], given[2], sink, 0.2)
        more = torch.cat([given[1], random(TOKENS, 80, channels)], 1), torch.cat([valid, torch.zeros(TOKENS, 80).bool()], 1)
        assert torch.equal(sparse_attention(given[0], *more, sink, 0.2), short), ("rows that others need", heads)
    for heads, entries in ((12, 30), (64, 130)):
        keys = random(entries, 16)
        scores = (random(TOKENS, heads, 16), random(TOKENS, heads))
        yield from on_parts("scores", lambda q, w, k=keys: index_scores(q, w, k, row_tile=ROW_TILE), *scores)
        assert torch.equal(
            index_scores(*scores, keys[: entries - 9], row_tile=ROW_TILE),
            index_scores(*scores, keys, row_tile=ROW_TILE)[:, : entries - 9],
        ), "keys that others need"
    for streams, width in ((2, 20), (4, 100), (4, 8200)):
        fn, state, read = random(streams * (streams + 2), streams * width), random(TOKENS, streams, width), random(TOKENS, streams)
        yield from on_parts("streams projected", lambda x, w=fn: hc_project(x, w, 1e-6, ROW_TILE), state)
        yield from on_parts("streams read", weighted_sum, state, read)
        mix = random(TOKENS, streams, streams)
        yield from on_parts(
            "streams written", lambda y, x, p, c: hc_expand(y, x, HcMix(p, c)), random(TOKENS, width), state, read, mix
        )
    base, scales = random(24), random(3)
    for place in range(3):
        yield from on_parts("mix", lambda x, i=place: hc_split(x, base, scales, 20, 1e-6)[i], random(TOKENS, 24))
    for name, op in (("silu", silu), ("softplus", softplus), ("norm", lambda x: rms_norm(x, None, 1e-6))):
        for width in (3, 20, 100, 4097):
            yield from on_parts(name, op, 3 * random(TOKENS, width))
    frequencies = torch.rand(5, generator=generator)
    positions = torch.randint(0, 1 << 20, (TOKENS,), generator=generator)
    yield from on_parts("angles", lambda at: torch.cat(rope_angles(at, frequencies), 1), positions)
    yield from on_parts("log-probabilities", lambda z: token_logprobs(z, torch.zeros(len(z)).long(), 3)[3], random(TOKENS, 4099))


def model() -> Tensor:
    """Return the logits of a prompt, which have to be those of its beginnings and those of it in pieces."""
    tiny = tiny_model(deterministic=True).requires_grad_(False)
    ids = tiny_ids(140, TINY)
    whole = tiny.logits(tiny.one_pass(ids))
    for count in (1, 5, 63, 64, 65):
        assert torch.equal(tiny.logits(tiny.one_pass(ids[:count])), whole[:count]), count
    assert torch.equal(tiny.logits(run_in_cuts(tiny, ids, [*range(1, 11), 62, 63, 66, 128])), whole)
    return whole


def requests() -> Tensor:
    """Return log-probabilities of requests that run alone, which have to be those of the same in company."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, seed=1, logprobs=2, prompt_logprobs=1)
    prompts = [[(7 * i * i + 3 * n) % SMALL["vocab_size"] for i in range(n)] for n in (3, 90, 17, 5)]
    # As wide as products must be for the matrix library to divide them among threads.
    sizes = {**SMALL, "hidden_size": 128, "o_lora_rank": 96, "moe_intermediate_size": 64}
    with TemporaryDirectory() as folder, opened(write_model(Path(folder), sizes, seed=2), deterministic=True) as llm:
        alone = [llm.generate(prompt, params) for prompt in prompts]
        llm.reset_prefix_cache()
        together = llm.generate_batch(prompts, params)
    found = []
    for outputs in (alone, together):
        logprobs = [part for output in outputs for part in (output.outputs[0].logprobs, output.prompt_logprobs)]
        found.append(torch.cat([part.sampled for part in logprobs if part is not None]))
    assert torch.equal(*found), "company"
    return found[0]


def digest(threads: int) -> str:
    """Return the digest of every row and request."""
    torch.set_num_threads(threads)
    found = hashlib.sha256()
    with own_thread(torch.device("cpu"), deterministic=True), torch.inference_mode():
        for _, result in ops():
            found.update(result.contiguous().numpy().tobytes())
        found.update(model().numpy().tobytes())
    found.update(requests().numpy().tobytes())
    assert torch.get_num_threads() == threads, "outside an engine"
    return found.hexdigest()


if __name__ == "__main__":
    assert len({digest(int(threads)) for threads in sys.argv[1:]}) == 1, "other bits on another number of threads"
