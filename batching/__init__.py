"""Continuous batching on MLX: tokens in, tokens out.  This is all that `app` may use."""

from batching.config import EngineConfig
from batching.engine_thread import EngineThread, TokenStream
from batching.errors import (
    ContextLengthExceeded,
    EmptyPrompt,
    EngineError,
    EngineStopped,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    RequestError,
    RequestFailed,
)
from batching.loaded_engine import LoadedEngine
from batching.model_info import ModelInfo, Tokenizer
from batching.priority_queue import Priority
from batching.request import FinishReason, SamplingParams, TokenOutput
from batching.scheduler import SchedulerStats
from batching.scheduler_manager import SchedulerManager

__all__ = [
    "ContextLengthExceeded",
    "EmptyPrompt",
    "EngineConfig",
    "EngineError",
    "EngineStopped",
    "EngineThread",
    "FinishReason",
    "InvalidRequest",
    "LoadedEngine",
    "ModelInfo",
    "ModelLoadError",
    "ModelNotFound",
    "Priority",
    "RequestError",
    "RequestFailed",
    "SamplingParams",
    "SchedulerManager",
    "SchedulerStats",
    "TokenOutput",
    "TokenStream",
    "Tokenizer",
]
