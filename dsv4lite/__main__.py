"""The command line: ``python -m dsv4lite generate "def fibonacci(n):"``."""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from io import TextIOWrapper
from typing import Any, TypeAlias, cast

from dsv4lite.bare import import_torch
from dsv4lite.config import EngineSettings, tiny_model
from dsv4lite.errors import ConfigError, DSV4LiteError, InvalidRequestError, shown

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
_AXES = {
    "tensor": "ranks that share attention's matrices and the vocabulary",
    "expert": "ranks that share the routed experts",
    "data": "replicas of attention",
    "pipeline": "stages of layers",
}
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def _bytes(text: str) -> int:
    """Read ``141e9``, ``80GiB`` or ``512M`` as bytes."""
    digits = text.lower().removesuffix("ib").removesuffix("b")
    factor = _UNITS.get(digits[-1:], 1)
    try:
        size = float(digits if factor == 1 else digits[:-1]) * factor
        if not 1 <= size < 1 << 63:  # or not a number
            raise ValueError(size)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a size from 1 byte to 8 EiB; write for example 80GiB") from error
    return int(size)


class _Version(argparse.Action):
    """Looks the version up only on request: a folder that was copied and not installed has no version, and runs all the same."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: object) -> None:
        print(f"dsv4lite {version('dsv4lite')}", flush=True)
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dsv4lite", description="Embeddable inference for DeepSeek models.")
    parser.add_argument("-v", "--verbose", action="store_true", help="log what the engine does")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generation(commands)
    _add_inspection(commands)
    return parser


def _add_generation(commands: Commands) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a prompt, streaming",
        description="Continue a prompt and stream the text; the speed comes at the end.",
    )
    generate.add_argument("prompt", help="text to continue, or the user's turn with --chat; '-' reads standard input")
    _add_shared(generate, "--model", "--revision", "--device")
    generate.add_argument("--chat", action="store_true", help="send the prompt as a user's turn")
    generate.add_argument("--reasoning", choices=("none", "high", "max"), default="none", help="with --chat: how hard to think")
    generate.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate (default: 128)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    generate.add_argument("--top-p", type=float, default=1.0, help="nucleus (default: 1)")
    generate.add_argument("--seed", type=int, help="make sampling repeatable")
    generate.add_argument("--stop", action="append", default=[], help="end at this string; may be given several times")
    generate.add_argument("--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    generate.set_defaults(run=_generate)

    batch = commands.add_parser(
        "batch",
        help="run the requests of a file",
        description="Run the requests in the lines of a file, prompts or OpenAI's batch format, and write a line for each as it "
        "ends. The same command resumes a run that was interrupted. The exit status is 1 if rows have failed or were aborted.",
    )
    batch.add_argument("source", help="file of requests, JSON lines")
    batch.add_argument("target", help="file of outputs; is made, or continued")
    _add_shared(batch, "--model", "--revision", "--device", "--json")
    batch.add_argument("--max-tokens", type=int, help="most tokens of a row that sets no limit")
    batch.add_argument("--temperature", type=float, help="of rows that set none")
    batch.add_argument("--max-num-seqs", type=int, default=64, help="sequences at once (default: 64)")
    batch.add_argument("--max-model-len", type=int, help="longest sequence in tokens")
    batch.set_defaults(run=_batch)


def _add_inspection(commands: Commands) -> None:
    plan = commands.add_parser(
        "plan",
        help="show what a model needs in memory, before loading it",
        description="Work out weights, state and capacity from config and headers alone.",
    )
    _add_shared(plan, "model", "--revision", "--device", "--json")
    plan.add_argument("--gpu", help="GPU to plan for, for example h200; it need not be in this machine (default: this machine's)")
    plan.add_argument("--memory", type=_bytes, help="memory of the GPU (or of --device cpu) to plan for, for example 141GiB")
    plan.add_argument("--devices", type=int, help="compare all ways to share the model among so many devices")
    _add_sizes(plan)
    plan.set_defaults(run=_plan)

    compile_ = commands.add_parser(
        "compile",
        help="compile an engine's kernels for a GPU that need not be here",
        description="Compile all kernels that an engine with these settings launches, without a GPU, into a folder. An engine with "
        "this compile_cache_dir, here or copied to another machine with the same versions of this package, PyTorch and "
        "Triton, starts without compiling. Give the settings of that engine. The exit status is 1 if a kernel cannot be compiled.",
    )
    _add_shared(compile_, "model", "--revision", "--json")
    compile_.add_argument("--gpu", required=True, help="GPU to compile for, for example h200")
    compile_.add_argument("--output", dest="compile_cache_dir", metavar="FOLDER", help="for the kernels (default: that of engines)")
    _add_sizes(compile_)
    compile_.add_argument("--deterministic", action="store_true", help="of an engine with deterministic=True")
    compile_.add_argument("--mtp", type=int, metavar="K", help="of an engine with speculative=MTP(K)")
    compile_.set_defaults(run=_compile)

    inspect = commands.add_parser(
        "inspect",
        help="show what a checkpoint holds, and what it lacks",
        description="Read architecture, formats, tensors, tokenizer and chat format from config and headers alone. The exit status "
        "is 1 if something is missing or does not fit.",
    )
    _add_shared(inspect, "model", "--revision", "--json")
    inspect.set_defaults(run=_inspect)

    replay = commands.add_parser(
        "replay",
        help="find the first bad op of a saved step",
        description="Run a saved step again, every op beside its reference on the same inputs, and name the first that is wrong.",
    )
    replay.add_argument("dump", help="file that dump_dir or dump_step made")
    replay.add_argument("--model", help="folder or hub id of the checkpoint (default: the one that the step ran on)")
    replay.add_argument("--device", help="cpu, cuda or cuda:N (default: where the step ran, if it is here)")
    replay.add_argument("--all", action="store_true", help="also print every output of every op")
    replay.set_defaults(run=_replay)

    parity = commands.add_parser(
        "parity",
        help="compare a trainer's forward pass with a rollout's steps",
        description="Run random tokens as a trainer does and as an engine does, and report the difference by kind of layer.",
    )
    _add_shared(parity, "model", "--dtype", "--device", "--json")
    parity.add_argument("--tokens", type=int, default=300, help="length of the sequence (default: 300)")
    parity.set_defaults(run=_parity)


def _add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add arguments that several commands have."""
    checkpoint = {"default": tiny_model(), "help": "folder or hub id of a checkpoint (default: the one that ships)"}
    shared: dict[str, dict[str, Any]] = {
        "model": {"nargs": "?", **checkpoint},
        "--model": checkpoint,
        "--revision": {"help": "hub revision"},
        "--dtype": {"choices": ("auto", "float32", "bfloat16"), "default": "auto", "help": "of activations"},
        "--device": {"default": "auto", "help": "cpu, cuda or cuda:N (default: auto)"},
        "--json": {"action": "store_true", "help": "print JSON"},
    }
    for name in names:
        parser.add_argument(name, **shared[name])


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the settings that sizes and shapes of an engine follow from."""
    parser.add_argument("--kv-cache-memory", dest="kv_cache_memory_bytes", metavar="SIZE", type=_bytes, help="for sequence state")
    parser.add_argument("--max-model-len", type=int, help="longest sequence in tokens")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="sequences at once (default: 64)")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="tokens of one step (default: 2048)")
    _add_shared(parser, "--dtype")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8", "bfloat16", "float32"), default="auto", help="of rows of the KV cache"
    )
    for axis, what in _AXES.items():
        parser.add_argument(f"--{axis}-parallel-size", type=int, default=1, help=f"{what} (default: 1)")


def _settings(args: argparse.Namespace) -> EngineSettings:
    """Return the arguments that have the name of an engine's setting."""
    found = {name: value for name, value in vars(args).items() if name in EngineSettings.__annotations__}
    return cast(EngineSettings, found)


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise OSError("standard input is closed")
    cast(TextIOWrapper, sys.stdin).reconfigure(errors="strict")  # in the C locale, other bytes would become lone surrogates
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        wrong, coding = error.object[error.start : error.end], error.encoding.upper()
        raise InvalidRequestError(
            f"standard input must be {coding}, and has {wrong!r} at byte {error.start}: {error.reason}; "
            f"convert it, for example with iconv -t {coding}, or name its encoding in PYTHONIOENCODING",
            parameter="prompt",
            value=wrong,
        ) from error


