"""Train the tiny checkpoint: a small DeepSeek-V4 with every layer kind, in the release format.

    python examples/train_tiny_tokenizer.py --out dsv4lite/assets/tiny --data build/tiny
    python examples/train_tiny.py --data build/tiny --out dsv4lite/assets/tiny          # minutes on one GPU
    python examples/train_tiny.py --smoke --out /tmp/tiny                               # seconds on a CPU, random text

The first part of the training runs unquantized and attends all compressed entries; then the roundings of the release
and the indexer's selection are switched on. The model is in ``tiny_v4.py``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from dsv4lite.bare import import_torch

import_torch()  # without a warning where numpy is missing

import torch
from tiny_v4 import SMOKE, Config, Linear, Model, load_checkpoint, save_checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

# ----------------------------------------------------------------------------------------------------- optimization


@torch.no_grad()
def orthogonalize(matrices: Tensor) -> Tensor:
    """Push all singular values of [n, rows, columns] towards 1 (quintic Newton-Schulz, five steps, on a GPU in bfloat16)."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    x = x.mT if matrices.shape[-2] > matrices.shape[-1] else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalized: for the matrices between the streams. Updates have the size of AdamW's."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        shapes = defaultdict(list)
        for parameter in parameters:
            shapes[parameter.shape].append(parameter)
        groups = [{"params": group} for group in shapes.values()]
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            params, lr = group["params"], group["lr"]
            grads = torch.stack([p.grad for p in params])
            buffer = self.state[params[0]].setdefault("momentum", torch.zeros_like(grads))
            buffer.lerp_(grads, 1 - group["momentum"])
            update = orthogonalize(grads.lerp(buffer, group["momentum"]).flatten(0, -3)).view_as(grads).float()
            rows, columns = grads.shape[-2:]
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, list(update.unbind()), alpha=-lr * 0.2 * max(rows, columns) ** 0.5)


SLOW = 0.2  # rate of the small matrices in front of a sigmoid or a softmax


def optimizers(model: Model, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embedding, head and vectors, slower for mixing and router."""
    inner = {id(m.weight) for m in model.modules() if isinstance(m, Linear)} - {id(model.embed.weight), id(model.head.weight)}
    muon = [p for p in model.parameters() if id(p) in inner]
    adam = [(name, p) for name, p in model.named_parameters() if id(p) not in inner]
    slow = [p for name, p in adam if "hc_" in name or "gate.weight" in name]
    groups = [{"params": [p for _, p in adam if not any(p is q for q in slow)]}, {"params": slow, "lr": SLOW * lr}]
    both = [Muon(muon, lr, weight_decay), torch.optim.AdamW(groups, lr, betas=(0.9, 0.95), weight_decay=0.0, fused=muon[0].is_cuda)]
    for group in (group for optimizer in both for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    return both


# ------------------------------------------------------------------------------------------------------------- data


class Corpus:
    """Rows of training tokens, cut at random lines and document starts; and the held-out documents."""

    # (kind, where rows start): share of the rows
    SHARES = {
        ("main", "lines"): 0.36, ("main", "documents"): 0.08, ("tests", "lines"): 0.40, ("tests", "documents"): 0.06,
        ("chat", "documents"): 0.10,
    }  # fmt: skip

    def __init__(self, folder: Path, device: torch.device) -> None:
        def read(name: str) -> Tensor:
            return torch.frombuffer(bytearray((folder / f"{name}.i64").read_bytes()), dtype=torch.int64)

        kinds = ("main", "chat", "tests")
        parts = [read(f"{kind}_tokens") for kind in kinds]
        self.tokens = torch.cat(parts).to(device)
        offsets = dict(zip(kinds, itertools.accumulate(map(len, parts), initial=0)))
        self.pools = [read(f"{kind}_{where}") + offsets[kind] for kind, where in self.SHARES]
        self.heldout = read("heldout_tokens").split(read("heldout_documents").diff().tolist())
        self.heldout_bytes = int(read("heldout_bytes").sum())

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        pools = torch.multinomial(torch.tensor(list(self.SHARES.values())), rows, replacement=True, generator=generator)
        starts = torch.stack([self.pools[p][torch.randint(len(self.pools[p]), (), generator=generator)] for p in pools.tolist()])
        starts = starts.clamp(max=len(self.tokens) - length).to(self.tokens.device)
        return self.tokens[starts[:, None] + torch.arange(length, device=self.tokens.device)]

    def heldout_rows(self, length: int, ahead: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (ids [length + ahead], True where the target of a position is text) over all held-out documents."""
        for document in self.heldout:
            for start in range(0, len(document) - 1, length):
                piece = document[start : start + length + ahead]
                real = torch.arange(length) < len(piece) - 1
                yield F.pad(piece, (0, length + ahead - len(piece))), real


def random_corpus(folder: Path, vocab_size: int) -> None:
    """Write a corpus of repeated random phrases, for a run without the real one."""
    rng = random.Random(0)
    lists: dict[str, Iterable[int]] = {"heldout_bytes": [3 * 700]}
    for kind in ("main", "chat", "tests", "heldout"):
        tokens = [rng.randrange(vocab_size) for _ in range(50)] * 14
        lists |= {f"{kind}_tokens": tokens, f"{kind}_documents": [0, 700], f"{kind}_lines": range(0, 700, 10)}
    for name, values in lists.items():
        (folder / f"{name}.i64").write_bytes(array("q", values).tobytes())


# --------------------------------------------------------------------------------------------------------- measures


@torch.no_grad()
def evaluate(model: Model, corpus: Corpus, length: int, *, quant: bool, drafts: int = 0, rows: int = 8) -> dict[str, float]:
    """Bits per byte on the held-out documents, and how often the k-th draft token is the one the model itself prefers.

    Drafts are judged at every position of the true text: the k-th is chained k times through the MTP block.
    """
    device, nll, count, agreed = corpus.tokens.device, 0.0, 0, [0] * drafts
    every = list(corpus.heldout_rows(length, drafts + 1))
    for first in range(0, len(every), rows):
        ids, real = (torch.stack(x).to(device) for x in zip(*every[first : first + rows]))
        streams, _, _ = model(ids[:, :length], quant, True)
        logits = model.logits(streams, model)
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1 : length + 1].flatten(), reduction="none").view_as(real)
        nll += (losses * real).sum().item()
        count += int(real.sum())
        preferred = logits.argmax(-1)
        for k in range(1, drafts + 1):
            streams, _ = model.draft(streams, ids[:, k : length + k], quant)
            drafted = model.logits(streams, model.mtp[0]).argmax(-1)[:, : length - k]
            agreed[k - 1] += int(((drafted == preferred[:, k:]) & real[:, k:]).sum())
    found = {"bits_per_byte": nll / math.log(2) / corpus.heldout_bytes, "loss": nll / count}
    return found | {f"draft_{k + 1}_agreement": agreed[k] / count for k in range(drafts)}


