"""The reports of an engine to its observers, for metrics and logs: each step and each sequence."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from batching.blocks.block_ages import NO_AGES, BlockAges
from batching.priority_queue import Priority
from batching.steps.stats import SchedulerStats
from batching.steps.token_output import FinishReason, TokenOutput

logger = logging.getLogger(__name__)


class StepRecord(NamedTuple):
    """The record of one step.

    ended: when it ended, in seconds on the engine's clock.
    duration: in seconds.
    num_tokens: tokens that the model processed, drafts included.
    num_prompt_tokens: how many of them are prompt tokens.
    stats: the statistics after the step.
    has_failed: the step raised and its requests failed.
    block_ages: how old cached blocks were that were evicted or reused.
    is_idle: the model had nothing to do in it.
    """

    ended: float
    duration: float
    num_tokens: int
    num_prompt_tokens: int
    stats: SchedulerStats
    has_failed: bool = False
    block_ages: BlockAges = NO_AGES
    is_idle: bool = False


@dataclass(slots=True, kw_only=True)
class SequenceStats:
    """The progress of one choice; times are in seconds on the engine's clock.

    scheduled_time: when the first step of its prefill began, None before; choices that share a
        prefill have the same time.
    first_token_time, last_token_time: when the steps ended that sampled these tokens, or that made the
        vector of a request with pooling.
    finish_reason: None until it has ended.
    adapter: the name of its adapter; None if it has none.
    """

    num_prompt_tokens: int
    max_tokens: int
    num_choices: int
    priority: Priority
    arrival_time: float
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    end_time: float | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    adapter: str | None = None

    def record(self, output: TokenOutput, now: float) -> float | None:
        """Record the output of a step that ended at `now`; return the seconds since the previous tokens.

        None if there were none, or if the output only reports progress.
        """
        self.scheduled_time = output.scheduled_time
        self.num_cached_tokens = output.num_cached_tokens
        self.num_preemptions = output.num_preemptions
        if output.is_progress:
            return None
        gap = None if self.last_token_time is None else now - self.last_token_time
        if self.first_token_time is None:
            self.first_token_time = now
        self.last_token_time = now
        self.num_output_tokens += len(output.token_ids)
        return gap


class NewTokens(NamedTuple):
    """The tokens that one step brought to one sequence, or the vector of a request with pooling.

    gap: seconds since the previous tokens; None for the first ones and for a vector.
    """

    sequence: SequenceStats
    num_tokens: int
    gap: float | None


class EngineObserver(Protocol):
    """Observes an engine; its methods are called in the event loop and must not block."""

    def observe_step(self, step: StepRecord) -> None: ...

    def observe_stats(self, stats: SchedulerStats) -> None:
        """Called when the engine becomes idle without a step."""
        ...

    def observe_tokens(self, tokens: Sequence[NewTokens]) -> None:
        """Called once for each step that brought tokens, before `observe_end` of the sequences that end."""
        ...

    def observe_end(self, sequence: SequenceStats) -> None: ...


class Observers:
    """Notifies several observers; an exception in one is logged and affects nothing else."""

    def __init__(self, *observers: EngineObserver) -> None:
        self._observers = observers

    def observe_step(self, step: StepRecord) -> None:
        self._notify(lambda observer: observer.observe_step(step))

    def observe_stats(self, stats: SchedulerStats) -> None:
        self._notify(lambda observer: observer.observe_stats(stats))

    def observe_tokens(self, tokens: Sequence[NewTokens]) -> None:
        self._notify(lambda observer: observer.observe_tokens(tokens))

    def observe_end(self, sequence: SequenceStats) -> None:
        self._notify(lambda observer: observer.observe_end(sequence))

    def _notify(self, call: Callable[[EngineObserver], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception:
                logger.exception("an observer of the engine failed")
