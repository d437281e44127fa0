"""A family of models as one value: everything that the engine has to know of it, and the table of the families that ship.

The engine, scheduler, state, planning and drafters use a model through ``Family`` and ``Model`` and never name one. A family of the
host's own is passed as ``EngineConfig.family``; its functions must be importable where ranks live in child processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from dsv4lite.errors import ConfigError, UnsupportedError, shown
from dsv4lite.kernels.paging import Paging
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


class Batch(Protocol):
    """One step's tokens, as a family's ``Model.batch`` returns them with whatever its layers read besides.

    Attributes:
        token_ids_T: int64; anything valid for padding.
        paging: Their positions, sequences and pages.
        max_tokens: No sequence is longer than this after the step, as far as the host knows.
        chosen: If wanted, receives what the model chooses in all layers.
        given: What it has to choose; negative numbers leave the choice for that token and layer to the model.
        most_tokens: Where several replicas share experts, tokens of the one with the most; ``None`` if it is not known.
        taps_TK: What a drafter reads of layers of several stages, on its way from stage to stage.
    """

    token_ids_T: Tensor
    paging: Paging
    max_tokens: int
    chosen: Choices | None
    given: Choices | None
    most_tokens: int | None
    taps_TK: Tensor | None


class Model(Protocol):
    """One rank's part of a model, an ``nn.Module``: what the engine asks of it.

    The residual (``hidden``) is opaque to the engine: it goes from stage to stage, to the logits and to drafters.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def numerics(self) -> Numerics: ...
    @property
    def shard(self) -> ModelShard: ...
    @property
    def state_spec(self) -> StateSpec:
        """What this rank keeps of its sequences: its hidden layers, then its drafter's."""

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Shape of one token's residual, in the dtype of ``numerics``."""

    @property
    def short_lengths(self) -> tuple[int, ...]:
        """Lengths up to which every sequence of a step launches less: decode graphs are captured for each."""

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured in a CUDA graph."""

    @property
    def passes_taps(self) -> bool:
        """Whether stages pass on what a drafter reads of their layers (``empty_taps``)."""

    def batch(self, token_ids_T: Tensor, paging: Paging, *, max_tokens: int) -> Batch:
        """Return a step, with the tables that the family's layers share."""

    def __call__(self, batch: Any, caches: Sequence[LayerCache], hidden: Tensor | None = None) -> Tensor:
        """Run a step through this rank's layers, from the residual of the stage before; return the residual [T, …] after them."""

    def logits(self, hidden: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return float32 logits [T, V] of the next token, in ``out`` if given."""

    def slots(self) -> dict[str, Slot]:
        """Return the place of every tensor of the checkpoint that this rank holds, by its official name."""

    def brief(self) -> AbstractContextManager[None]:
        """Let passes skip layers that launch nothing that others do not: for dry runs."""

    def empty_taps(self, tokens: int) -> Tensor:
        """Return room for what a drafter reads of so many tokens."""

    def take_part(self, most_tokens: int | None = None) -> None:
        """Run this rank's experts for the tokens of other ranks, with none of its own."""

    def rebalance(self) -> tuple[dict[str, Slot], list[tuple[float, float]]]:
        """Choose anew where experts are; return the places to fill, and each layer's imbalance before and after."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...


class TrainableModel(Model, Protocol):
    """A model with a forward pass of its own for trainers: that of unquantized checkpoints is differentiable."""

    def one_pass(self, token_ids: Sequence[int], given: Choices | None = None) -> Tensor:
        """Run one whole sequence without a lasting cache; return the residual [T, …]. ``given`` is what it has to choose."""


class MtpModel(Model, Protocol):
    """A model with multi-token prediction blocks, whose state is the last layer of its spec."""

    def mtp_feed(self, hidden: Tensor, batch: Any, cache: LayerCache) -> None:
        """Write the block's rows of a step: the model's residual [T, …], and the *next* token at each position in ``batch``."""

    def mtp_forward(self, hidden: Tensor, batch: Any, cache: LayerCache) -> Tensor:
        """Run the block on the same; return its own residual."""

    def mtp_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [T, V] of the token after the next."""

    def mtp_take_part(self, most_tokens: int) -> None:
        """Do of ``mtp_forward`` what ``take_part`` does of a step."""


class BlockModel(Model, Protocol):
    """A model with a block drafter, which reads the model's layers during a step."""

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
        """Draft what follows each sequence's newest token ``anchors_S`` at position ``next_S`` (negative for padding).

        ``pick`` chooses drafts int64 [S] from the logits [S, V] of place k of the block. Returns the drafts int64 [S, G], and the
        chance float32 [S, G] that each holds if those before it do.
        """

    def draft_take_part(self, most_sequences: int) -> None:
        """Do of ``draft_block`` what ``take_part`` does of a step."""


def official_names(raw: Mapping[str, Any]) -> NameTables:
    """Return the names of a family whose checkpoints know no others."""
    return NameTables()


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Family:
    """What the engine knows of a family. Functions that take a config get the one that ``read_config`` returns.

    Attributes:
        name: The ``model_type`` of its configs.
        read_config: Reads a ``config.json``; raises ``ConfigError`` or ``UnsupportedError``.
        tensors: Names, shapes and kinds of the checkpoint's tensors, and how ranks share them.
        names: Returns other names of these tensors, from a ``config.json`` that is not checked yet.
        state: Returns what a rank's layers, and with ``drafter`` its drafter's, keep of a sequence; takes config, ``Numerics``,
            ``ModelShard`` and ``drafter``.
        build: Makes a rank's ``Model`` without filling it; the arguments are those of ``ModelSource.build``.
        workspace: Returns what a pass of up to ``tokens`` tokens, of sequences of up to ``longest``, allocates on a rank; takes
            config, ``Numerics``, ``ModelShard``, and these.
        free_rows: KV rows may be FP8 or unquantized, whatever the weights are, and are unquantized unless settings say otherwise;
            else they are FP8 in quantized models and unquantized in others.
        row_reads: Least bytes of one layer's state that a decode step reads of a sequence: for the roofline.
        weight_only: Matrices may be of weight-only formats (``weights/formats.py``), and dense ones whose names end so are widened
            at load all the same; ``None`` if they may not.
        drafters: A tensor that only a checkpoint with this kind of drafter has.
        chat: Returns the name of the chat format (``text.forms.FORMS``); what config does not tell apart, the tokenizer does.
        captured_prompts: Most tokens of a step with prompts that is captured. What its layers launch must depend on the number of
            tokens alone, not on what the host knows of its sequences.
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
    """Return the MLA family under one of its names."""
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
        captured_prompts=128,  # more tokens of a sequence may take the up-projected form, which the host lays out
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
    """Return a name without case and separators."""
    return "".join(filter(str.isalnum, name.lower()))


def find_family(raw: Mapping[str, Any], given: Family | None = None) -> Family:
    """Return the family of a ``config.json``: the one that is ``given``, or one that ships.

    Raises:
        ConfigError: What is given is no ``Family``.
        UnsupportedError: The config is of another family.
    """
    if not isinstance(given, Family | None):
        raise ConfigError(f"family={shown(given)} must be a dsv4lite.models.family.Family, or None")
    families = FAMILIES if given is None else {given.name: given}
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in families:
        known = ", ".join(families)
        alike = [other for other in families if _letters(other) == _letters(str(name))]  # another number is another model
        hint = f"; did you mean {alike[0]!r}?" if alike else ""
        raise UnsupportedError(f"model_type={shown(name)} is not supported (known: {known}){hint}")
    return families[name]
