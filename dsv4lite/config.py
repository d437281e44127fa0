"""What an engine is made of: settings, validated once, never changed afterwards. The only reader of ``os.environ``."""

from __future__ import annotations

import copy
import os
import pickle
import pickletools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Union, runtime_checkable

from dsv4lite.errors import ConfigError, UnsupportedError, near_match, shown
from dsv4lite.layout import Layout
from dsv4lite.paging import PAGE_TOKENS

if TYPE_CHECKING:
    from dsv4lite.models.family import Family
    from dsv4lite.parallel.experts import DispatcherFactory

LoadFormat = Literal["auto", "dummy"]
Dtype = Literal["auto", "float32", "bfloat16"]
KvCacheDtype = Literal["auto", "fp8", "bfloat16", "float32"]
ExecutorKind = Literal["auto", "thread", "process", "external"]
ReplicaPlacement = Literal["prefix", "round_robin"]
Progress = Callable[["LoadProgress"], None]
ModelFamily = Union["Family", None]
ExpertDispatch = Union[Literal["auto", "local", "all_gather", "all_to_all"], "DispatcherFactory"]

MAX_DRAFTS = 16
"""Most guesses in a row, by whomever; each costs a copy of every sequence's accumulators."""


@dataclass(frozen=True, slots=True)
class MTP:
    """Guess with the model's own multi-token prediction block.

    Attributes:
        k: Most guesses in a row, 1 to 4; all but the first are chained, each on the one before.
        adaptive: Guess less, or not at all, where it does not pay: by what guesses and steps were measured to bring and to cost.
    """

    k: int = 1
    adaptive: bool = field(default=True, repr=False, kw_only=True)
    most: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_length("MTP", self.k, self.most)