def _generate(args: argparse.Namespace) -> int:
    from dsv4lite import LLM, SamplingParams

    if args.reasoning != "none" and not args.chat:
        raise ConfigError(f"--reasoning {args.reasoning} is for the user's turn of a chat; give --chat, too")
    prompt = _read_standard_input() if args.prompt == "-" else args.prompt
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed, stop=tuple(args.stop)
    )
    started = time.perf_counter()
    with LLM(args.model, revision=args.revision, device=args.device, load_format=args.load_format, progress=args.verbose) as llm:
        loaded = time.perf_counter()
        if args.chat:
            stream = llm.chat_stream([{"role": "user", "content": prompt}], params, reasoning=args.reasoning)
        else:
            stream = llm.stream(prompt, params)
        with stream:
            if not args.chat:
                print(prompt, end="", flush=True)
            for delta in stream:
                print(delta.reasoning + delta.text, end="", flush=True)
            final = stream.final()
    print(flush=True)
    timing, usage = final.timing, final.usage
    decoding = timing.total - timing.first_token
    speed = (usage.completion_tokens - 1) / decoding if decoding > 0 and usage.completion_tokens > 1 else 0.0
    print(
        f"\n{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated ({final.outputs[0].finish_reason});"
        f" loaded in {loaded - started:.1f} s, first token after {timing.first_token * 1000:.0f} ms, then {speed:.1f} tokens/s",
        file=sys.stderr,
    )
    return 0


