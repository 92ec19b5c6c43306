"""The inference engine: continuous batching over a paged KV cache, with token ids in and token ids out.

`app` imports only what this module exports.  Text, HTTP and JSON are the concern of `app`; tensors and
MLX are the concern of `batching.backend`, which is imported only when the first model is loaded.
"""

from batching.adapters.files.adapter_file import AdapterFile
from batching.adapters.files.references import resolve_adapter
from batching.adapters.files.registry import ServedAdapter
from batching.backend_calls.build import Build
from batching.backend_calls.export import export_gguf
from batching.backend_calls.machine import Machine, report_backend, this_machine
from batching.backend_calls.ranked_model import build_ranked_engine, fetch_model, run_member
from batching.block_store.inventory import (
    CacheInUse,
    CheckedFile,
    StoredCache,
    check_caches,
    delete_cache,
    stored_bytes,
    stored_caches,
)
from batching.config import EngineConfig
from batching.constraints.gbnf import gbnf_grammar
from batching.constraints.grammar_text import (
    GrammarText,
    choice_grammar,
    json_object_grammar,
    json_rule,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)
from batching.constraints.lark_pattern import lark_pattern
from batching.constraints.lark_process import NotRegular, literal_pattern
from batching.constraints.protocol import AllowedTokens, Constraint
from batching.constraints.thinking import ThinkingBudget, ThinkingLimit
from batching.engine.async_engine import AsyncEngine
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.memory_use import MemoryUse
from batching.engine.request_checks import check_generates, check_input, check_token_ids
from batching.engine.streams.stream_router import NOT_IN_USE, AdaptersInUse
from batching.engine.streams.token_stream import TokenStream
from batching.errors import (
    AdapterError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClosed,
    EngineError,
    EngineStalled,
    EngineStopped,
    InputTooLong,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    ModelTooLarge,
    PoolTooLarge,
    RankLost,
    RankRefused,
    RanksEnded,
    RequestError,
    RequestFailed,
    SlowReader,
    UnsupportedKVDType,
)
from batching.fit.estimate import MemoryEstimate, estimate
from batching.fit.weights import Compute
from batching.host.backend_report import BackendReport
from batching.inputs.images import ImageInput, PlacedImage
from batching.inputs.rerank_templates import RERANK_TEMPLATES
from batching.inputs.retention import (
    NOT_RETAINED,
    NOT_STORED,
    PINNED,
    RetainedPrefix,
    Retention,
)
from batching.inputs.sampling_params import DryParams, SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.kv_cache.cache_events import (
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheEventSink,
)
from batching.media.image_decoder import ImageDecoder, Pixels, TooManyPixels, UnreadableImage
from batching.media.image_processor import ImageProcessor, ProcessorFailed, UnfitImage
from batching.media.pdf_reader import PdfReader, TooManyPages, TooMuchText, UnreadablePdf
from batching.model_files.description import ModelDescription, describe, outline, read_config
from batching.model_files.model_types import served_as
from batching.model_files.references import (
    BUNDLED_MODEL,
    HOW_TO_BUNDLE,
    bundled_file,
    hub_files,
    is_hub_id,
)
from batching.model_files.snapshot import missing_files
from batching.model_files.vision import HOW_TO_SEE
from batching.model_info.model import ModelInfo, Tokenizer
from batching.model_info.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from batching.model_info.vision import NoVision, VisionModel
from batching.models.lease import LeaseRequest
from batching.models.model_status import ModelStatus
from batching.models.needs import local_path, memory_need, vision_on_disk
from batching.models.residency.model_state import MemoryNeed, ModelState
from batching.models.served_model import ServedModel
from batching.pooling import (
    CrossEncoder,
    Embeddings,
    NoEmbeddings,
    PoolingParams,
    PoolingType,
    Reranker,
    Vector,
)
from batching.priority_queue import Priority
from batching.ranks.agreement import agree_with_leader, agree_with_members
from batching.ranks.control_port import CannotJoin, ControlPort
from batching.ranks.heartbeats import TIMEOUT as HEARTBEAT_TIMEOUT
from batching.ranks.leader import TcpLeader
from batching.ranks.member import TcpMember, join_ranks
from batching.ranks.model_digest import model_digest
from batching.ranks.unserved import check_served
from batching.sandbox.interruption import Interruption
from batching.sandbox.sandbox import Sandbox, SandboxExceeded, SandboxLimits, SandboxLost
from batching.scheduler_manager import SchedulerManager
from batching.scheduling.best_effort import QUIET_PERIOD
from batching.scheduling.snapshot import EngineSnapshot, RequestSnapshot
from batching.steps.observer import EngineObserver, NewTokens, Observers, SequenceStats, StepRecord
from batching.steps.stats import SchedulerStats, StoreUse
from batching.steps.token_output import FinishReason, TokenLogprobs, TokenOutput

