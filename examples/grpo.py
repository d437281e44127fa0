"""GRPO on the checkpoint that ships with the package, with a reward that a program verifies. Runs on a CPU in minutes.

    python examples/grpo.py                               # trainer and rollouts take turns
    python examples/grpo.py --asynchronous                # rollouts continue while the trainer computes; updates in flight
    python examples/grpo.py --steps 3 --plots build/grpo  # plots need matplotlib: pip install 'dsv4lite[plots]'

The task: continue ``count = `` with a prime number and the end of the line. The checkpoint was trained on Python code, and does so
now and then. The trainer is the library's own model with gradients, in float32 (the checkpoint's numbers without its roundings), so
that the log-probabilities of trainer and rollouts have the same bits: the divergence between the two is 0, not small.

In turns, the engine sleeps at level 2 while the trainer computes: it holds neither weights nor KV cache. Asynchronously, new
weights are written between two tokens of open requests (``mode="keep"``), so that completions have tokens of several versions; the
loss then weighs each token by the ratio of its probabilities, clipped.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import isqrt
from pathlib import Path
from statistics import mean, pstdev

from dsv4lite import AsyncLLM, EngineConfig, ModuleSource, RequestOutput, SamplingParams, tiny_model

# The library comes first: it imports torch without a warning where numpy is missing.
# isort: split
import torch
from safetensors import safe_open
from torch import Tensor

from dsv4lite.kernels.quantize import dequantize_matrix
from dsv4lite.weights.checkpoint import write_tensors
from dsv4lite.weights.quant import Numerics
from dsv4lite.weights.source import ModelSource

NAMES = ("count", "size", "limit", "x", "depth", "self.width", "offset", "n")
CLIP = 0.2
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a run.

    Attributes:
        steps: Updates of the policy.
        group: Completions of each prompt, which are compared with each other.
        max_tokens: Most tokens of a completion.
        learning_rate: AdamW's.
        seed: Seed of all random draws.
    """

    steps: int = 8
    group: int = 8
    max_tokens: int = 6
    learning_rate: float = 2e-4
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Measures of one step.

    Attributes:
        reward: Mean of the step's completions.
        kl: Mean of log(rollout's probability / trainer's) with the same weights: an estimate of KL(rollout, trainer).
        most: Largest distance of the two log-probabilities.
        stale: Share of tokens that older weights generated; these do not count in ``kl`` and ``most``.
        version: Version of the newest weights in the rollouts.
        tokens_per_s: Rate of the rollouts; if asynchronous, since the step before.
        awake, asleep: Memory of the process with the engine awake and asleep, MiB.
    """

    reward: float
    kl: float
    most: float
    stale: float
    version: int
    tokens_per_s: float
    awake: float
    asleep: float

    @property
    def results(self) -> tuple[float, ...]:
        """The measures that are equal in two runs with the same seed."""
        return self.reward, self.kl, self.most, self.stale, self.version


def plain_checkpoint(folder: Path) -> Path:
    """Write the shipped checkpoint, dequantized to float32."""
    source = Path(tiny_model())
    with safe_open(source / "model.safetensors", "pt") as file:
        stored, plain = {name: file.get_tensor(name) for name in file.keys()}, {}  # noqa: SIM118  it is no mapping
    for name, tensor in stored.items():
        if not name.endswith(".scale"):
            wide = dequantize_matrix(tensor, stored.get(name.removesuffix(".weight") + ".scale"))
            plain[name] = wide if tensor.is_floating_point() or tensor.dtype == torch.int8 else tensor
    write_tensors(folder / "model.safetensors", plain, {})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"], config["expert_dtype"]
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    for name in COPIED:
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def reward(text: str) -> float:
    """Return 1 if the first line is a prime number and ends with a newline."""
    line, end, _ = text.partition("\n")
    number = int(line) if end and line.strip().isdecimal() and line.isascii() else 0
    return float(number > 1 and all(number % divisor for divisor in range(2, isqrt(number) + 1)))


def memory() -> float:
    """Return the resident memory of this process, MiB, after the C library has released its free memory."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