def _batch(args: argparse.Namespace) -> int:
    from dsv4lite import LLM, FileReport
    from dsv4lite.api.jsonl import RowFiles

    shown_s = 0.0

    def progress(report: FileReport) -> None:
        nonlocal shown_s
        if report.seconds >= shown_s + 1:
            shown_s = report.seconds
            print(report, end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    with RowFiles(args.source, args.target, None) as files:
        files.read()  # errors of the files are raised before the model is loaded
    given = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    changes = {name: value for name, value in given.items() if value is not None}
    settings = _settings(args)
    settings["progress"] = args.verbose
    with LLM(args.model, **settings) as llm:
        params = llm.default_params.replace(**changes) if changes else None
        report = llm.generate_file(args.source, args.target, params, progress=progress)
    print(json.dumps(asdict(report)) if args.json else report)
    return 0 if report.failed == 0 and report.earlier + report.done == report.rows else 1


def _plan(args: argparse.Namespace) -> int:
    from dsv4lite import plan_memory

    plan = plan_memory(args.model, gpu=args.gpu, memory_bytes=args.memory, devices=args.devices, **_settings(args))
    print(json.dumps(asdict(plan), indent=2) if args.json else plan)
    return 0 if plan.fits else 1


def _compile(args: argparse.Namespace) -> int:
    from dsv4lite import MTP, EngineConfig
    from dsv4lite.engine.ahead import compile_ahead

    def progress(done: int, total: int) -> None:
        print(f"{done} of {total} kernels", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    settings = _settings(args)
    settings["speculative"] = None if args.mtp is None else MTP(args.mtp)
    compiled = compile_ahead(EngineConfig(model=args.model, **settings), args.gpu, progress)
    print(json.dumps(asdict(compiled)) if args.json else compiled)
    return 0 if compiled.missing == 0 else 1


def _inspect(args: argparse.Namespace) -> int:
    from dsv4lite.debug.inspection import inspect_checkpoint

    report = inspect_checkpoint(args.model, revision=args.revision)
    print(json.dumps(asdict(report), indent=2) if args.json else report)
    return 1 if report.problems else 0


def _replay(args: argparse.Namespace) -> int:
    from dsv4lite.debug.replay import replay

    report = replay(args.dump, model=args.model, device=args.device)
    if args.all:
        print(report.table(), end="\n\n")
    print(report)
    return 0 if report.first is None else 1


def _parity(args: argparse.Namespace) -> int:
    from dsv4lite.debug.parity import compare_sides

    report = compare_sides(args.model, tokens=args.tokens, **_settings(args))
    print(json.dumps(asdict(report, dict_factory=_finite), indent=2) if args.json else report)
    return 0 if report.exact else 1


def _finite(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return fields as a mapping, with ``None`` for NaN and infinities, which JSON lacks."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in fields}


def _import_torch() -> None:
    """Import torch with Ctrl-C deferred: numpy and torch turn an interrupt of their imports into errors of their own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        import_torch()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return its exit status.

    Returns:
        0 for success; 1 for a plan that does not fit, a kernel that cannot be compiled, a checkpoint that is not complete, a bad
        op, unequal bits or rows that failed; 2 for an error; 128 plus the signal's number after Ctrl-C, or if the reader of the
        output has closed it.
    """
    if sys.stderr is None:  # it is closed: ``print`` would write to standard output, and a file could get its number
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as the process
    try:
        args = _parser().parse_args(argv)
        if args.verbose:
            logging.basicConfig(level=logging.INFO, format="%(relativeCreated)8.0f ms  %(name)s: %(message)s", stream=sys.stderr)
        _import_torch()
        status: int = args.run(args)
    except BrokenPipeError:  # the reader of standard output has left; Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (DSV4LiteError, OSError, UnicodeError) as error:  # UnicodeError: the encoding of standard output lacks a character
        with suppress(OSError):  # a traceback of this one would make the status 1, which says something else
            print(f"dsv4lite: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


if __name__ == "__main__":
    sys.exit(main())
