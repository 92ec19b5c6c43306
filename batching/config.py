"""What an engine is configured with: checked once, never completed later."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Literal

BLOCK_SIZE: Final = 32
DEFAULT_NUM_BLOCKS: Final = 1024
DEFAULT_MAX_STALL_MS: Final = 250.0
UNKNOWN_CONTEXT: Final = 4096

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDTypeName = Literal["auto", "float32", "bfloat16", "int8"]
CpuPrecision = Literal["auto", "exact", "fast", "fastest"]
NativeMode = Literal["auto", "off", "require"]
GpuKernelsMode = Literal["auto", "off", "require"]
DeviceName = Literal["auto", "cpu", "gpu"]
ShareWeights = Literal["auto", "always", "never"]
GenerationConfigSource = Literal["auto", "openai"]
Pooling = Literal["auto", "last", "mean", "cls", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits of a step that hold for any model and any device; counts are of tokens.

    `max_draft_tokens` bounds what is guessed for one request in a step (0 is nothing).

    Raises:
        ValueError: a limit is out of range, or two of them contradict each other.
    """

    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 8
    max_batched_tokens: int = 512
    prefill_chunk: int = 256
    enable_prefix_cache: bool = True
    aging_rate: float = 0.1
    max_draft_tokens: int = 7

    def __post_init__(self) -> None:
        _check_minimum(self, "block_size", "max_num_seqs", "max_batched_tokens", "prefill_chunk")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running request reads one token a step"
            )
        _check_not_below_zero(self, "max_draft_tokens")
        _check_above_zero(self, "aging_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(BatchLimits):
    """The limits within which the scheduler plans a step, those of the loaded model included.

    `max_model_len` bounds prompt and output of one request together; a request never holds more
    than the whole pool.  `max_drafting_rows` bounds the tokens that decodes and their drafts make
    together: beyond it more rows cost more than right guesses save.  `num_checkpoints` is how many
    recurrent states the prefix cache keeps; None is a model without such states.

    Layers that see no more than the last `window` tokens have `num_window_blocks` blocks of their own;
    None is no such layers, or that they share the blocks of the others.

    A request begins within a block, on a copy of one that has at least `min_copied_tokens` of its
    tokens in common with it; None is that requests begin behind full blocks only.
    """

    num_blocks: int = DEFAULT_NUM_BLOCKS
    max_model_len: int = DEFAULT_NUM_BLOCKS * BLOCK_SIZE
    max_draft_tokens: int = 0
    max_drafting_rows: int = 8
    num_checkpoints: int | None = None
    window: int | None = None
    num_window_blocks: int = 0
    min_copied_tokens: int | None = None

    def __post_init__(self) -> None:
        BatchLimits.__post_init__(self)
        _check_minimum(self, "num_blocks", "max_model_len", "window", "min_copied_tokens")
        if self.window is not None:
            minimum = blocks_held(self.window, self.block_size)
            if self.num_window_blocks < minimum:
                raise ValueError(
                    f"num_window_blocks must be at least {minimum}, not {self.num_window_blocks}: "
                    "what one request sees must fit"
                )
        _check_not_below_zero(self, "num_checkpoints")

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that one request can hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def num_blocks_in_chunk(self) -> int:
        """How many blocks the chunk of one prompt fills in a step."""
        return -(-min(self.prefill_chunk, self.max_batched_tokens) // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(BatchLimits):
    """One served model: which, where, and within which limits.

    The KV pool has `num_blocks` blocks or the model is not loaded.  Without that number it has up
    to `max_blocks`, as far as they fit into what is free; without both it takes
    `memory_fraction` of the device's memory, weights included.  `max_model_len=None` takes the
    model's own context, which a number does not exceed, and `chat_template=None` its own template.
    `state_cache_mib` bounds what the prefix cache keeps of recurrent states; None is an eighth of what is
    free.
    With `async_scheduling` a step is queued while the one before it runs, wherever the pool allows it.
    `pooling` says how embeddings are made, `auto` as the model says.  `rerank_template` and
    `rerank_tokens`, of an irrelevant and of a relevant document with a comma between them, make a
    reranker of a model that does not say that it is one.
    `weights_cache_gib` bounds the packed weights in `weights_cache_dir`, by default a folder beside
    the hub's cache; 0 keeps none.  `gpu_kernels` says whether a GPU's pool is written and read by kernels
    of our own.  On a GPU MLX keeps `mlx_cache_mib` of freed buffers, and on a Mac
    `wired_limit_mib` are wired; None is the weights and the KV pool.  A step that takes longer than `step_timeout` seconds has stalled.
    """

    model: str
    model_id: str
    num_blocks: int | None = None
    max_blocks: int | None = DEFAULT_NUM_BLOCKS
    max_stall_ms: float = DEFAULT_MAX_STALL_MS
    step_timeout: float = 120.0
    trust_remote_code: bool = False
    chat_template: str | None = None
    max_model_len: int | None = None
    memory_fraction: float = 0.5
    state_cache_mib: int | None = None
    dtype: DTypeName = "auto"
    kv_cache_dtype: KVCacheDTypeName = "auto"
    device: DeviceName = "auto"
    generation_config: GenerationConfigSource = "auto"
    pooling: Pooling = "auto"
    rerank_template: str | None = None
    rerank_tokens: str | None = None
    native: NativeMode = "auto"
    cpu_precision: CpuPrecision = "auto"
    cpu_threads: int | None = None
    async_scheduling: bool = True
    weights_cache_dir: Path | None = None
    weights_cache_gib: int = 64
    share_weights: ShareWeights = "auto"
    gpu_kernels: GpuKernelsMode = "auto"
    mlx_cache_mib: int = 1024
    wired_limit_mib: int | None = None

    def __post_init__(self) -> None:
        BatchLimits.__post_init__(self)
        _check_minimum(self, "num_blocks", "max_blocks", "max_model_len", "cpu_threads")
        _check_not_below_zero(self, "weights_cache_gib", "state_cache_mib")
        _check_not_below_zero(self, "mlx_cache_mib", "wired_limit_mib")
        _check_above_zero(self, "max_stall_ms", "step_timeout")
        if not 0 < self.memory_fraction < 1:
            raise ValueError(f"memory_fraction must be within (0, 1), not {self.memory_fraction}")

    def model_context(self, declared: int | None) -> int:
        """Return a model's context: what it declares, or any number that is set where it declares none."""
        return declared or self.max_model_len or UNKNOWN_CONTEXT

    def scheduler_config(self, num_blocks: int, model_context: int) -> SchedulerConfig:
        """Add what only the loaded model and the device determine."""
        limits = {field.name: getattr(self, field.name) for field in fields(BatchLimits)}
        max_model_len = min(self.max_model_len or model_context, model_context)
        return SchedulerConfig(**limits, num_blocks=num_blocks, max_model_len=max_model_len)


def blocks_in_window(window: int, block_size: int) -> int:
    """Return how many full blocks before its own a token may see.

    That is enough for one token more than the window, which the masks of some models show.
    """
    return -(-window // block_size)


def blocks_held(window: int, block_size: int) -> int:
    """Return how many blocks a request longer than the window has between two steps."""
    return blocks_in_window(window, block_size) + 1


def _check_minimum(config: BatchLimits, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")


def _check_not_below_zero(config: BatchLimits, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 0:
            raise ValueError(f"{name} must not be below 0, as {value} is")


def _check_above_zero(config: BatchLimits, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be above 0, not {getattr(config, name)}")
