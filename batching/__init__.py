"""Continuous batching on MLX: tokens in, tokens out.  This is all that `app` may use."""

from batching.config import EngineConfig
from batching.constraint import AllowedTokens, TokenConstraint
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
from batching.grammar import (
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
from batching.loaded_engine import LoadedEngine
from batching.model_info import ModelInfo, Tokenizer
from batching.priority_queue import Priority
from batching.request import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from batching.scheduler import SchedulerStats
from batching.scheduler_manager import SchedulerManager

__all__ = [
    "AllowedTokens",
    "ContextLengthExceeded",
    "EmptyPrompt",
    "EngineConfig",
    "EngineError",
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
    "Priority",
    "RequestError",
    "RequestFailed",
    "SamplingParams",
    "SchedulerManager",
    "SchedulerStats",
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