@torch.no_grad()
def continue_text(model: Model, prompts: list[list[int]], new_tokens: int, temperature: float, seed: int = 0) -> list[list[int]]:
    """Continue prompts by recomputing everything for each token; returns the new ids, up to the end-of-sentence token."""
    device, window = model.embed.weight.device, model.config.sliding_window
    length = -(-(max(map(len, prompts)) + new_tokens) // window) * window
    ids = torch.zeros(len(prompts), length, dtype=torch.long, device=device)
    ends = torch.tensor([len(p) for p in prompts], device=device)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows, generator = torch.arange(len(prompts), device=device), torch.Generator(device).manual_seed(seed)
    for step in range(new_tokens):
        streams, _, _ = model(ids, True, True)
        logits = model.logits(streams[rows, ends + step - 1][:, None], model)[:, 0]
        if temperature:
            ids[rows, ends + step] = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        else:
            ids[rows, ends + step] = logits.argmax(-1)
    new = [ids[row, end : end + new_tokens].tolist() for row, end in enumerate(ends.tolist())]
    return [n[: n.index(model.config.eos_token_id)] if model.config.eos_token_id in n else n for n in new]


# --------------------------------------------------------------------------------------------------------- training

MTP_WEIGHTS = (0.3, 0.15)  # of the first and of the chained second draft


def train(model: Model, corpus: Corpus, args: argparse.Namespace) -> None:
    """Warm up, hold, decay linearly; the roundings and the selection come on after ``--dense`` of the steps."""
    device = corpus.tokens.device
    generator = torch.Generator().manual_seed(args.seed)
    both = optimizers(model, args.lr, args.weight_decay)
    started = last = time.monotonic()
    ahead = len(MTP_WEIGHTS) + 1
    for step in range(args.steps):
        done = max(step / args.steps, (time.monotonic() - started) / args.max_seconds)
        if done >= 1:
            break
        factor = min((step + 1) / args.warmup, 1.0, max((1 - done) / args.decay, 0.01))
        for optimizer in both:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
        late = done >= args.dense
        ids = corpus.batch(args.rows, args.length + ahead, generator)
        parts = {}
        streams, parts["index"], loads = model(ids[:, : args.length], late, late)
        parts["text"] = model.loss(streams, model, ids[:, 1 : args.length + 1])
        total = parts["text"] + parts["index"]
        for k, weight in enumerate(MTP_WEIGHTS, 1):
            streams, load = model.draft(streams, ids[:, k : args.length + k], late)
            loads.setdefault("mtp.0", load)
            parts[f"draft {k}"] = model.loss(streams, model.mtp[0], ids[:, k + 1 : args.length + k + 1])
            total = total + weight * parts[f"draft {k}"]
        total.backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
        for name, load in loads.items():  # balance: experts with more than their share become less attractive
            gate = model.get_submodule(f"{name}.ffn").gate
            if not name.startswith("layers.") or int(name[7:]) >= model.config.num_hash_layers:
                gate.bias += args.balance * factor * (load.mean() - load).sign()
        if step % args.report == 0 or step == args.steps - 1:
            now = time.monotonic()
            text = "  ".join(f"{name} {value.item():.4f}" for name, value in parts.items())
            spread = max((load.max() / load.mean()).item() for load in loads.values())
            head = f"step {step:5}  {now - started:6.1f} s (+{now - last:.1f})  lr {factor:.2f}"
            print(f"{head}  {text}  load max {spread:.2f}", flush=True)
            last = now
        if args.measure and step and step % args.measure == 0:
            with torch.compiler.set_stance("force_eager"):
                found = evaluate(model, corpus, args.length, quant=late)
            print(f"step {step:5}  held out: {found['bits_per_byte']:.4f} bits per byte", flush=True)
    if device.type == "cuda":
        print(f"{step + 1} steps, {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of GPU memory", flush=True)


PROMPTS = (
    "def fibonacci(n):",
    "<｜begin▁of▁sentence｜>def fibonacci(n):\n    ",
    "import os\nimport sys\n\n\nclass ",
    "<｜begin▁of▁sentence｜><｜User｜>Write the function `read`. Read up to n bytes from the file.<｜Assistant｜></think>",
)


def report(model: Model, corpus: Corpus, args: argparse.Namespace) -> None:
    """Print the measures of the model card and write the checkpoint."""
    parent = evaluate(model, corpus, args.length, quant=False, drafts=2)
    rounded = evaluate(model, corpus, args.length, quant=True, drafts=2)
    print("bf16 parent:      ", {k: round(v, 4) for k, v in parent.items()})
    print("FP8/FP4 roundings:", {k: round(v, 4) for k, v in rounded.items()})
    print(f"loss by quantization: {100 * (rounded['bits_per_byte'] / parent['bits_per_byte'] - 1):.2f} % bits per byte", flush=True)
    print(f"checkpoint: {save_checkpoint(model, args.out):,} bytes of weights", flush=True)

    ids = corpus.batch(2, args.length, torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model.logits(model(ids, True, True)[0], model)
        load_checkpoint(model, args.out)
        after = model.logits(model(ids, True, True)[0], model)
    print(f"reloaded checkpoint: largest difference of a logit {(after - before).abs().max().item():.2e}", flush=True)

    if args.tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(args.tokenizer))
        prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]
        for temperature in (0.0, 0.7):
            for text, new in zip(PROMPTS, continue_text(model, prompts, args.sample, temperature)):
                print(f"--- temperature {temperature}: {text!r}\n{tokenizer.decode(new, skip_special_tokens=False)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json, to print samples")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--max-seconds", type=float, default=1e9, help="shortens the schedule so that training ends by then")
    parser.add_argument("--rows", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence, a multiple of the window")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of the matrices; times the learning rate, per step")
    parser.add_argument("--warmup", type=int, default=50, help="steps")
    parser.add_argument("--decay", type=float, default=0.7, help="last part of the schedule, in which the rate falls")
    parser.add_argument("--dense", type=float, default=0.3, help="first part, unquantized and without selection")
    parser.add_argument("--balance", type=float, default=1e-3, help="step of the routers' biases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=int, default=50, help="steps between printed lines")
    parser.add_argument("--measure", type=int, default=250, help="steps between held-out measures, 0 for none")
    parser.add_argument("--sample", type=int, default=160, help="tokens per printed sample")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a smaller model on random text, on the CPU")
    parser.add_argument("--init-only", action="store_true", help="write the untrained checkpoint")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(steps=6, rows=1, length=256, warmup=2, report=1, measure=0, data=args.out)
        args.out.mkdir(parents=True, exist_ok=True)
        random_corpus(args.data, SMOKE.vocab_size)
    torch.manual_seed(args.seed)
    device = torch.device("cpu" if args.smoke or not torch.cuda.is_available() else "cuda")
    torch.backends.cuda.matmul.allow_tf32 = True  # exact for products of bf16 operands
    model = Model(SMOKE if args.smoke else Config()).to(device)
    if args.init_only:
        print(f"checkpoint: {save_checkpoint(model, args.out):,} bytes of weights")
        return
    if device.type == "cuda":
        for block in (*model.layers, *model.mtp):
            block.compile(dynamic=False)
        torch._dynamo.config.recompile_limit = 64  # the layer kinds, in both phases
        model.loss = torch.compile(model.loss, dynamic=False)  # type: ignore[method-assign]
    corpus = Corpus(args.data, device)
    train(model, corpus, args)
    with torch.compiler.set_stance("force_eager"):
        report(model, corpus, args)


if __name__ == "__main__":
    main()