class Policy:
    """The model that is trained; mutable. Its forward pass runs on one thread, as the engine's does."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        numerics = Numerics.choose(dtype=torch.float32, quantized=False, deterministic=True, device=torch.device("cpu"))
        self.model = ModelSource.open(EngineConfig(model=str(folder))).build(numerics, with_mtp=False).requires_grad_(True)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.version = 0

    def logprobs(self, rollouts: Sequence[RequestOutput]) -> list[Tensor]:
        """Return the log-probabilities of all completions' tokens, in one differentiable pass."""
        pairs = [(r.prompt_token_ids, c.token_ids) for r in rollouts for c in r.outputs]
        streams = self.model.one_pass(*([*prompt, *made[:-1]] for prompt, made in pairs))
        parts = streams.split([len(prompt) + len(made) - 1 for prompt, made in pairs])
        rows = torch.cat([part[len(prompt) - 1 :] for part, (prompt, _) in zip(parts, pairs, strict=True)])
        values = self.model.logits(rows).log_softmax(-1)
        chosen = values.gather(1, torch.tensor([token for _, made in pairs for token in made])[:, None])[:, 0]
        return list(chosen.split([len(made) for _, made in pairs]))

    def step(self, rollouts: Sequence[RequestOutput], rewards: Sequence[Sequence[float]]) -> tuple[float, float, float]:
        """Update the weights; return ``kl``, ``most`` and ``stale`` of ``Step``, measured before the update."""
        completions = [completion for rollout in rollouts for completion in rollout.outputs]
        ours = self.logprobs(rollouts)
        theirs = [completion.logprobs.sampled for completion in completions]
        advantages = [(r - mean(group)) / (pstdev(group) + 1e-4) for group in rewards for r in group]
        losses = []
        for our, their, advantage in zip(ours, theirs, advantages, strict=True):
            ratio = (our - their).exp()
            losses.append(-torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage))
        same = torch.cat([self._is_new(completion) for completion in completions])
        gaps = (torch.cat(theirs) - torch.cat(ours).detach())[same]
        self.optimizer.zero_grad(set_to_none=True)
        torch.cat(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.version += 1
        if not len(gaps):
            return 0.0, 0.0, 1.0
        return gaps.mean().item(), gaps.abs().max().item(), 1 - same.float().mean().item()

    def _is_new(self, completion: object) -> Tensor:
        """Return for each token whether the present weights generated the whole completion."""
        versions = completion.weight_versions  # type: ignore[attr-defined]
        made = sum(end - start for _, start, end in versions)
        return torch.full((made,), {version for version, _, _ in versions} == {self.version})


def requests(step: int, settings: Settings) -> tuple[list[str], list[SamplingParams]]:
    """Return the prompts of a step and the sampling parameters of each."""
    params = SamplingParams.for_rollout(n=settings.group, max_tokens=settings.max_tokens, detokenize=True)
    seeds = [(settings.seed << 32) + step * len(NAMES) + i for i in range(len(NAMES))]
    return [f"{name} = " for name in NAMES], [params.replace(seed=seed) for seed in seeds]


def graded(rollouts: Sequence[RequestOutput]) -> list[list[float]]:
    """Return the rewards of each prompt's completions."""
    return [[reward(completion.text) for completion in rollout.outputs] for rollout in rollouts]


async def publish(llm: AsyncLLM, policy: Policy) -> None:
    """Give the policy's weights to the engine."""
    async with llm.update_weights(version=policy.version, mode="keep") as update:
        await update.load(ModuleSource(policy.model))


async def in_turns(folder: Path, settings: Settings) -> list[Step]:
    """Generate and train in turns. The engine sleeps while the trainer computes."""
    policy, steps = Policy(folder, settings), []
    async with AsyncLLM(str(folder), deterministic=True, max_model_len=128, kv_cache_memory_bytes=256 << 20) as llm:
        await llm.sleep(level=2)
        for number in range(settings.steps):
            await llm.wake_up(tags=["weights"])
            await publish(llm, policy)
            await llm.wake_up(tags=["kv_cache"])
            started = time.perf_counter()
            rollouts = await llm.generate_batch(*requests(number, settings))
            seconds, awake = time.perf_counter() - started, memory()
            await llm.sleep(level=2)
            steps.append(finished(policy, rollouts, seconds, awake, memory()))
            print(number, steps[-1])
    return steps


async def all_at_once(folder: Path, settings: Settings) -> list[Step]:
    """Keep the requests of two steps open, and train on those that have ended; updates are written between two tokens."""
    policy, steps = Policy(folder, settings), []
    async with AsyncLLM(str(folder), deterministic=True, max_model_len=128, kv_cache_memory_bytes=256 << 20) as llm:
        rows = [row for number in range(settings.steps) for row in zip(*requests(number, settings), strict=True)]
        prompts, params = zip(*rows, strict=True)
        async with llm.as_completed(prompts, params, max_in_flight=2 * len(NAMES)) as outputs:
            started = time.perf_counter()
            async for rollouts in batches(outputs, len(NAMES)):
                seconds, held = time.perf_counter() - started, memory()
                started += seconds
                steps.append(await asyncio.to_thread(finished, policy, rollouts, seconds, held, held))
                print(len(steps) - 1, steps[-1])
                await publish(llm, policy)
    return steps


async def batches(outputs: AsyncIterator[RequestOutput], size: int) -> AsyncIterator[list[RequestOutput]]:
    """Collect outputs as they finish."""
    batch: list[RequestOutput] = []
    async for output in outputs:
        batch.append(output)
        if len(batch) == size:
            yield batch
            batch = []


def finished(policy: Policy, rollouts: Sequence[RequestOutput], seconds: float, awake: float, asleep: float) -> Step:
    """Train on rollouts, and return the step's measures."""
    rewards, version = graded(rollouts), max(v for r in rollouts for c in r.outputs for v, _, _ in c.weight_versions)
    tokens = sum(len(completion.token_ids) for rollout in rollouts for completion in rollout.outputs)
    kl, most, stale = policy.step(rollouts, rewards)
    average = mean(r for group in rewards for r in group)
    measures = {"tokens_per_s": tokens / max(seconds, 1e-6), "awake": awake, "asleep": asleep}
    return Step(reward=average, kl=kl, most=most, stale=stale, version=version, **measures)


def plot(steps: Sequence[Step], folder: Path) -> None:
    """Write the measures as a plot and as JSON."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), layout="constrained")
    curves = {
        "reward": ("reward",),
        "KL between rollout and trainer, same weights": ("kl", "most"),
        "tokens per second of rollouts": ("tokens_per_s",),
        "memory of the process, MiB": ("awake", "asleep"),
    }
    for axis, (title, names) in zip(axes.flat, curves.items(), strict=True):
        for name in names:
            axis.plot([getattr(step, name) for step in steps], marker="o", label=name)
        axis.set(title=title, xlabel="step")
        axis.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "grpo.png", dpi=120)
    (folder / "grpo.json").write_text(json.dumps([asdict(step) for step in steps], indent=1))


def run(settings: Settings, *, asynchronous: bool = False) -> list[Step]:
    """Train, and return the measures of all steps."""
    torch.set_num_threads(1)  # the trainer's: with several, a product's bits depend on the place of its rows
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = plain_checkpoint(Path(folder))
        return asyncio.run((all_at_once if asynchronous else in_turns)(checkpoint, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asynchronous", action="store_true", help="generate while the trainer computes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plots", type=Path, help="folder for grpo.png and grpo.json")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, not {args.steps}")
    if args.plots is not None and find_spec("matplotlib") is None:
        parser.error("--plots needs matplotlib: pip install 'dsv4lite[plots]'")
    settings = Settings(steps=args.steps, learning_rate=args.learning_rate, seed=args.seed)
    steps = run(settings, asynchronous=args.asynchronous)
    if args.plots is not None:
        plot(steps, args.plots)
    print(f"mean reward {steps[0].reward:.3f} at first, {steps[-1].reward:.3f} in the end")


if __name__ == "__main__":
    main()
