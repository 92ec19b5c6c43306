"""The stream of tokens that `AsyncEngine.submit` returns."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Final, Self

from batching.errors import DeadlineExceeded, EngineError, SlowReader
from batching.steps.observer import SequenceStats
from batching.steps.token_output import FinishReason, TokenOutput

# Tokens and log probabilities, of which each takes a hundred bytes and more.
_MAX_UNREAD: Final = 1 << 22


class Backlog:
    """Outputs that the streams of an engine hold and their callers have not read, with one limit for all.

    Beyond the limit the stream that holds most ends with SlowReader.  One whose caller reads holds the
    outputs of a step or two.
    """

    def __init__(self, max_unread: int = _MAX_UNREAD) -> None:
        self._max_unread = max_unread
        self._num_unread: dict[TokenStream, int] = {}
        self._total = 0

    def add(self, stream: "TokenStream", number: int) -> None:
        self._num_unread[stream] = self._num_unread.get(stream, 0) + number
        self._total += number
        if self._total > self._max_unread:
            max(self._num_unread, key=self._num_unread.__getitem__).fail(SlowReader())

    def remove(self, stream: "TokenStream", number: int) -> None:
        # One that was closed since is forgotten.
        if stream in self._num_unread:
            self._num_unread[stream] -= number
            self._total -= number

    def forget(self, stream: "TokenStream") -> None:
        """Remove all that a stream holds; it is closed, or has dropped that."""
        self._total -= self._num_unread.pop(stream, 0)


class TokenStream:
    """The tokens of one or more sequences as they are generated.

    An async iterator of (index, TokenOutput).  It ends after the output with a finish reason of the last
    sequence.  If a sequence fails, it aborts the others and raises the error.

    `close()` aborts unfinished sequences.  It never waits, and may be called at any time and repeatedly.

    sequences: the statistics of each sequence so far.
    """

    def __init__(
        self,
        sequences: Sequence[SequenceStats],
        release: Callable[[int, FinishReason], None],
        deadline: float | None = None,
        backlog: Backlog | None = None,
    ) -> None:
        """Make the stream of these sequences; the router fills it with `put`.

        release: ends a sequence in the engine, given its index and the reason.
        deadline: when the stream raises DeadlineExceeded, in seconds on the event loop's clock; None is
            never.
        backlog: counts the unread outputs, except those held back; None is a backlog of its own.
        """
        self.sequences = sequences
        self._backlog = backlog or Backlog()
        self._release = release
        self._deadline = deadline
        self._unfinished = set(range(len(sequences)))
        # The outputs of each sequence that are held back.
        self._held: dict[int, list[TokenOutput]] | None = None
        self._queue: asyncio.Queue[tuple[int, TokenOutput | EngineError]] = asyncio.Queue()
        # One for all tokens; it ends the wait for the next one.
        self._timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(deadline, self.put, 0, DeadlineExceeded())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, TokenOutput]:
        while self._unfinished:
            index, item = await self._queue.get()
            if self._held is None and not isinstance(item, EngineError):
                self._backlog.remove(self, _num_parts(item))
            if self._is_late():
                # Also where tokens are always there, so that the timer never runs.
                item = DeadlineExceeded()
            is_late = isinstance(item, DeadlineExceeded)
            if index not in self._unfinished and not is_late:
                # Also the failure of a sequence whose caller had enough of it before.
                continue
            if isinstance(item, EngineError):
                self.close(FinishReason.TIMEOUT if is_late else FinishReason.ABORT)
                raise item
            if item.finish_reason is not None:
                self._unfinished.remove(index)
            return index, item
        raise StopAsyncIteration

    def finish(self, index: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Stop reading one sequence, and abort it if it has not ended."""
        self._unfinished.discard(index)
        self._release(index, reason)

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Abort all unfinished sequences."""
        if self._timer is not None:
            self._timer.cancel()
        self._backlog.forget(self)
        for index in range(len(self.sequences)):
            self.finish(index, reason)

    def fail(self, error: EngineError) -> None:
        """Drop what is unread, abort all sequences, and raise the error in place of their next output."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._backlog.forget(self)
        for index in range(len(self.sequences)):
            self._release(index, FinishReason.ABORT)
        self.put(next(iter(self._unfinished), 0), error)

    def hold_back(self) -> None:
        """Deliver all outputs of a sequence after its first one together with its last one.

        For callers that do not stream: each delivered output wakes the waiting task, which costs as much
        as processing a token.
        """
        self._held = {}

    def put(self, index: int, item: TokenOutput | EngineError) -> None:
        """Add an output of a sequence, or the error that ends it."""
        if self._held is None or isinstance(item, EngineError):
            self._queue.put_nowait((index, item))
            if not isinstance(item, EngineError):
                self._backlog.add(self, _num_parts(item))
            return
        held = self._held.setdefault(index, [])
        # The first one tells that the prompt is read.
        is_first = not held and self.sequences[index].num_output_tokens <= len(item.token_ids)
        if item.finish_reason is None and not is_first:
            held.append(item)
        else:
            self._queue.put_nowait((index, joined([*held, item])))

    def _is_late(self) -> bool:
        return self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline


def _num_parts(output: TokenOutput) -> int:
    """Return how many tokens and log probabilities an output has; one without any counts, too."""
    return 1 + len(output.token_ids) + sum(1 + len(each.top) for each in output.logprobs)


def joined(outputs: Sequence[TokenOutput]) -> TokenOutput:
    """Merge successive outputs of a sequence into one."""
    return outputs[-1]._replace(
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
        prompt_logprobs=outputs[0].prompt_logprobs,
    )
