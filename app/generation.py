"""One request, from its tokens to the text, the finish reason and the usage."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Self

from app.detokenizer import Detokenizer
from app.schemas.request import GenerationRequest
from app.schemas.usage import Usage
from app.stop_strings import StopStrings
from batching import EngineError, EngineThread, FinishReason, ModelInfo, TokenOutput, TokenStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of text; the last one has the finish reason."""

    text: str
    finish_reason: FinishReason | None = None


async def generate(
    engine: EngineThread,
    prompt_token_ids: Sequence[int],
    body: GenerationRequest,
    *,
    completion_id: str,
    max_tokens: int | None,
    clock: Callable[[], float] = monotonic,
) -> "Generation":
    """Queue a request; without `max_tokens` it may fill the context.

    Raises:
        RequestError: it can never be served as it is.
        EngineStopped: nobody is there to serve it.
    """
    started = clock()
    tokens = await engine.submit(
        prompt_token_ids,
        sampling=body.sampling_params(),
        max_tokens=max_tokens,
        stop_token_ids=engine.model.eos_token_ids,
        priority=body.queue_priority,
    )
    timing = _Timing(clock, started)
    return Generation(engine.model, tokens, completion_id, len(prompt_token_ids), body.stop, timing)


class _Timing:
    """When the first token came and when all was over, in seconds from the arrival."""

    def __init__(self, clock: Callable[[], float], started: float) -> None:
        self._clock = clock
        self._started = started
        self.first_token: float | None = None

    def mark_token(self) -> None:
        if self.first_token is None:
            self.first_token = self.elapsed()

    def elapsed(self) -> float:
        return self._clock() - self._started


class Generation:
    """The text of one request, as it comes; an async iterator of TextDelta.

    It ends after the delta that carries a finish reason.  `close()` never waits and may be
    called at any time, any number of times: an unfinished request is aborted.  Whoever has
    a generation closes it; that is also when it is logged.
    """

    def __init__(
        self,
        model: ModelInfo,
        tokens: TokenStream,
        completion_id: str,
        num_prompt_tokens: int,
        stops: Sequence[str],
        timing: _Timing,
    ) -> None:
        self._stop_token_ids = model.eos_token_ids
        self._tokens = tokens
        self._completion_id = completion_id
        self._detokenizer = Detokenizer(model.tokenizer)
        self._stop_strings = StopStrings(stops)
        self._timing = timing
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._reason = "aborted"
        self._is_finished = False
        self._is_closed = False

    @property
    def usage(self) -> Usage:
        """The tokens so far; final once the last delta is out."""
        return Usage.of(
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
        )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if self._is_finished:
            raise StopAsyncIteration
        while True:
            try:
                output = await anext(self._tokens)
            except EngineError:
                self._reason = "failed"
                raise
            delta = self._take(output)
            if delta.finish_reason is not None:
                self._is_finished, self._reason = True, delta.finish_reason
                self._tokens.close()
                return delta
            if delta.text:
                return delta

    async def collect(self) -> tuple[str, FinishReason]:
        """Wait for the end and return the whole text."""
        pieces = []
        finish_reason = None
        async for delta in self:
            pieces.append(delta.text)
            finish_reason = delta.finish_reason
        assert finish_reason is not None, "the last delta has one"
        return "".join(pieces), finish_reason

    def close(self) -> None:
        self._tokens.close()
        if self._is_closed:
            return
        self._is_closed = True
        first_token = self._timing.first_token
        logger.info(
            "%s prompt=%d cached=%d output=%d first_token=%s total=%.3fs %s",
            self._completion_id,
            self._num_prompt_tokens,
            self._num_cached_tokens,
            self._num_output_tokens,
            "-" if first_token is None else f"{first_token:.3f}s",
            self._timing.elapsed(),
            self._reason,
        )

    def _take(self, output: TokenOutput) -> TextDelta:
        self._timing.mark_token()
        self._num_cached_tokens = output.num_cached_tokens
        pieces = []
        for token_id in output.token_ids:
            self._num_output_tokens += 1
            if token_id not in self._stop_token_ids:
                pieces.append(self._stop_strings.add(self._detokenizer.add(token_id)))
            if self._stop_strings.is_matched:
                break
        else:
            if output.finish_reason is None:
                return TextDelta("".join(pieces))
            pieces.append(self._stop_strings.add(self._detokenizer.flush()))
            pieces.append(self._stop_strings.flush())
        is_stop = self._stop_strings.is_matched
        return TextDelta("".join(pieces), FinishReason.STOP if is_stop else output.finish_reason)