__all__ = [
    "BUNDLED_MODEL",
    "HEARTBEAT_TIMEOUT",
    "HOW_TO_BUNDLE",
    "HOW_TO_SEE",
    "NOT_IN_USE",
    "NOT_RETAINED",
    "NOT_STORED",
    "NO_DEFAULTS",
    "PINNED",
    "QUIET_PERIOD",
    "RERANK_TEMPLATES",
    "AdapterError",
    "AdapterFile",
    "AdaptersInUse",
    "AllBlocksCleared",
    "AllowedTokens",
    "AsyncEngine",
    "BackendReport",
    "BlocksRemoved",
    "BlocksStored",
    "Build",
    "CacheEvent",
    "CacheEventSink",
    "CacheInUse",
    "CannotJoin",
    "CheckedFile",
    "Compute",
    "Constraint",
    "ContextLengthExceeded",
    "ControlPort",
    "CrossEncoder",
    "DeadlineExceeded",
    "DryParams",
    "Embeddings",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "EngineObserver",
    "EngineSnapshot",
    "EngineStalled",
    "EngineStopped",
    "FinishReason",
    "GrammarText",
    "ImageDecoder",
    "ImageInput",
    "ImageProcessor",
    "InputTooLong",
    "Interruption",
    "InvalidRequest",
    "LeaseRequest",
    "LoadSlices",
    "LoadedEngine",
    "Machine",
    "MemoryEstimate",
    "MemoryNeed",
    "MemoryUse",
    "ModelDescription",
    "ModelInfo",
    "ModelLoadError",
    "ModelNotFound",
    "ModelState",
    "ModelStatus",
    "ModelTooLarge",
    "NewTokens",
    "NoEmbeddings",
    "NoVision",
    "NotRegular",
    "Observers",
    "PdfReader",
    "Pixels",
    "PlacedImage",
    "PoolTooLarge",
    "PoolingParams",
    "PoolingType",
    "Priority",
    "ProcessorFailed",
    "RankLost",
    "RankRefused",
    "RanksEnded",
    "RequestError",
    "RequestFailed",
    "RequestSnapshot",
    "Reranker",
    "RetainedPrefix",
    "Retention",
    "SamplingDefaults",
    "SamplingParams",
    "Sandbox",
    "SandboxExceeded",
    "SandboxLimits",
    "SandboxLost",
    "SchedulerManager",
    "SchedulerStats",
    "SequenceSpec",
    "SequenceStats",
    "ServedAdapter",
    "ServedModel",
    "SlowReader",
    "StepRecord",
    "StoreUse",
    "StoredCache",
    "TcpLeader",
    "TcpMember",
    "ThinkingBudget",
    "ThinkingLimit",
    "TokenLogprobs",
    "TokenOutput",
    "TokenStream",
    "Tokenizer",
    "TooManyPages",
    "TooManyPixels",
    "TooMuchText",
    "UnfitImage",
    "UnreadableImage",
    "UnreadablePdf",
    "UnsupportedKVDType",
    "Vector",
    "VisionModel",
    "agree_with_leader",
    "agree_with_members",
    "build_ranked_engine",
    "bundled_file",
    "check_caches",
    "check_generates",
    "check_input",
    "check_served",
    "check_token_ids",
    "choice_grammar",
    "delete_cache",
    "describe",
    "estimate",
    "export_gguf",
    "fetch_model",
    "gbnf_grammar",
    "hub_files",
    "is_hub_id",
    "join_ranks",
    "json_object_grammar",
    "json_rule",
    "json_schema_grammar",
    "lark_grammar",
    "lark_pattern",
    "literal_pattern",
    "local_path",
    "memory_need",
    "missing_files",
    "model_digest",
    "outline",
    "read_config",
    "regex_grammar",
    "report_backend",
    "resolve_adapter",
    "run_member",
    "served_as",
    "stored_bytes",
    "stored_caches",
    "this_machine",
    "vision_on_disk",
]
