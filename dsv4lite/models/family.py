"""A model family as one value: all that the engine knows about it, and the table of the families in this package.

The engine, scheduler, state, planning and drafters use a model through ``Family`` and ``Model`` and never name one. The host can
pass a family of its own as ``EngineConfig.family``; if ranks run in child processes, these must be able to import its functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from dsv4lite.errors import ConfigError, UnsupportedError, shown
from dsv4lite.kernels.paging import Paging
from dsv4lite.models.batch import Batch
from dsv4lite.models.choices import Choices
from dsv4lite.models.config import DrafterKind, ModelConfig, PassBytes
from dsv4lite.models.deepseek_mla import config as mla_config
from dsv4lite.models.deepseek_mla import state as mla_state
from dsv4lite.models.deepseek_mla import workspace as mla_workspace
from dsv4lite.models.deepseek_mla.model import DeepseekMla
from dsv4lite.models.deepseek_mla.names import mla_names
from dsv4lite.models.deepseek_mla.tensors import MLA_TENSORS
from dsv4lite.models.deepseek_v4.config import parse_config
from dsv4lite.models.deepseek_v4.model import DeepseekV4
from dsv4lite.models.deepseek_v4.names import V4_NAMES
from dsv4lite.models.deepseek_v4.state import row_reads, state_spec
from dsv4lite.models.deepseek_v4.tensors import V4_TENSORS
from dsv4lite.models.deepseek_v4.workspace import workspace
from dsv4lite.models.shard import ModelShard
from dsv4lite.state.spec import StateSpec
from dsv4lite.state.store import LayerCache
from dsv4lite.weights.names import NameTables
from dsv4lite.weights.quant import Numerics, Slot
from dsv4lite.weights.tensors import Tensors


class Model(Protocol):
    """One rank's shard of a model, an ``nn.Module``, as the engine uses it.

    The engine passes the residual (``hidden``) from stage to stage, to ``logits`` and to drafters, and never looks into it.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def numerics(self) -> Numerics: ...
    @property
    def shard(self) -> ModelShard: ...
    @property
    def state_spec(self) -> StateSpec:
        """State that this rank keeps of each sequence: that of its hidden layers, then of its drafter."""

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Shape of one token's residual, in the dtype of ``numerics``."""

    @property
    def short_lengths(self) -> tuple[int, ...]:
        """Sequence lengths up to which a step launches fewer kernels; each gets decode graphs of its own."""

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured in a CUDA graph."""

    def captures(self, tokens: int, pairs: int, pages: int) -> bool:
        """Return whether a step with prompts may be replayed, given its tokens and ``pairs`` and ``pages`` of its ``StepShape``.

        The launches of a captured step depend on its number of tokens alone, not on lengths that the host knows. A family returns
        ``False`` where launches that fit these lengths save more than the host takes for them.
        """

    @property
    def passes_taps(self) -> bool:
        """Whether pipeline stages pass on ``taps_TK``: a drafter reads layers of earlier stages."""

    def batch(self, token_ids_T: Tensor, paging: Paging, *, max_tokens: int) -> Batch:
        """Return one step's batch, with the tables that the family's layers share."""

    def __call__(self, batch: Any, caches: Sequence[LayerCache], hidden: Tensor | None = None) -> Tensor:
        """Run a step through this rank's layers, from the previous stage's residual; return the residual [T, …] after them."""

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [T, V] of the next token, in ``out`` if given."""

    def slots(self) -> dict[str, Slot]:
        """Return the slot of every checkpoint tensor that this rank holds, by its official name."""

    def skip_repeated_layers(self) -> AbstractContextManager[None]:
        """Skip layers that launch the same kernels as other layers; for dry runs, whose results are not used."""

    def empty_taps(self, tokens: int) -> Tensor:
        """Allocate ``Batch.taps_TK`` [tokens, K], in the dtype of ``numerics``."""

    def take_part(self, most_tokens: int | None = None) -> None:
        """Run this rank's experts on other ranks' tokens; this rank has none in this step."""

    def rebalance(self) -> tuple[dict[str, Slot], list[tuple[float, float]]]:
        """Choose anew which ranks hold which experts; return the slots to fill, and each layer's imbalance before and after."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...


class TrainableModel(Model, Protocol):
    """A model with a forward pass for trainers, which is differentiable for unquantized checkpoints."""

    def one_pass(self, token_ids: Sequence[int], given: Choices | None = None) -> Tensor:
        """Run one whole sequence without a lasting cache; return the residual [T, …]. ``given``: see ``Batch``."""


class MtpModel(Model, Protocol):
    """A model with a multi-token prediction block, whose state is the last layer of ``state_spec``."""

    def mtp_store_kv(self, hidden: Tensor, batch: Any, cache: LayerCache) -> None:
        """Store the block's kv rows, given the model's residual [T, …]; ``batch`` has the *next* token at each position."""

    def mtp_forward(self, hidden: Tensor, batch: Any, cache: LayerCache) -> Tensor:
        """Run the block on the same arguments; return its residual [T, …]."""

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [T, V] of the token after the next."""

    def mtp_take_part(self, most_tokens: int) -> None:
        """As ``take_part``, for the MTP block."""


