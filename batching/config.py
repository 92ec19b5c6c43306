"""The configuration of an engine: frozen dataclasses that are validated when they are made."""

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Final, Literal

from batching.model_info.sampling_defaults import NO_DEFAULTS, SamplingDefaults

BLOCK_SIZE: Final = 32
DEFAULT_NUM_BLOCKS: Final = 1024
DEFAULT_MAX_STALL_MS: Final = 250.0
UNKNOWN_CONTEXT: Final = 4096

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDTypeName = Literal["auto", "float32", "bfloat16", "int8"]
CpuPrecision = Literal["auto", "exact"]
NativeMode = Literal["auto", "off", "require"]
GpuKernelsMode = Literal["auto", "off", "require"]
DeviceName = Literal["auto", "cpu", "gpu"]
GenerationConfigSource = Literal["auto", "openai"]
Pooling = Literal["auto", "last", "mean", "cls", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits of a step that hold for any model and device.

    block_size: tokens in a KV block.
    max_num_seqs: the most requests that run at once.
    max_num_batched_tokens: the most tokens in one step.
    prefill_chunk: the most prompt tokens of one request in one step.
    enable_prefix_cache: whether requests with a common prefix share blocks.
    aging_rate: priority classes that a waiting request climbs per second.
    max_urgent_wait_ms: milliseconds after which running requests of a lower class make way for a waiting
        one; None never stops a running request, apart from best-effort ones.
    max_draft_tokens: the most tokens drafted for one request in a step; 0 turns drafts off.
    max_adapters: the most adapters in the memory of the device; 0 serves none.

    Raises:
        ValueError: a limit is out of range, or two of them contradict each other.
    """

    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    prefill_chunk: int = 256
    enable_prefix_cache: bool = True
    aging_rate: float = 0.1
    max_urgent_wait_ms: float | None = 500.0
    max_draft_tokens: int = 7
    max_adapters: int = 0

    def __post_init__(self) -> None:
        _check_minimum(self, "block_size", "max_num_seqs", "prefill_chunk")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running request reads one token a step"
            )
        _check_not_below_zero(self, "max_draft_tokens", "max_adapters")
        _check_above_zero(self, "aging_rate", "max_urgent_wait_ms")

    @property
    def max_urgent_wait(self) -> float:
        """`max_urgent_wait_ms` in seconds; infinite if it is None."""
        return inf if self.max_urgent_wait_ms is None else self.max_urgent_wait_ms / 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(BatchLimits):
    """The scheduler's limits, including those that depend on the loaded model and on its pool.

    num_blocks: KV blocks in the pool.
    max_model_len: the most tokens of one request, prompt and output together.
    max_drafting_rows: the most tokens that all decodes and their drafts may have together in a step;
        beyond it, more rows cost more time than correct drafts save.
    num_checkpoints: recurrent states that the prefix cache keeps; None if the model has no such state.
    window: how many of the last tokens sliding-window layers attend to, if those layers have a pool of
        their own with `num_window_blocks` blocks; None if there are no such layers or they share the
        blocks of the others.
    min_copied_tokens: a request may start in the middle of a block, on a copy of a cached block that
        has at least this many tokens in common with it; None starts at block boundaries only.
    max_image_rows: rows of encoded images that are kept for requests with equal images.
    num_image_pieces: how many pieces the encoding of an image has, between which steps may end.
    max_span: the most tokens that see each other, which no step may cut; 0 if the model has no such.
    reads_whole: all tokens of a prompt see each other, so that it is read in one step, however long it is.

    Raises:
        ValueError: a limit is out of range, or two of them contradict each other.
    """

    num_blocks: int = DEFAULT_NUM_BLOCKS
    max_model_len: int = DEFAULT_NUM_BLOCKS * BLOCK_SIZE
    max_draft_tokens: int = 0
    max_drafting_rows: int = 8
    num_checkpoints: int | None = None
    window: int | None = None
    num_window_blocks: int = 0
    min_copied_tokens: int | None = None
    max_image_rows: int = 0
    num_image_pieces: int = 1
    max_span: int = 0
    reads_whole: bool = False

    def __post_init__(self) -> None:
        BatchLimits.__post_init__(self)
        _check_minimum(self, "num_blocks", "max_model_len", "window", "min_copied_tokens")
        _check_minimum(self, "num_image_pieces")
        if self.max_span > self.least_prompt_tokens:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) leaves {self.least_prompt_tokens} "
                f"tokens of a step to prompts, and {self.max_span} of an image see each other"
            )
        if self.window is not None:
            minimum = blocks_held(self.window, self.block_size) + self.num_blocks_in_span
            if self.num_window_blocks < minimum:
                raise ValueError(
                    f"num_window_blocks must be at least {minimum}, not {self.num_window_blocks}: "
                    "what one request sees must fit"
                )
        _check_not_below_zero(self, "num_checkpoints")

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that one request can have in this pool."""
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def least_prompt_tokens(self) -> int:
        """How many tokens of a step a prompt can have beside any decodes."""
        rows = self.max_num_seqs + self.max_drafting_rows
        return max(0, self.max_num_batched_tokens - rows)

    @property
    def num_blocks_in_chunk(self) -> int:
        """How many blocks the chunk of one prompt fills in a step."""
        chunk = min(self.prefill_chunk, self.max_num_batched_tokens)
        return max(self.num_blocks_in_span, -(-chunk // self.block_size))

    @property
    def num_blocks_in_span(self) -> int:
        """How many blocks the tokens fill that no step may cut."""
        return -(-self.max_span // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(BatchLimits):
    """The model of one engine, its device and its limits; see also `BatchLimits`.

    model: the bundled model's name, a `.gguf` file, a model directory, or a hub id.
    model_id: the name that clients use.
    num_blocks: KV blocks of the pool; the model is not loaded if they do not fit.  None takes up to
        `max_blocks`, as many as fit in free memory; if that is None as well, as many as fit in
        `memory_fraction` of the device's memory, weights included.
    max_stall_ms: the most milliseconds that prefill or an image may add to a step of running requests.
    step_timeout: seconds after which a step counts as stalled.
    chat_template: replaces the model's own; None keeps that.
    max_model_len: the most tokens of a request; it can only lower the context that a model declares,
        and sets it where a model declares none.  None is the declared context.
    state_cache_mib: the most MiB of recurrent states in the prefix cache; None is an eighth of the free
        memory.
    vision_cache_mib: the most MiB of encoded images that are kept for requests with equal ones.
    dtype: the type of the weights; `auto` keeps them as stored, except on a CPU without native kernels.
    kv_cache_dtype: the type of keys and values.
    generation_config: whether the model's recommended sampling parameters are the defaults.
    sampling_defaults: further defaults, which outrank the model's.
    max_memory_gib: the most GiB of all models of the process; None is what the device has.
    memory_budget: the bytes that are reserved for this model; None is what is free.
    pooling: how embeddings are made; `auto` follows the model's files, `off` makes none.
    rerank_template: the prompt template of a reranker that does not declare itself as one.
    rerank_tokens: its tokens for an irrelevant and a relevant document, separated by a comma.
    native: whether the native CPU kernels are used; `require` fails without them.
    cpu_precision: whether these round activations, keys and values.
    cpu_threads: the number of their threads; None follows the number of cores.
    gpu_kernels: whether the kernels of this project read and write the pool of a GPU.
    async_scheduling: queue a step while the previous one runs, where the pool allows it.
    weights_cache_dir: the folder of packed weights; None is a folder beside the hub's cache.
    weights_cache_gib: the most GiB of packed weights in that folder; 0 keeps none.
    kv_cache_dir: the folder in which keys and values outlive the pool; None keeps none.
    kv_cache_gib: the most GiB of that folder.
    kv_cache_max_write_gib_per_day: the most GiB that are written to it in a day; None is no limit.
    kv_host_gib: the most GiB of keys and values that stay in the host's memory when the pool evicts them.
    max_adapter_rank: the largest rank of an adapter.
    mlx_cache_mib: MiB of freed buffers that MLX keeps on a GPU.
    wired_limit_mib: MiB that are wired on a Mac; None is the weights and the KV pool.

    Raises:
        ValueError: a value is out of range, or two of them contradict each other.
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
    vision_cache_mib: int = 512
    dtype: DTypeName = "auto"
    kv_cache_dtype: KVCacheDTypeName = "auto"
    device: DeviceName = "auto"
    generation_config: GenerationConfigSource = "auto"
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    max_memory_gib: float | None = None
    memory_budget: int | None = None
    pooling: Pooling = "auto"
    rerank_template: str | None = None
    rerank_tokens: str | None = None
    native: NativeMode = "auto"
    cpu_precision: CpuPrecision = "auto"
    cpu_threads: int | None = None
    async_scheduling: bool = True
    weights_cache_dir: Path | None = None
    weights_cache_gib: int = 64
    gpu_kernels: GpuKernelsMode = "off"
    kv_cache_dir: Path | None = None
    kv_cache_gib: float = 32.0
    kv_cache_max_write_gib_per_day: float | None = None
    kv_host_gib: float = 0.0
    max_adapter_rank: int = 32
    mlx_cache_mib: int = 1024
    wired_limit_mib: int | None = None

    def __post_init__(self) -> None:
        BatchLimits.__post_init__(self)
        _check_minimum(self, "num_blocks", "max_blocks", "max_model_len", "cpu_threads")
        _check_minimum(self, "max_adapter_rank")
        _check_not_below_zero(self, "weights_cache_gib", "state_cache_mib", "vision_cache_mib")
        _check_not_below_zero(self, "mlx_cache_mib", "wired_limit_mib")
        _check_above_zero(self, "max_stall_ms", "step_timeout")
        if not 0 < self.memory_fraction < 1:
            raise ValueError(f"memory_fraction must be within (0, 1), not {self.memory_fraction}")

    def model_context(self, declared: int | None) -> int:
        """Return the context length in tokens: the declared one, else `max_model_len`, else a default."""
        return declared or self.max_model_len or UNKNOWN_CONTEXT

    def scheduler_config(self, num_blocks: int, model_context: int) -> SchedulerConfig:
        """Return the scheduler's limits for a pool and the context length of the model, in tokens."""
        limits = {field.name: getattr(self, field.name) for field in fields(BatchLimits)}
        max_model_len = min(self.max_model_len or model_context, model_context)
        return SchedulerConfig(**limits, num_blocks=num_blocks, max_model_len=max_model_len)


def blocks_in_window(window: int, block_size: int) -> int:
    """Return how many full blocks before its own block a token may attend to.

    That covers one token more than the window, which the masks of some models show.
    """
    return -(-window // block_size)


def blocks_held(window: int, block_size: int) -> int:
    """Return how many blocks a request longer than the window holds between two steps."""
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
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be above 0, not {value}")