@dataclass(frozen=True, slots=True)
class DSpark:
    """Guess with the block drafter of refreshed releases, all guesses in one pass.

    Attributes:
        k: Draft tokens in a row, at most the rows of the drafter's block, which is 5 in the releases.
        min_confidence: Draft tokens from the first one whose estimated probability of acceptance is lower are left out; 0 keeps
            all.
        adaptive: As in ``MTP``.
    """

    k: int = 5
    min_confidence: float = 0.0
    adaptive: bool = field(default=True, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        check_length("DSpark", self.k, MAX_DRAFTS)
        if not isinstance(self.min_confidence, int | float) or not 0 <= self.min_confidence < 1:
            raise ConfigError(f"DSpark: min_confidence={self.min_confidence!r} must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class NGram:
    """Guess, on the host, that text repeats itself: what followed the last tokens when they stood together before.

    Attributes:
        k: Draft tokens in a row.
        min_n: Fewest tokens that must have stood together before.
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
        check_length("NGram", self.k, MAX_DRAFTS)
        for name, least, most in (("min_n", 1, 16), ("max_n", self.min_n, 16), ("lookback", 1, 1 << 20)):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(f"NGram: {name}={value!r} must be an integer from {least} to {most}")


@runtime_checkable
class Speculator(Protocol):
    """What guesses tokens on the host; users may supply their own.

    Methods are called in the engine's thread, between two steps, so they must not take long. What a method raises, or a guess that
    is no token of the vocabulary, ends guessing for that request and nothing else.
    """

    k: int
    """Most guesses in a row."""

    def propose(self, sequence_id: int, token_ids: Sequence[int], max_drafts: int) -> Sequence[int]:
        """Guess what follows.

        Args:
            sequence_id: Of one completion, unique in the engine's life.
            token_ids: Its prompt and completion so far; read only, and valid only during the call.
            max_drafts: Most guesses wanted, at least 1.

        Returns:
            The guesses, in order; none if there is nothing to go by.
        """
        ...

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence: it ended. Called once, and for sequences that were never asked about, too."""
        ...


Drafter = MTP | DSpark | NGram | Speculator
Speculative = Drafter | tuple[Drafter, ...] | Literal["auto"] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The drafters of an engine, once its checkpoint is known.

    Attributes:
        own: The model's own drafter.
        speculators: Those on the host, the first one first.
        adaptive: Whether to guess less where it does not pay.
    """

    own: MTP | DSpark | None = None
    speculators: tuple[Speculator, ...] = ()
    adaptive: bool = False

    @property
    def max_drafts(self) -> int:
        """Most guesses of one run."""
        return max([0 if self.own is None else self.own.k, *(speculator.k for speculator in self.speculators)])


def adapts(drafters: Sequence[Drafter], own: MTP | DSpark | None) -> bool:
    """Return whether any of the drafters leaves it to the engine how far to guess."""
    return any(drafter.adaptive for drafter in (own, *drafters) if isinstance(drafter, MTP | DSpark | NGram))


def check_length(name: str, k: object, most: int) -> None:
    """Raise ConfigError unless ``k`` is an integer from 1 to ``most``."""
    if type(k) is not int or not 1 <= k <= most:
        raise ConfigError(f"{name}: k={k!r} must be an integer from 1 to {most}")


def check_speculative(value: object) -> tuple[Drafter, ...]:
    """Return the drafters that a setting names, the first one first; ``"auto"`` and ``None`` name none.

    Raises:
        ConfigError: It is not what ``EngineConfig.speculative`` takes.
    """
    if value is None or value == "auto":
        return ()
    drafters = value if isinstance(value, tuple) else (value,)
    for drafter in drafters:
        if isinstance(drafter, type) or not isinstance(drafter, MTP | DSpark | NGram | Speculator):
            raise ConfigError(
                f"speculative={value!r} must be MTP(k), DSpark(k), NGram(k), an object with the methods of Speculator, a tuple of "
                "these, 'auto' or None"
            )
        check_length(type(drafter).__name__, drafter.k, MAX_DRAFTS)
    if not drafters or sum(isinstance(drafter, MTP | DSpark) for drafter in drafters) > 1:
        raise ConfigError(f"speculative={value!r} must name at least one drafter, and at most one of the model's own")
    return drafters


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
    """Return where compiled kernels are kept: ``$DSV4LITE_CACHE``, ``$XDG_CACHE_HOME/dsv4lite`` or ``~/.cache/dsv4lite``."""
    explicit = os.environ.get("DSV4LITE_CACHE")
    if explicit:
        return explicit
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4lite")


def local_rank() -> int | None:
    """Return which of a machine's ranks this process is, if a launcher such as torchrun says so."""
    told = os.environ.get("LOCAL_RANK", "")
    return int(told) if told.isdecimal() else None


_INT32_MAX, _INT64_MAX = 2**31 - 1, 2**63 - 1
_SIZES: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_completions"), (1, _INT32_MAX)),
    **dict.fromkeys(("max_model_len", "rebalance_steps"), (1, _INT32_MAX)),
    **dict.fromkeys(("max_logprobs", "redundant_experts"), (0, _INT32_MAX)),
    "kv_cache_memory_bytes": (1, _INT64_MAX),
    "prefix_checkpoint_tokens": (PAGE_TOKENS, _INT32_MAX),
    "seed": (-(2**63), 2**64 - 1),
    **dict.fromkeys((f"{axis}_parallel_size" for axis in ("tensor", "expert", "data", "pipeline")), (1, _INT32_MAX)),
}
"""The least and the largest value of every setting that is an integer."""
_OPTIONAL_SIZES = ("max_model_len", "kv_cache_memory_bytes", "redundant_experts")
_KINDS: tuple[tuple[str, tuple[type, ...], str], ...] = (
    *((name, (bool,), "True or False") for name in ("enable_prefix_caching", "deterministic")),
    *(
        (name, (str, os.PathLike, type(None)), "a string or None")
        for name in ("revision", "tokenizer", "compile_cache_dir", "dump_dir")
    ),
    ("device", (str,), "a string such as 'auto', 'cpu' or 'cuda:0'"),
    ("gpu_memory_utilization", (int, float), "a number"),
    ("hf_overrides", (Mapping,), "a mapping"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: Folder of a checkpoint, or a hub id.
        revision: Hub revision: branch, tag or commit.
        tokenizer: Folder with ``tokenizer.json``; default is the model's own.
        dtype: Activations: ``auto`` follows the checkpoint (bfloat16 for quantized ones, float32 for float16 ones).
        kv_cache_dtype: Cache rows: ``auto`` is fp8 rows for quantized checkpoints, the activation dtype for plain ones.
        load_format: ``dummy`` fills the model with plausible random weights and needs only config and tokenizer.
        device: ``auto`` takes CUDA when there is one.
        max_model_len: Most tokens of prompt and completion together; default is the model's limit, or what fits.
        max_num_seqs: Most sequences running at once, on each replica.
        max_num_batched_tokens: Most tokens in one step of a replica; prompts are prefilled in chunks of at most this.
        gpu_memory_utilization: Fraction of the device's memory that weights and state may take together.
        kv_cache_memory_bytes: Bytes for sequence state; overrides ``gpu_memory_utilization``. On CPU the default is 1 GiB.
        max_queued_requests: Requests that may wait; more wait in ``generate`` itself or get ``QueueFullError``.
        max_completions: Most completions of one request (``n``).
        max_logprobs: Most best tokens that a request may list at each position (``logprobs``, ``prompt_logprobs``).
        enable_prefix_caching: Share the state of equal prompt prefixes.
        prefix_checkpoint_tokens: A cached prefix can be resumed every so many tokens, and at its end.
        speculative: What drafts tokens ahead: ``MTP(k)``, ``DSpark(k)``, ``NGram(k)``, a ``Speculator``, or several of them;
            ``"auto"`` is what the checkpoint carries. Guesses change speed, never what is generated.
        deterministic: Logits do not depend on what shares the batch, on chunking, or on preemption, bit for bit. On a CPU the
            engine then computes on one thread.
        seed: Seed of requests that give none.
        progress: ``True`` logs loading progress; a callable receives ``LoadProgress``.
        compile_cache_dir: Where compiled kernels are kept; default ``default_cache_dir()``.
        dump_dir: Where the first step that fails, or whose logits are not finite, is saved; until then no steps overlap.
        tensor_parallel_size: Ranks that share attention's matrices and the vocabulary.
        expert_parallel_size: Ranks that share the routed experts; they run over the ranks of tensor and data parallelism.
        data_parallel_size: Replicas of attention, each with requests and state of its own.
        data_parallel_placement: The replica that a request goes to, of those with a free place. ``prefix``: that with most of it
            cached, then that with the fewest sequences. ``round_robin``: each in turn.
        pipeline_parallel_size: Stages of consecutive layers.
        redundant_experts: Places for copies of popular experts in every layer, on all ranks that share experts together; with any
            number, even 0, experts move where they are needed. ``None``: they stay where they are.
        rebalance_steps: Steps after which they move.
        dispatcher: How tokens get to experts on other ranks: a name, or what makes a ``parallel.experts.Dispatcher`` of a layer;
            child processes get it pickled, and do not import the host's ``__main__``.
        family: The model's family (``models.family.Family``) where it is none of those that ship; child processes get it pickled.
        executor: Where ranks live. ``thread``: the first in the engine's thread, the others in child processes. ``process``: all in
            child processes. ``external``: in the host's own, each of which makes this same engine. ``auto``: ``external`` where
            groups are given, else ``thread`` for one rank and ``process`` for several.
        device_mesh: A ``DeviceMesh`` of the host whose dimensions are named after axes (tp, ep, dp, pp); sets their sizes.
        process_group: Process group of the host's ranks, where it is not the default one.
        start_timeout_s: Seconds that ranks may take to load and to get ready.
        step_timeout_s: Seconds that a step of several ranks may take.
        rank_timeout_s: Seconds without a sign of life after which a rank is given up.
    """

    model: str
    revision: str | None = None
    tokenizer: str | None = None
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
    progress: bool | Progress = False
    compile_cache_dir: str | None = None
    dump_dir: str | None = None
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
    executor: ExecutorKind = "auto"
    device_mesh: Any = None
    process_group: Any = None
    start_timeout_s: float = 1800.0
    step_timeout_s: float = 60.0
    rank_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, os.PathLike)) or not str(self.model):
            raise ConfigError(f"model={shown(self.model)} must be a folder or a hub id")
        object.__setattr__(self, "model", str(self.model))
        for name, options in (
            ("dtype", ("auto", "float32", "bfloat16")),
            ("kv_cache_dtype", ("auto", "fp8", "bfloat16", "float32")),
            ("load_format", ("auto", "dummy")),
            ("executor", ("auto", "thread", "process", "external")),
            ("data_parallel_placement", ("prefix", "round_robin")),
        ):
            value = getattr(self, name)
            if value not in options:
                hint = near_match(value, options) if isinstance(value, str) else ""
                raise ConfigError(f"{name}={shown(value)} must be one of {options}{hint}")
        for name, kinds, rule in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise ConfigError(f"{name}={shown(value)} must be {rule}")
        for name in ("model", "revision", "tokenizer", "compile_cache_dir", "dump_dir", "device"):
            if "\0" in str(getattr(self, name)):
                raise ConfigError(f"{name}={shown(getattr(self, name))} contains a NUL character")
        for name, (least, most) in _SIZES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_SIZES:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                optional = ", or None" if name in _OPTIONAL_SIZES else ""
                limit = f"of at least {least}" if isinstance(value, int) and value < least else f"from {least} to {most}"
                raise ConfigError(f"{name}={shown(value)} must be an integer {limit}{optional}")
        self._check_ranks()
        object.__setattr__(self, "hf_overrides", copy.deepcopy(dict(self.hf_overrides)))
        if not (self.progress is True or self.progress is False or callable(self.progress)):
            raise ConfigError(f"progress={shown(self.progress)} must be True, False or a callable")
        check_speculative(self.speculative)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"gpu_memory_utilization={shown(self.gpu_memory_utilization)} must be in (0, 1]")
        if self.prefix_checkpoint_tokens % PAGE_TOKENS:
            raise ConfigError(f"prefix_checkpoint_tokens={self.prefix_checkpoint_tokens} must be a multiple of {PAGE_TOKENS}")

    def _check_ranks(self) -> None:
        if self.redundant_experts is not None and self.layout.ep == 1:
            raise ConfigError(f"redundant_experts={self.redundant_experts} needs expert_parallel_size above 1")
        self._check_dispatcher()
        self._check_portable("family")
        for name in ("start_timeout_s", "step_timeout_s", "rank_timeout_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= threading.TIMEOUT_MAX:
                most = int(threading.TIMEOUT_MAX)
                raise ConfigError(f"{name}={shown(value)} must be a positive number of seconds, at most {most}")
        layout, given = self.layout, [name for name in ("device_mesh", "process_group") if getattr(self, name) is not None]
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

    def _check_dispatcher(self) -> None:
        given, names = self.dispatcher, ("auto", "local", "all_gather", "all_to_all")
        if isinstance(given, str):
            if given not in names:
                raise ConfigError(f"dispatcher={given!r} must be one of {names}, or make one{near_match(given, names)}")
            return
        if not callable(given):
            raise ConfigError(f"dispatcher={given!r} must be one of {names}, or a callable that makes a Dispatcher of ExpertRanks")
        self._check_portable("dispatcher")

    def _check_portable(self, name: str) -> None:
        """Raise unless ranks in child processes, if there are any, can have an object of the host's."""
        given = getattr(self, name)
        if self.place_of_ranks == "external" or (self.place_of_ranks == "thread" and self.layout.world == 1):
            return
        remedy = "define it at the top of a module that can be imported, or start the ranks yourself: executor='external'"
        try:
            pickled = pickle.dumps(given)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise ConfigError(f"{name}={given!r} cannot be sent to ranks in child processes: {error}; {remedy}") from error
        if any(found == "__main__" for _, found, _ in pickletools.genops(pickled)):
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
                hint = near_match(key, names) if isinstance(key, str) else ""
                raise ConfigError(f"unknown engine setting {shown(key)}{hint}")
        return cls(**settings)
