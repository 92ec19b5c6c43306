"""Continuous batching on MLX: tokens in, tokens out.  This is all that `app` may use."""

from batching.config import EngineConfig
from batching.constraints.grammar import (
    GrammarCompiler,
    GrammarText,
    InvalidGrammar,
    choice_grammar,
    json_object_grammar,
    json_rule,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from batching.constraints.protocol import AllowedTokens, TokenConstraint
from batching.engine.engine_thread import EngineThread
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.token_stream import TokenStream
from batching.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EmptyPrompt,
    EngineError,
    EngineStalled,
    EngineStopped,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    RequestError,
    RequestFailed,
)
from batching.model_info import ModelInfo, SamplingDefaults, Tokenizer
from batching.observer import EngineObserver, Observers, SequenceStats, StepRecord
from batching.priority_queue import Priority
from batching.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from batching.scheduler_manager import SchedulerManager
from batching.scheduling.stats import SchedulerStats

__all__ = [
    "AllowedTokens",
    "ContextLengthExceeded",
    "DeadlineExceeded",
    "EmptyPrompt",
    "EngineConfig",
    "EngineError",
    "EngineObserver",
    "EngineStalled",
    "EngineStopped",
    "EngineThread",
    "FinishReason",
    "GrammarCompiler",
    "GrammarText",
    "InvalidGrammar",
    "InvalidRequest",
    "LoadedEngine",
    "ModelInfo",
    "ModelLoadError",
    "ModelNotFound",
    "Observers",
    "Priority",
    "RequestError",
    "RequestFailed",
    "SamplingDefaults",
    "SamplingParams",
    "SchedulerManager",
    "SchedulerStats",
    "SequenceStats",
    "StepRecord",
    "TokenConstraint",
    "TokenLogprobs",
    "TokenOutput",
    "TokenStream",
    "Tokenizer",
    "choice_grammar",
    "json_object_grammar",
    "json_rule",
    "json_schema_grammar",
    "lark_grammar",
    "regex_grammar",
]
