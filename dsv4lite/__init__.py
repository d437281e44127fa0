"""Embeddable inference for DeepSeek models: in-process, exact, fast and small.

Names are loaded when they are first used: ``import dsv4lite`` itself imports nothing and touches nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4lite.api.blocking import Completions as Completions
    from dsv4lite.api.blocking import Stream as Stream
    from dsv4lite.api.blocking import WeightUpdate as WeightUpdate
    from dsv4lite.api.jsonl import FileReport as FileReport
    from dsv4lite.api.streams import AsyncCompletions as AsyncCompletions
    from dsv4lite.api.streams import AsyncStream as AsyncStream
    from dsv4lite.api.update import AsyncWeightUpdate as AsyncWeightUpdate
    from dsv4lite.config import MTP as MTP
    from dsv4lite.config import DSpark as DSpark
    from dsv4lite.config import EngineConfig as EngineConfig
    from dsv4lite.config import LoadProgress as LoadProgress
    from dsv4lite.config import NGram as NGram
    from dsv4lite.config import Speculator as Speculator
    from dsv4lite.config import tiny_model as tiny_model
    from dsv4lite.engine.contract import ExecutionContract as ExecutionContract
    from dsv4lite.engine.engine import EngineStats as EngineStats
    from dsv4lite.errors import CapacityError as CapacityError
    from dsv4lite.errors import CheckpointError as CheckpointError
    from dsv4lite.errors import ConfigError as ConfigError
    from dsv4lite.errors import ContextLengthError as ContextLengthError
    from dsv4lite.errors import DSV4LiteError as DSV4LiteError
    from dsv4lite.errors import EngineDeadError as EngineDeadError
    from dsv4lite.errors import EngineStateError as EngineStateError
    from dsv4lite.errors import InvalidRequestError as InvalidRequestError
    from dsv4lite.errors import QueueFullError as QueueFullError
    from dsv4lite.errors import RequestFailedError as RequestFailedError
    from dsv4lite.errors import UnsupportedError as UnsupportedError
    from dsv4lite.errors import WeightsNotLoadedError as WeightsNotLoadedError
    from dsv4lite.errors import WeightUpdateError as WeightUpdateError
    from dsv4lite.llm import LLM as LLM
    from dsv4lite.llm import AsyncLLM as AsyncLLM
    from dsv4lite.planning.memory import MemoryPlan as MemoryPlan
    from dsv4lite.planning.memory import plan_memory as plan_memory
    from dsv4lite.request import CompletionOutput as CompletionOutput
    from dsv4lite.request import Delta as Delta
    from dsv4lite.request import Logprobs as Logprobs
    from dsv4lite.request import Phase as Phase
    from dsv4lite.request import Replay as Replay
    from dsv4lite.request import RequestOutput as RequestOutput
    from dsv4lite.request import Row as Row
    from dsv4lite.request import SamplingParams as SamplingParams
    from dsv4lite.request import Timing as Timing
    from dsv4lite.request import Usage as Usage
    from dsv4lite.request import WeightSource as WeightSource
    from dsv4lite.speculation.speculator import SpeculationStats as SpeculationStats
    from dsv4lite.text.parse import ToolCall as ToolCall
    from dsv4lite.text.structured import StructuredOutputs as StructuredOutputs
    from dsv4lite.text.tokenizer import Tokenizer as Tokenizer
    from dsv4lite.training import completion_logprobs as completion_logprobs
    from dsv4lite.training import execution_contract as execution_contract
    from dsv4lite.training import load_model as load_model
    from dsv4lite.weights.delta import DeltaSource as DeltaSource
    from dsv4lite.weights.shared import IPCSource as IPCSource
    from dsv4lite.weights.shared import SharedWeights as SharedWeights
    from dsv4lite.weights.update import DiskSource as DiskSource
    from dsv4lite.weights.update import ModuleSource as ModuleSource
    from dsv4lite.weights.update import NamedTensors as NamedTensors
    from dsv4lite.weights.update import ProcessGroupSource as ProcessGroupSource
    from dsv4lite.weights.update import broadcast_weights as broadcast_weights

_HOME = {
    name: f"dsv4lite.{module}"
    for module, names in {
        "llm": "AsyncLLM LLM",
        "api.streams": "AsyncStream AsyncCompletions",
        "api.blocking": "Stream Completions WeightUpdate",
        "api.update": "AsyncWeightUpdate",
        "api.jsonl": "FileReport",
        "config": "EngineConfig LoadProgress tiny_model MTP DSpark NGram Speculator",
        "request": "SamplingParams RequestOutput CompletionOutput Delta Logprobs Replay Row Usage Timing Phase WeightSource",
        "text.structured": "StructuredOutputs",
        "text.parse": "ToolCall",
        "text.tokenizer": "Tokenizer",
        "weights.update": "NamedTensors ModuleSource DiskSource ProcessGroupSource broadcast_weights",
        "weights.shared": "IPCSource SharedWeights",
        "weights.delta": "DeltaSource",
        "planning.memory": "MemoryPlan plan_memory",
        "training": "load_model completion_logprobs execution_contract",
        "engine.contract": "ExecutionContract",
        "engine.engine": "EngineStats",
        "speculation.speculator": "SpeculationStats",
        "errors": "DSV4LiteError ConfigError UnsupportedError InvalidRequestError ContextLengthError QueueFullError "
        "EngineStateError WeightsNotLoadedError CheckpointError WeightUpdateError CapacityError RequestFailedError EngineDeadError",
    }.items()
    for name in names.split()
}
_WITH_TORCH = ("engine", "planning", "text.structured", "training", "weights")  # whose import needs torch
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("dsv4lite")
    if name not in _HOME:
        raise AttributeError(f"module 'dsv4lite' has no attribute {name!r}")
    if _HOME[name].removeprefix("dsv4lite.").startswith(_WITH_TORCH):
        import_module("dsv4lite.bare").import_torch()
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
