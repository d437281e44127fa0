"""The trainer's side of a rollout: the library's own model, with gradients, and log-probabilities with the rollout's bits."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from contextlib import nullcontext
from typing import Any, Protocol, Unpack, cast, runtime_checkable

import torch
from torch import Tensor

from dsv4lite.checks import as_integers, require
from dsv4lite.config import EngineConfig, EngineSettings
from dsv4lite.device import choose_device, single_threaded
from dsv4lite.engine.choices import check_replay, replayed_choices
from dsv4lite.engine.contract import ExecutionContract
from dsv4lite.errors import ContextLengthError, InvalidRequestError, UnsupportedError, shown
from dsv4lite.kernels.sampling import scale
from dsv4lite.models.family import TrainableModel
from dsv4lite.planning.memory import choose_numerics
from dsv4lite.request import Replay, SamplingParams, check_vocabulary
from dsv4lite.sampling.sampler import MAX_TEMPERATURE, MIN_TEMPERATURE
from dsv4lite.weights.source import ModelSource
from dsv4lite.weights.update import checksum, gathered

_EDITS = ("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias")
_FILTERS = ("top_k", "top_p", "min_p")  # without effect on greedy sampling
_TRUNCATIONS = (*_FILTERS, "min_tokens", "bad_words_ids", "allowed_token_ids", "thinking_budget", "structured_outputs")


@runtime_checkable
class _HasOnePass(Protocol):
    def one_pass(self, token_ids: Sequence[int]) -> Tensor: ...


def load_model(model: str | os.PathLike[str], **settings: Unpack[EngineSettings]) -> TrainableModel:
    """Load the model of a checkpoint for training: an ``nn.Module`` with the arithmetic of an engine of the same settings.

    Parameters of an unquantized checkpoint have ``requires_grad``. On a CPU matrices are float32, whatever the checkpoint stores.

    Args:
        model: Folder of a checkpoint, or a hub id.
        **settings: Fields of ``EngineConfig``; others than the model's are ignored. ``deterministic`` is true by default.

    Raises:
        ConfigError, CheckpointError: The settings or the checkpoint are wrong.
    """
    given: EngineSettings = {"deterministic": True, **settings}
    config = EngineConfig.from_dict({"model": model, **given})
    source = ModelSource.open(config)
    numerics = choose_numerics(config, source, choose_device(config))
    built = source.build(numerics, with_mtp=False, seed=config.seed)
    if not numerics.quantized and source.form is None:
        for _, parameter in built.named_parameters():
            parameter.requires_grad_(parameter.is_floating_point())
    return cast(TrainableModel, built)


def execution_contract(model: TrainableModel) -> ExecutionContract:
    """Return all that the model's bits depend on; an engine of one rank with equal weights and settings has an equal contract.

    All ranks that share a sharded model (FSDP2) must call it together.

    Raises:
        InvalidRequestError: The model is not one of this package.
    """
    _check_model(model)
    sums = {
        name: f"{checksum(gathered(slot.values()).float(), tuple(slice(0, n) for n in slot.shape), slot.shape):016x}"
        for name, slot in model.slots().items()
    }
    return ExecutionContract.of(model.config, model.numerics, model.shard.mesh.layout, sums)


def completion_logprobs(
    model: TrainableModel,
    prompt: Sequence[int],
    completion: Sequence[int],
    params: SamplingParams | None = None,
    *,
    replay: Replay | None = None,
) -> Tensor:
    """Return the log-probabilities of a completion's tokens, float32 [C], differentiable.

    A deterministic model computes on one thread of a CPU, and the values have the bits that the rollout recorded; see
    ``docs/rollouts.md``.

    Args:
        model: From ``load_model``.
        prompt: Token ids, at least one.
        completion: Token ids, at least one.
        params: Those of the rollout; ``None`` means the model's own distribution.
        replay: Choices of the rollout to repeat. Settings that forbid or truncate tokens need it.

    Raises:
        InvalidRequestError: An argument is of a wrong kind, the vocabulary lacks a token id, or the replay does not fit.
        ContextLengthError: Prompt and completion are longer than the model's positions.
        UnsupportedError: ``params`` ask for processed values with penalties or a bias, or need a ``replay`` that is not given.
    """
    _check_model(model)
    rule = "must be SamplingParams or None; SamplingParams.from_dict reads a mapping"
    require(params is None or isinstance(params, SamplingParams), "params", params, rule)
    require(replay is None or isinstance(replay, Replay), "replay", replay, "must be a Replay or None")
    prompt, completion = _ids("prompt", prompt), _ids("completion", completion)
    numerics, limit, length = model.numerics, model.config.max_positions, len(prompt) + len(completion)
    check_vocabulary([*prompt, *completion], model.config.vocab_size, len(prompt))
    if length > limit:
        message = f"prompt and completion have {length} tokens, more than the model's {limit} positions; shorten them"
        raise ContextLengthError(message, length=length, limit=limit)
    token_ids, given = [*prompt, *completion[:-1]], None
    if replay is not None:
        check_replay(replay, model.config, len(prompt), len(completion))
        given = replayed_choices([(0, len(token_ids), replay)], model.config, len(token_ids), numerics.device)
    on_one = numerics.deterministic and numerics.device.type == "cpu"
    exact = torch.autocast(numerics.device.type, enabled=False)  # trainers compute their losses in blocks of autocast
    with single_threaded() if on_one else nullcontext(), exact:
        logits = model.logits(model.one_pass(token_ids, given=given)[len(prompt) - 1 :])
        if params is not None and params.logprobs_mode == "processed":
            logits = _processed(logits, params, replay)
        targets = torch.tensor(completion, dtype=torch.int64, device=logits.device)
        return torch.log_softmax(logits, dim=-1).gather(-1, targets[:, None])[:, 0]


def _check_model(model: object) -> None:
    good = isinstance(model, _HasOnePass)
    require(good, "model", type(model), "must be what load_model returns; models of other libraries differ")


def _ids(name: str, given: Any) -> list[int]:
    """Return token ids, which may be a tensor of one dimension; see ``as_integers``."""
    rule, values = "must be a sequence of token ids", given.tolist() if isinstance(given, Tensor) else given
    require(not isinstance(values, (bytes, bytearray, Set)), name, given, rule)
    try:
        ids = list(as_integers(values))
    except TypeError:
        raise InvalidRequestError(f"{name}={shown(given)} {rule}", parameter=name, value=given) from None
    require(len(ids) > 0, name, given, "must not be empty")
    return ids


def _without_effect(params: SamplingParams, name: str, vocab_size: int) -> bool:
    """Return whether a setting that is not the default forbids, truncates and changes nothing."""
    if name == "logit_bias":
        return not any((params.logit_bias or {}).values())
    if name == "allowed_token_ids":
        return set(range(vocab_size)) <= set(params.allowed_token_ids or ())
    return name in _FILTERS and (params.greedy_sampling or (name == "top_k" and params.top_k >= vocab_size))


def _processed(logits: Tensor, params: SamplingParams, replay: Replay | None) -> Tensor:
    """Return the logits of the distribution that ``params`` sample from, float32 [C, V]."""
    neutral, kept = SamplingParams(), None
    if replay is not None:
        kept = replay.kept(0, len(logits), logits.shape[1])
    for name in (*_EDITS, *(_TRUNCATIONS if kept is None else ())):
        if getattr(params, name) != getattr(neutral, name) and not _without_effect(params, name, logits.shape[1]):
            raise UnsupportedError(
                f"{name}={getattr(params, name)!r}: a trainer's forward pass applies only the temperature and the replay of a "
                "rollout with return_replay=True; score() applies all settings but structured_outputs"
            )
    if kept is not None:
        logits = logits.masked_fill(~kept.to(logits.device), float("-inf"))
    if params.greedy_sampling:
        return logits
    temperature = min(max(params.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)
    top = logits.detach().amax(-1, keepdim=True)
    return scale(logits, top, torch.full_like(top, temperature))
