"""Time sampling by rows: ``python -m examples.benchmarks.kernels.sampling`` on a CUDA device.

Checks tokens against those of the reference first, then replays a graph that walks through copies of the logits larger than the L2
cache. ``flat`` logits spread by 1, as those of random weights do; ``steep`` ones by 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from dsv4lite.kernels.sampling import argmax_finite
from dsv4lite.kernels.sampling.rows import Needs
from dsv4lite.request import Request, SamplingParams
from dsv4lite.sampling.sampler import Sampler
from dsv4lite.scheduling.step_plan import SequencePlan
from examples.benchmarks.kernels.timing import BANDWIDTH, ROTATED, microseconds

VOCABULARY = 129_280
ROWS = (1, 8, 64, 256)
CASES: Mapping[str, Mapping[str, object]] = {
    "best token": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top_p 0.5": {"temperature": 0.8, "top_p": 0.5},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_k 20, top_p 0.9": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "top_k 1000": {"temperature": 0.8, "top_k": 1000},
    "penalties": {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprob": {"temperature": 0.8, "logprobs": 0},
    "logprobs of 20": {"temperature": 0.8, "logprobs": 20},
    "processed, top_p": {"temperature": 0.8, "top_p": 0.95, "logprobs": 0, "logprobs_mode": "processed"},
}


class Case:
    """Rows that all ask for the same."""

    def __init__(self, rows: int, settings: Mapping[str, object]) -> None:
        device = torch.device("cuda")
        self.sampler, self.reference = (Sampler(VOCABULARY, each, 0, slots=rows, rows=rows) for each in (device, "cpu"))
        params = SamplingParams(**settings)  # type: ignore[arg-type]
        for i in range(rows):
            for sampler in (self.sampler, self.reference):
                sampler.add(i, Request(request_id=f"{i}", prompt_token_ids=(5, 6, 7), params=params, eos_token_id=1), 0)
        self.runs = [SequencePlan(i, i, 2, (0,), (), 0, (), True) for i in range(rows)]
        self.needs = self.sampler.prepare(self.runs).needs
        self.slots = torch.arange(rows, dtype=torch.int32, device=device)
        self.positions = torch.full((rows,), 2, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(rows + 1, dtype=torch.int64, device=device)

    def sample(self, logits: Tensor, best: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return self.sampler.run(logits, best, self.slots, self.positions, self.last_token, self.needs)


def eager(case: Case, logits: Tensor) -> float:
    """Return microseconds of the sampler on the same rows."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    case.sampler.sample(logits, case.runs, case.last_token)
    begin.record()
    for _ in range(3):
        case.sampler.sample(logits, case.runs, case.last_token)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 3 * 1e3


def line(settings: Mapping[str, object], logits: list[Tensor], best: list[tuple[Tensor, Tensor, Tensor]]) -> str:
    """Check rows that all ask for the same, and time them."""
    rows = len(logits[0])
    case, roofline = Case(rows, settings), 4 * rows * VOCABULARY / BANDWIDTH * 1e6
    if not case.needs:
        us = microseconds(lambda i: argmax_finite(logits[i]), len(logits))
        return f"{rows:>5}{us:>9.1f}{roofline:>10.1f}"
    tokens = case.sample(logits[0], best[0])[0]
    wanted = case.reference.sample(logits[0].cpu(), case.runs, case.last_token.cpu()).out[0]
    same = f"{int((tokens.cpu() == wanted).sum())}/{rows}"
    us = microseconds(lambda i: case.sample(logits[i], best[i]), len(logits))
    return f"{rows:>5}{us:>9.1f}{roofline:>10.1f}{same:>9}{eager(case, logits[0]):>10.0f}"


def main() -> None:
    """Print a table; the last column is the time without a graph, with the copy to the host started."""
    print(f"{'logits':<7}{'case':<22}{'rows':>5}{'us':>9}{'roofline':>10}{'same':>9}{'eager us':>10}")
    for spread, rows in itertools.product((1.0, 5.0), ROWS):
        copies = min(32, max(2, ROTATED // (4 * rows * VOCABULARY)))
        logits = [spread * torch.randn(rows, VOCABULARY, device="cuda") for _ in range(copies)]
        best = [argmax_finite(x) for x in logits]
        for name, settings in CASES.items():
            kind = "flat" if spread == 1 else "steep"
            print(f"{kind:<7}{name:<22}{line(settings, logits, best)}", flush=True)
    needs_of_all_kernels(64)


def needs_of_all_kernels(rows: int) -> None:
    """Time rows that each ask for something else, and rows that ask for nothing while all kernels are launched."""
    logits = [3 * torch.randn(rows, VOCABULARY, device="cuda") for _ in range(9)]
    best = [argmax_finite(x) for x in logits]
    idle = Case(rows, {"temperature": 0.0})
    for needs in (Needs.DRAWS, Needs.DRAWS | Needs.NUCLEI, Needs.SCORES, ~Needs(0)):
        idle.needs = needs
        us = microseconds(lambda i: idle.sample(logits[i], best[i]), len(logits))
        print(f"no row wants {needs}: {us:.1f} us for {rows} rows", flush=True)


if __name__ == "__main__":
    main()
