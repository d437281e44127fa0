"""The settings of an engine: validated once, never changed afterwards. No other module reads ``os.environ``."""

from __future__ import annotations

import copy
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypedDict, Union, runtime_checkable

from dsv4lite.checks import Rule, boolean, file_name, integer, names_main, number, one_of
from dsv4lite.errors import ConfigError, UnsupportedError, near_match, shown
from dsv4lite.layout import Layout
from dsv4lite.paging import PAGE_TOKENS

if TYPE_CHECKING:
    from dsv4lite.models.family import Family
    from dsv4lite.parallel.experts import DispatcherFactory
    from dsv4lite.weights.formats import QuantFormat

LoadFormat = Literal["auto", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8", "bfloat16", "float32"]
ExecutorKind = Literal["auto", "thread", "process", "external"]
ReplicaPlacement = Literal["prefix", "round_robin"]
Progress = Callable[["LoadProgress"], None]
ModelFamily = Union["Family", None]
QuantMethods = Mapping[str, Callable[[Mapping[str, Any]], "QuantFormat"]]
ExpertDispatch = Union[Literal["auto", "local", "all_gather", "all_to_all"], "DispatcherFactory"]

MAX_DRAFTS = 16
"""Most draft tokens in a row; each costs a copy of the compressor state of every sequence."""


@dataclass(frozen=True, slots=True)
class MTP:
    """Draft with the model's own multi-token prediction block.

    Attributes:
        k: Most draft tokens in a row, 1 to 4; each but the first is drafted from the previous one.
        adaptive: Draft fewer tokens, or none, where measured acceptance and step times show that drafts do not pay.
    """

    k: int = 1
    adaptive: bool = field(default=True, repr=False, kw_only=True)
    most: ClassVar[int] = 4

    def __post_init__(self) -> None:
        _check(self, k=integer(1, self.most))


@dataclass(frozen=True, slots=True)
class DSpark:
    """Draft with the block drafter of refreshed releases, all draft tokens in one pass.

    Attributes:
        k: Draft tokens in a row, at most the rows of the drafter's block, which is 5 in the releases.
        min_confidence: The draft ends before the first token whose estimated probability of acceptance is lower; 0 keeps all
            tokens.
        adaptive: As in ``MTP``.
    """

    k: int = 5
    min_confidence: float = 0.0
    adaptive: bool = field(default=True, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        _check(self, k=integer(1, MAX_DRAFTS), min_confidence=number(lambda value: 0 <= value < 1, " in [0, 1)"))


@dataclass(frozen=True, slots=True)
class NGram:
    """Draft, on the host, what followed the last tokens at their previous occurrence in the sequence.

    Attributes:
        k: Draft tokens in a row.
        min_n: Fewest tokens that must match an earlier place.
        max_n: Most tokens that are compared; the longest match decides, of equally long ones the latest.
        lookback: How many of the latest tokens are searched. Host memory per sequence: about 250 bytes for each of them and each
            length, at most; 6 MB by default.
        adaptive: As in ``MTP``.
    """

    k: int = 4
    min_n: int = 2
    max_n: int = 4
    lookback: int = 8192
    adaptive: bool = field(default=True, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        _check(self, k=integer(1, MAX_DRAFTS), min_n=integer(1, 16), lookback=integer(1, 1 << 20))
        _check(self, max_n=integer(self.min_n, 16))


@runtime_checkable
class Speculator(Protocol):
    """Drafts tokens on the host; users may supply their own.

    Methods are called in the engine's thread, between two steps, so they must not take long. An exception of a method, or a draft
    token outside the vocabulary, ends drafting for that request and nothing else.
    """

    k: int
    """Most draft tokens in a row."""

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Draft the next tokens.

        Args:
            sequence_id: Of one completion, unique in the engine's life.
            token_ids: Its prompt and completion so far; read only, and valid only during the call.
            max_drafts: Most draft tokens wanted, at least 1.

        Returns:
            The draft tokens, in order; none if there is nothing to draft from.
        """
        ...

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence that ended. Called once for every sequence, also without a previous ``propose``."""
        ...


Drafter = MTP | DSpark | NGram | Speculator
Speculative = Drafter | tuple[Drafter, ...] | Literal["auto"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The drafters of an engine, once its checkpoint is known.

    Attributes:
        own: The model's own drafter.
        speculators: Those on the host, the first one first.
        adaptive: Whether to draft fewer tokens where drafts do not pay.
    """

    own: MTP | DSpark | None = None
    speculators: tuple[Speculator, ...] = ()
    adaptive: bool = False

    @property
    def max_drafts(self) -> int:
        """Most draft tokens of a sequence in one step."""
        return max([0 if self.own is None else self.own.k, *(speculator.k for speculator in self.speculators)])


def named_drafters(speculative: Any) -> tuple[Drafter, ...]:
    """Return the drafters that ``EngineConfig.speculative`` names, the first one first; ``"auto"`` and ``None`` name none."""
    if speculative is None or speculative == "auto":
        return ()
    return speculative if isinstance(speculative, tuple) else (speculative,)


def _check(drafter: object, **rules: Rule) -> None:
    for name, rule in rules.items():
        if problem := rule(getattr(drafter, name)):
            raise ConfigError(f"{type(drafter).__name__}: {name}={shown(getattr(drafter, name))} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """One report of a long operation.

    Attributes:
        phase: ``read``, ``warmup``, …
        done: Units finished so far.
        total: Units in all.
        unit: ``bytes``, ``kernels``, …
    """

    phase: str
    done: int
    total: int
    unit: str = "bytes"


def tiny_model() -> str:
    """Return the folder of the small V4 checkpoint that ships with the package."""
    return str(Path(__file__).resolve().parent / "assets" / "tiny")


def default_cache_dir() -> str:
    """Return where compiled kernels are kept: ``$DSV4LITE_CACHE``, ``$XDG_CACHE_HOME/dsv4lite`` or ``~/.cache/dsv4lite``.

    Raises:
        ConfigError: None of them is set, and the user has no home folder.
    """
    explicit = os.environ.get("DSV4LITE_CACHE")
    if explicit:
        return explicit
    try:
        return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4lite")
    except RuntimeError as error:
        raise ConfigError("compile_cache_dir=None, and there is no home folder; give a folder, or set DSV4LITE_CACHE") from error


def local_rank() -> int | None:
    """Return this process's rank on its machine, ``$LOCAL_RANK``; ``None`` without a launcher such as torchrun."""
    return _number("LOCAL_RANK")


def global_rank() -> int | None:
    """Return this process's rank among all, ``$RANK``; ``None`` without a launcher."""
    return _number("RANK")


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None


def _text(rule: str, *kinds: type) -> Rule:
    def problem(value: object) -> str:
        if not isinstance(value, kinds):
            return rule
        return "" if value is None else file_name(value)

    return problem


def _pages(value: int) -> str:
    """Rule of ``prefix_checkpoint_tokens``."""
    return integer(1)(value) or (f"must be a multiple of {PAGE_TOKENS}" if value % PAGE_TOKENS else "")


def _drafters(value: object) -> str:
    """Rule of ``speculative``."""
    drafters = named_drafters(value)
    for drafter in drafters:
        if isinstance(drafter, type) or not isinstance(drafter, MTP | DSpark | NGram | Speculator):
            return "must be MTP(k), DSpark(k), NGram(k), an object with the methods of Speculator, a tuple of these, 'auto' or None"
        if problem := integer(1, MAX_DRAFTS)(drafter.k):
            return f"has a drafter whose k={shown(drafter.k)} {problem}"
    own = sum(isinstance(drafter, MTP | DSpark) for drafter in drafters)
    return "must name at least one drafter, and at most one of the model's own" if value == () or own > 1 else ""


def _dispatcher(value: object) -> str:
    problem = one_of("auto", "local", "all_gather", "all_to_all")(value)
    return "" if callable(value) or not problem else f"{problem}, or a callable that makes a Dispatcher of ExpertRanks"


def _methods(value: object) -> str:
    named = isinstance(value, Mapping) and all(isinstance(name, str) and callable(method) for name, method in value.items())
    return "" if named else "must map names of quant_method to functions of a quantization_config"


def _overrides(value: object) -> str:
    """Rule of ``hf_overrides``: values that JSON can hold can be copied and sent to ranks."""
    if not isinstance(value, Mapping):
        return "must be a mapping"
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        return f"must be a mapping of values that JSON can hold: {error}"
    return ""


_MOST_SECONDS = 2_147_483  # 24 days: ``poll``, with which the leader waits for its ranks, counts milliseconds in 32 bits
SECONDS = number(lambda value: 0 < value <= _MOST_SECONDS, f" of seconds above 0, at most {_MOST_SECONDS}")
_RULES: Mapping[str, Rule] = {
    "model": lambda value: _text("must be a folder or a hub id", str, os.PathLike)(value or None),
    **dict.fromkeys(
        ("revision", "tokenizer", "compile_cache_dir", "dump_dir", "trace_path"),
        _text("must be a string or None", str, os.PathLike, NoneType),
    ),
    "dtype": one_of("auto", "float32", "bfloat16"),
    "kv_cache_dtype": one_of("auto", "fp8", "bfloat16", "float32"),
    "chat_template": one_of("auto", "checkpoint"),
    "load_format": one_of("auto", "dummy"),
    "device": _text("must be a string such as 'auto', 'cpu' or 'cuda:0'", str),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_completions"), integer(1)),
    "max_model_len": integer(2, optional=True),  # a token of a prompt, and one to generate
    "max_logprobs": integer(0),
    "gpu_memory_utilization": number(lambda value: 0 < value <= 1, " in (0, 1]"),
    "kv_cache_memory_bytes": integer(1, 2**63 - 1, optional=True),
    "prefix_checkpoint_tokens": _pages,
    **dict.fromkeys(("enable_prefix_caching", "deterministic"), boolean),
    "speculative": _drafters,
    "seed": integer(-(2**63), 2**64 - 1),
    "progress": lambda value: (
        "" if isinstance(value, bool) or value == "bar" or callable(value) else "must be True, False, 'bar' or a callable"
    ),
    "hf_overrides": _overrides,
    **dict.fromkeys((f"{axis}_parallel_size" for axis in ("tensor", "expert", "data", "pipeline")), integer(1)),
    "data_parallel_placement": one_of("prefix", "round_robin"),
    "quant_formats": _methods,
    "redundant_experts": integer(0, optional=True),
    "rebalance_steps": integer(1),
    "dispatcher": _dispatcher,
    "executor": one_of("auto", "thread", "process", "external"),
    **dict.fromkeys(("start_timeout_s", "step_timeout_s", "rank_timeout_s"), SECONDS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: Folder of a checkpoint, or a hub id.
        revision: Hub revision: branch, tag or commit.
        tokenizer: Folder with ``tokenizer.json``; default is the model's own.
        dtype: Activations: ``auto`` follows the checkpoint (bfloat16 for quantized ones, float32 for float16 ones).
        kv_cache_dtype: Cache rows: ``auto`` is fp8 rows for quantized checkpoints of V4, else the activation dtype; MLA models may
            have ``fp8`` rows whatever their weights are.
        chat_template: ``checkpoint`` takes the Jinja template that the model ships for ``chat``, which needs the extra ``chat``;
            ``auto`` does so only if this package has no encoder for the model.
        load_format: ``dummy`` fills the model with plausible random weights and needs only config and tokenizer.
        device: ``auto`` takes CUDA when there is one.
        max_model_len: Most tokens of prompt and completion together; default is the model's limit, or what fits.
        max_num_seqs: Most sequences running at once, on each replica.
        max_num_batched_tokens: Most tokens in one step of a replica; prompts are prefilled in chunks of at most this.
        gpu_memory_utilization: Fraction of the device's memory that weights and state may take together.
        kv_cache_memory_bytes: Bytes for sequence state; overrides ``gpu_memory_utilization``. On a CPU the default is 1 GiB,
            or what is left if that is less.
        max_queued_requests: Requests that may wait in the engine; more wait in ``generate`` itself or get ``QueueFullError``.
        max_completions: Most completions of one request (``n``).
        max_logprobs: Most best tokens that a request may list at each position (``logprobs``, ``prompt_logprobs``).
        enable_prefix_caching: Share the state of equal prompt prefixes.
        prefix_checkpoint_tokens: A cached prefix can be resumed every so many tokens, and at its end.
        speculative: What drafts tokens ahead: ``MTP(k)``, ``DSpark(k)``, ``NGram(k)``, a ``Speculator``, or several of them;
            ``"auto"`` is what the checkpoint carries. Drafts change speed, never the output.
        deterministic: Logits do not depend on what shares the batch, on chunking, or on preemption, bit for bit. On a CPU the
            engine then computes on one thread.
        seed: Seed of requests that give none.
        progress: ``True`` logs loading progress; ``"bar"`` shows bars of tqdm, which is the extra ``progress``; a callable receives
            ``LoadProgress``.
        compile_cache_dir: Where compiled kernels are kept; default ``default_cache_dir()``.
        dump_dir: Folder for the first step that fails or has logits that are not finite; steps do not overlap until it is saved.
        trace_path: File for a timeline of the engine's thread, which Perfetto opens.
        tensor_parallel_size: Ranks that share attention's matrices and the vocabulary.
        expert_parallel_size: Ranks that share the routed experts; they run over the ranks of tensor and data parallelism.
        data_parallel_size: Replicas of attention, each with requests and state of its own.
        data_parallel_placement: How a request's replica is chosen among those with a free place. ``prefix``: the one that has most
            of the prompt cached, then the one with the fewest sequences. ``round_robin``: each in turn.
        pipeline_parallel_size: Stages of consecutive layers.
        redundant_experts: Slots for copies of popular experts in every layer, summed over the ranks that share the experts. With
            any number, even 0, experts move between ranks to balance load; ``None`` keeps them where they are.
        rebalance_steps: Steps between two rebalancings of experts.
        dispatcher: How tokens get to experts on other ranks: a name, or a callable that makes the ``parallel.experts.Dispatcher``
            of a layer. It is pickled for child processes, which do not import the host's ``__main__``.
        family: The model's family (``models.family.Family``) if the package has none for it; pickled for child processes.
        quant_formats: Weight-only formats of the host, by the ``quant_method`` of ``config.json``: callables that make a
            ``weights.formats.QuantFormat`` from a ``quantization_config``; pickled for child processes.
        executor: Where ranks run. ``thread``: the first in the engine's thread, the others in child processes. ``process``: all in
            child processes. ``external``: in the host's own, each of which makes this same engine. ``auto``: ``external`` where
            groups are given, else ``thread`` for one rank and ``process`` for several.
        device_mesh: A ``DeviceMesh`` of the host whose dimensions are named after axes (tp, ep, dp, pp); sets their sizes.
        process_group: Process group of the host's ranks, where it is not the default one.
        start_timeout_s: Seconds that ranks may take to load and to get ready.
        step_timeout_s: Seconds that a step of several ranks may take.
        rank_timeout_s: Seconds without a sign of life after which a rank counts as lost.
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    chat_template: Literal["auto", "checkpoint"] = "auto"
    dtype: Dtype = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    load_format: LoadFormat = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    max_queued_requests: int = 10_000
    max_completions: int = 1024
    max_logprobs: int = 64
    enable_prefix_caching: bool = True
    prefix_checkpoint_tokens: int = 2048
    speculative: Speculative = None
    deterministic: bool = False
    seed: int = 0
    progress: bool | Literal["bar"] | Progress = False
    compile_cache_dir: str | None = None
    dump_dir: str | None = None
    trace_path: str | None = None
    hf_overrides: Mapping[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_placement: ReplicaPlacement = "prefix"
    pipeline_parallel_size: int = 1
    redundant_experts: int | None = None
    rebalance_steps: int = 3000
    dispatcher: ExpertDispatch = "auto"
    family: ModelFamily = None
    quant_formats: QuantMethods = field(default_factory=dict)
    executor: ExecutorKind = "auto"
    device_mesh: Any = None
    process_group: Any = None
    start_timeout_s: float = 1800.0
    step_timeout_s: float = 60.0
    rank_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            if problem := rule(getattr(self, name)):
                raise ConfigError(f"{name}={shown(getattr(self, name))} {problem}")
        object.__setattr__(self, "model", os.fspath(self.model))
        object.__setattr__(self, "hf_overrides", copy.deepcopy(dict(self.hf_overrides)))
        layout, given = self.layout, [name for name in ("device_mesh", "process_group") if getattr(self, name) is not None]
        if self.redundant_experts is not None and self.device_mesh is None:  # a mesh sets the sizes later
            if layout.ep == 1:
                raise ConfigError(f"redundant_experts={self.redundant_experts} needs expert_parallel_size above 1")
            if self.redundant_experts % layout.ep:
                remedy = f"must be a multiple of expert_parallel_size={layout.ep}: all ranks have equally many places for experts"
                raise ConfigError(f"redundant_experts={self.redundant_experts} {remedy}")
        for name in ("dispatcher", "family", "quant_formats"):
            self._check_portable(name)
        if len(given) == 2:
            raise ConfigError("device_mesh and process_group are two ways to name the host's ranks; give one of them")
        if given and self.executor not in ("auto", "external"):
            raise ConfigError(f"executor={self.executor!r} starts ranks of its own, but {given[0]} names the host's; leave one out")
        if self.dump_dir is not None and (layout.world > 1 or self.place_of_ranks != "thread"):
            raise UnsupportedError(
                f"dump_dir={self.dump_dir!r} with {layout} and executor={self.executor!r}: steps are saved in the engine's own "
                "process only; use one rank and executor='thread'"
            )
        if layout.world > 1 and self.device.startswith("cuda:") and self.place_of_ranks != "external":
            raise ConfigError(f"device={self.device!r} is one device, but {layout} has {layout.world} ranks; use device='cuda'")

    def _check_portable(self, name: str) -> None:
        """Raise if ranks run in child processes and the value of a setting cannot be pickled for them."""
        given = getattr(self, name)
        if self.place_of_ranks == "external" or (self.place_of_ranks == "thread" and self.layout.world == 1):
            return
        remedy = "define it at the top of a module that can be imported, or start the ranks yourself: executor='external'"
        try:
            pickled = pickle.dumps(given)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name}={given!r} cannot be sent to ranks in child processes: {error}; {remedy}") from error
        if names_main(pickled):
            raise ConfigError(f"{name}={given!r} is of __main__, which ranks in child processes do not import; {remedy}")

    @property
    def layout(self) -> Layout:
        """Sizes of the axes, as the settings have them.

        Raises:
            ConfigError: They do not divide.
        """
        return Layout(
            tp=self.tensor_parallel_size,
            ep=self.expert_parallel_size,
            dp=self.data_parallel_size,
            pp=self.pipeline_parallel_size,
        )

    @property
    def place_of_ranks(self) -> Literal["thread", "process", "external"]:
        """The executor, with ``auto`` decided."""
        if self.executor != "auto":
            return self.executor
        if self.device_mesh is not None or self.process_group is not None:
            return "external"
        return "thread" if self.layout.world == 1 else "process"

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> EngineConfig:
        """Build from a mapping.

        Raises:
            ConfigError: For an unknown key, with a near match, or a value out of range.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(f"settings={shown(settings)} must be a mapping")
        names = [f.name for f in fields(cls)]
        for key in settings:
            if key not in names:
                hint = "; every engine can sleep" if str(key).startswith("enable_sleep") else near_match(key, names)
                raise ConfigError(f"unknown engine setting {shown(key)}{hint}")
        return cls(**settings)


class EngineSettings(TypedDict, total=False):
    """The fields of ``EngineConfig`` besides ``model``, as keyword arguments."""

    revision: str | None
    tokenizer: str | None
    chat_template: Literal["auto", "checkpoint"]
    dtype: Dtype
    kv_cache_dtype: KvCacheDtype
    load_format: LoadFormat
    device: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    max_queued_requests: int
    max_completions: int
    max_logprobs: int
    enable_prefix_caching: bool
    prefix_checkpoint_tokens: int
    speculative: Speculative
    deterministic: bool
    seed: int
    progress: bool | Literal["bar"] | Progress
    compile_cache_dir: str | None
    dump_dir: str | None
    trace_path: str | None
    hf_overrides: Mapping[str, Any]
    family: ModelFamily
    quant_formats: QuantMethods
    tensor_parallel_size: int
    expert_parallel_size: int
    data_parallel_size: int
    data_parallel_placement: ReplicaPlacement
    pipeline_parallel_size: int
    redundant_experts: int | None
    rebalance_steps: int
    dispatcher: ExpertDispatch
    executor: ExecutorKind
    device_mesh: Any
    process_group: Any
    start_timeout_s: float
    step_timeout_s: float
    rank_timeout_s: float