class BlockModel(Model, Protocol):
    """A model with a block drafter, which reads hidden layers of the model during each step."""

    def draft_block(
        self,
        anchors_S: Tensor,
        next_S: Tensor,
        window_SP: Tensor,
        window_first_S: Tensor,
        caches: Sequence[LayerCache],
        pick: Callable[[Tensor, int], Tensor],
        most_sequences: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Draft the tokens after each sequence's newest token ``anchors_S``, at position ``next_S`` (negative for padding).

        ``pick(logits [S, V], k)`` chooses draft token k of each sequence, int64 [S]. Returns the draft tokens int64 [S, G], and
        float32 [S, G] the estimated probability that each is accepted, given that all earlier ones are.
        """

    def draft_take_part(self, most_sequences: int) -> None:
        """As ``take_part``, for the block drafter."""


def official_names(raw: Mapping[str, Any]) -> NameTables:
    """Return the tables of a family whose checkpoints have official names only."""
    return NameTables()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Family:
    """All that the engine knows about a family. Functions that take a config get the one that ``read_config`` returns.

    Attributes:
        name: The ``model_type`` of its configs.
        read_config: Reads a ``config.json``; raises ``ConfigError`` or ``UnsupportedError``.
        tensors: Names, shapes and kinds of the checkpoint's tensors, and how ranks share them.
        names: Returns the other names of these tensors, given a ``config.json`` that has not been checked.
        state: Returns the state that a rank's layers, and with ``drafter`` its drafter's layers, keep of a sequence; takes config,
            ``Numerics``, ``ModelShard`` and ``drafter``.
        build: Makes a rank's ``Model`` without filling it; the arguments are those of ``ModelSource.build``.
        workspace: Returns the bytes that a pass allocates on a rank; takes config, ``Numerics``, ``ModelShard``, ``tokens`` (most
            tokens of the pass) and ``longest`` (tokens of the longest sequence).
        free_rows: KV rows can be FP8 or unquantized with any weights, and are unquantized by default. ``False``: they are FP8 in
            quantized models and unquantized in others.
        row_reads: Returns a lower bound of the bytes of one layer's state that a decode step reads per sequence: for the roofline.
        weight_only: Ends of the names of dense matrices that are dequantized at load; the others stay in weight-only formats
            (``weights/formats.py``). ``None``: the family does not take such formats.
        drafters: For each kind of drafter, a tensor that only checkpoints with this kind have.
        chat: Returns the name of the chat format (``text.forms.FORMS``); releases with the same config are told apart by the
            tokenizer.
        captured_prompts: Most tokens of a captured step with prompts; see ``Model.captures``.
    """

    name: str
    read_config: Callable[[Mapping[str, Any]], ModelConfig]
    tensors: Tensors
    names: Callable[[Mapping[str, Any]], NameTables] = official_names
    state: Callable[..., StateSpec]
    build: Callable[..., Any]
    workspace: Callable[..., PassBytes]
    row_reads: Callable[[Any, Numerics], int]
    free_rows: bool = False
    weight_only: tuple[str, ...] | None = None
    drafters: Mapping[DrafterKind, str] = field(default_factory=dict)
    chat: Callable[[Any], str] | None = None
    captured_prompts: int = 0

    def __repr__(self) -> str:
        return f"Family(name={self.name!r}, …)"


def _mla(name: str) -> Family:
    """Return the MLA family for one ``model_type``."""
    return Family(
        name=name,
        read_config=mla_config.parse_config,
        tensors=MLA_TENSORS,
        names=mla_names,
        state=mla_state.state_spec,
        build=DeepseekMla,
        workspace=mla_workspace.workspace,
        row_reads=mla_state.row_reads,
        free_rows=True,
        weight_only=("attn.wkv_b.weight",),
        drafters={"mtp": "mtp.0.eh_proj.weight"},
        chat=(lambda config: name) if name in ("deepseek_v3", "deepseek_v32") else None,
        captured_prompts=4096,
    )


FAMILIES: Mapping[str, Family] = {
    "deepseek_v4": Family(
        name="deepseek_v4",
        read_config=parse_config,
        tensors=V4_TENSORS,
        names=lambda raw: V4_NAMES,
        state=state_spec,
        build=DeepseekV4,
        workspace=workspace,
        row_reads=row_reads,
        drafters={"mtp": "mtp.0.e_proj.weight", "dspark": "mtp.0.main_proj.weight"},
        chat=lambda config: "deepseek_v4" if config.dspark is None else "deepseek_v4_refreshed",
        captured_prompts=4096,
    ),
    **{name: _mla(name) for name in mla_config.MODEL_TYPES},
}


def _letters(name: str) -> str:
    """Return the lower-case letters and digits of a name."""
    return "".join(filter(str.isalnum, name.lower()))


def find_family(raw: Mapping[str, Any], given: Family | None = None) -> Family:
    """Return the family of a ``config.json``: ``given``, or one of ``FAMILIES``.

    Raises:
        ConfigError: ``given`` is not a ``Family``.
        UnsupportedError: The config's ``model_type`` is of no such family.
    """
    if not isinstance(given, Family | None):
        raise ConfigError(f"family={shown(given)} must be a dsv4lite.models.family.Family, or None")
    families = FAMILIES if given is None else {given.name: given}
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in families:
        known = ", ".join(families)
        alike = [other for other in families if _letters(other) == _letters(str(name))]  # digits must match
        hint = f"; did you mean {alike[0]!r}?" if alike else ""
        raise UnsupportedError(f"model_type={shown(name)} is not supported (known: {known}){hint}")
    return families[name]
