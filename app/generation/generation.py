"""A running request: turns the engine's tokens into events for each choice, and counts usage."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from app.admission.admitted_request import AdmittedRequest
from app.generation.choice import Choice, ChoiceFinishReason, Delta, TokenWithLogprob
from app.generation.job import GenerationJob
from app.observability.request_record import TokenUsage
from app.parsing.events import MessageEvent, join_pieces
from batching import DeadlineExceeded, FinishReason, SequenceStats, TokenLogprobs, TokenStream


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """How many tokens of a prompt are prefilled; `elapsed` is in seconds since the request arrived."""

    index: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_prefilled_tokens: int
    elapsed: float


class PrefillProgress:
    """The progress of one prompt's prefill, which never goes back (a preempted request starts over)."""

    def __init__(self) -> None:
        self._num_reported: int | None = None

    def reports(self, num_cached: int, num_prefilled: int) -> Iterator[int]:
        """Yield the token counts to report for an output of the engine, each at most once."""
        for number in (num_cached, num_prefilled):
            if self._num_reported is None or number > self._num_reported:
                self._num_reported = number
                yield number


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One complete choice.

    events: its content, reasoning and tool calls.
    tokens: with log probabilities, if those were requested.
    mean_logprob: over all tokens, the final one included, if log probabilities were requested; `best_of`
        ranks choices by it.
    stop: the stop string that ended it; None if none did.
    """

    index: int
    events: Sequence[MessageEvent]
    token_ids: Sequence[int]
    tokens: Sequence[TokenWithLogprob]
    prompt_logprobs: Sequence[TokenLogprobs]
    finish_reason: ChoiceFinishReason
    mean_logprob: float = 0.0
    stop: str | None = None


class GenerationTask(Protocol):
    """A job in progress whose choices are returned when they are complete.

    `close` aborts what is unfinished.  It never waits, and may be called at any time and repeatedly.
    """

    @property
    def summary(self) -> "GenerationSummary": ...

    async def collect(self) -> Sequence[ChoiceResult]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class GenerationSummary:
    """The counts of the request as a whole; final once its last choice has ended."""

    usage: TokenUsage
    sequences: Sequence[SequenceStats]


class Generation:
    """The events of all choices of a request: an async iterator of Delta and PromptProgress.

    The choices of a prompt have consecutive indices.  Iteration ends after the last choice's Delta with a
    finish reason, and raises the error if the engine fails or the deadline passes.  `close()` aborts
    unfinished choices and logs the request; it never waits, and may be called at any time and repeatedly.
    """

    def __init__(
        self,
        job: GenerationJob,
        tokens: TokenStream,
        choices: Sequence[Choice],
        request: AdmittedRequest,
    ) -> None:
        """Turn the tokens of a stream into events; `choices[i]` is sequence i of the stream.

        request: its reserved prompt tokens are released as prompts are prefilled; `close` finishes it,
            and is called at the latest when the request ends.
        """
        self._job = job
        self._tokens = tokens
        self._choices = choices
        self._request = request
        # Of the prompts that are computed.
        self._num_cached_tokens: dict[int, int] = {}
        self._prompt_logprobs: list[Sequence[TokenLogprobs]] = [()] * len(job.specs)
        self._reasons: dict[int, ChoiceFinishReason] = {}
        self._failure: str | None = None
        self._is_held_back = False
        self._pending: deque[Delta | PromptProgress] = deque()
        self._progress = [PrefillProgress() for _ in job.specs]
        request.held.callback(self.close)

    @property
    def num_choices(self) -> int:
        """The number of choices of all prompts together."""
        return len(self._choices)

    @property
    def usage(self) -> TokenUsage:
        """The token counts so far; final after the last Delta."""
        if self._is_held_back:
            # Tokens that are held back count, whatever ends the request.
            num_output_tokens = sum(stats.num_output_tokens for stats in self._tokens.sequences)
        else:
            num_output_tokens = sum(choice.num_tokens for choice in self._choices)
        return TokenUsage(
            num_prompt_tokens=self._job.num_prompt_tokens,
            num_image_tokens=self._job.num_image_tokens,
            num_cached_tokens=sum(self._num_cached_tokens.values()),
            written_tokens=self._job.written_tokens(self._num_cached_tokens),
            num_output_tokens=num_output_tokens,
            num_reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self._choices),
        )

    @property
    def summary(self) -> GenerationSummary:
        return GenerationSummary(self.usage, self._tokens.sequences)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta | PromptProgress:
        try:
            while not self._pending:
                self._pending += await self._next()
            return self._pending.popleft()
        except StopAsyncIteration:
            raise
        except Exception as error:
            self._failure = "timeout" if isinstance(error, DeadlineExceeded) else "failed"
            raise

    async def collect(self) -> list[ChoiceResult]:
        """Wait until all choices are complete and return them."""
        if not any(choice.looks_at_each_token for choice in self._choices):
            self._is_held_back = True
            self._tokens.hold_back()
        deltas: list[list[Delta]] = [[] for _ in self._choices]
        async for item in self:
            assert isinstance(item, Delta), "progress is reported in streams only"
            deltas[item.index].append(item)
        return [self._result(index, parts) for index, parts in enumerate(deltas)]

    def close(self) -> None:
        """Abort unfinished choices, release the request's ticket, and report its record, once."""
        self._tokens.close()
        self._request.finish(
            completion_id=self._job.completion_id,
            model_id=self._job.model_id,
            stats=self._tokens.sequences,
            usage=self.usage,
            outcome=self._outcome(),
        )

    async def _next(self) -> Sequence[Delta | PromptProgress]:
        """Return the events of the engine's next output; there may be none."""
        index, output = await anext(self._tokens)
        prompt_index, choice_index = divmod(index, self._job.spec.num_choices)
        if choice_index == 0:
            self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        if not output.token_ids:
            return self._reports(index, output.num_cached_tokens, output.num_read_tokens)
        delta = self._choices[index].feed(output)
        reports: list[PromptProgress] = []
        if delta.is_first and choice_index == 0:
            self._request.ticket.release_tokens(len(self._job.specs[prompt_index].prompt))
            self._prompt_logprobs[prompt_index] = delta.prompt_logprobs
            if self._job.spec.reports_progress:
                num_prompt_tokens = len(self._job.specs[prompt_index].prompt)
                reports = self._reports(index, output.num_cached_tokens, num_prompt_tokens)
        elif delta.is_first:
            # Log probabilities of a prompt come with its first choice, which is the first to come.
            delta = replace(delta, prompt_logprobs=self._prompt_logprobs[prompt_index])
        if delta.finish_reason is not None:
            self._reasons[index] = delta.finish_reason
            # To the engine, ending at a call is ending at a stop string.
            has_calls = delta.finish_reason is FinishReason.TOOL_CALLS
            self._tokens.finish(index, FinishReason.STOP if has_calls else delta.finish_reason)
        return [*reports, delta]

    def _reports(self, index: int, num_cached: int, num_prefilled: int) -> list[PromptProgress]:
        prompt_index = index // self._job.spec.num_choices
        num_prompt_tokens = len(self._job.specs[prompt_index].prompt)
        elapsed = self._request.deadline.elapsed()
        return [
            PromptProgress(index, num_prompt_tokens, num_cached, number, elapsed)
            for number in self._progress[prompt_index].reports(num_cached, num_prefilled)
        ]

    def _result(self, index: int, deltas: Sequence[Delta]) -> ChoiceResult:
        return ChoiceResult(
            index,
            join_pieces([event for delta in deltas for event in delta.events]),
            [token_id for delta in deltas for token_id in delta.token_ids],
            [token for delta in deltas for token in delta.tokens],
            [logprobs for delta in deltas for logprobs in delta.prompt_logprobs],
            self._reasons[index],
            self._choices[index].mean_logprob,
            deltas[-1].stop,
        )

    def _outcome(self) -> str:
        if self._failure is not None:
            return self._failure
        if len(self._reasons) < len(self._choices):
            return "aborted"
        return ",".join(sorted(set(self._reasons.values())))
