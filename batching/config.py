"""What an engine is told at start: checked once, never completed later."""

from dataclasses import dataclass
from typing import Final, Literal

BLOCK_SIZE: Final = 32
DEFAULT_NUM_BLOCKS: Final = 1024

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDTypeName = Literal["auto", "float32", "bfloat16"]
CpuPrecision = Literal["exact", "fast", "fastest"]
NativeMode = Literal["auto", "off", "require"]
DeviceName = Literal["auto", "cpu", "gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits within which the scheduler plans a step.

    Counts are tokens unless the name says otherwise.  `max_model_len` bounds prompt and
    output of one request together; a request never holds more than the whole pool.
    `max_draft_tokens` bounds what is guessed for one request in a step (0 is nothing), and
    `max_drafting_rows` the tokens that decodes and their drafts make together: beyond it more
    rows cost more than right guesses save.

    Raises:
        ValueError: a limit is out of range, or two of them contradict each other.
    """

    num_blocks: int = DEFAULT_NUM_BLOCKS
    block_size: int = BLOCK_SIZE
    max_num_seqs: int = 8
    max_batched_tokens: int = 512
    prefill_chunk: int = 256
    max_model_len: int = DEFAULT_NUM_BLOCKS * BLOCK_SIZE
    enable_prefix_cache: bool = True
    aging_rate: float = 0.1
    max_draft_tokens: int = 0
    max_drafting_rows: int = 8

    def __post_init__(self) -> None:
        for name in (
            "num_blocks",
            "block_size",
            "max_num_seqs",
            "max_batched_tokens",
            "prefill_chunk",
            "max_model_len",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running request reads one token a step"
            )
        if not self.aging_rate > 0:
            raise ValueError(f"aging_rate must be above 0, not {self.aging_rate}")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens must not be below 0, as {self.max_draft_tokens} is")

    @property
    def max_request_tokens(self) -> int:
        """The most tokens, prompt and output together, that one request can hold."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One served model: which, where, and within which limits.

    `num_blocks=None` sizes the pool from `memory_fraction` of what the device reports;
    `max_model_len=None` takes the model's own context.  A step that takes longer than
    `step_timeout` seconds has stalled.
    """

    model: str
    model_id: str
    max_num_seqs: int = 8
    num_blocks: int | None = DEFAULT_NUM_BLOCKS
    block_size: int = BLOCK_SIZE
    max_batched_tokens: int = 512
    prefill_chunk: int = 256
    max_stall_ms: float = 250.0
    step_timeout: float = 120.0
    trust_remote_code: bool = False
    enable_prefix_cache: bool = True
    aging_rate: float = 0.1
    max_draft_tokens: int = 7
    max_model_len: int | None = None
    memory_fraction: float = 0.5
    dtype: DTypeName = "auto"
    kv_cache_dtype: KVCacheDTypeName = "auto"
    device: DeviceName = "auto"
    native: NativeMode = "auto"
    cpu_precision: CpuPrecision = "exact"
    cpu_threads: int | None = None

    def __post_init__(self) -> None:
        self.scheduler_config(
            1 if self.num_blocks is None else self.num_blocks,
            1 if self.max_model_len is None else self.max_model_len,
        )
        if not 0 < self.memory_fraction < 1:
            raise ValueError(f"memory_fraction must be within (0, 1), not {self.memory_fraction}")
        if not self.max_stall_ms > 0:
            raise ValueError(f"max_stall_ms must be above 0, not {self.max_stall_ms}")
        if not self.step_timeout > 0:
            raise ValueError(f"step_timeout must be above 0, not {self.step_timeout}")

    def scheduler_config(self, num_blocks: int, model_context: int) -> SchedulerConfig:
        """Fill in what only the loaded model and the device could tell."""
        return SchedulerConfig(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            prefill_chunk=self.prefill_chunk,
            max_model_len=model_context
            if self.max_model_len is None
            else min(self.max_model_len, model_context),
            enable_prefix_cache=self.enable_prefix_cache,
            aging_rate=self.aging_rate,
            max_draft_tokens=self.max_draft_tokens,
        )
