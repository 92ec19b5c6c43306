"""How long the cached keys and values of a prompt stay when others need room."""

from math import inf
from typing import Final, NamedTuple


class RetainedPrefix(NamedTuple):
    """The first `num_tokens` tokens of a prompt, for so many seconds after their last use.

    num_tokens: None is the whole prompt, and its output.
    seconds: infinity pins it: it does not give way to what is retained later.
    """

    num_tokens: int | None
    seconds: float


class Retention(NamedTuple):
    """What a request asks of the prefix cache beyond its own time.

    group: a session of the client: the blocks of one are bounded, and all together.
    prefixes: the longer ones have the shorter times; none is retained by default.
    may_store: keys and values may be written to disk.
    client: whose blocks these are: when all together are too many, those of the client that has most give way.
    """

    group: str = ""
    prefixes: tuple[RetainedPrefix, ...] = ()
    may_store: bool = True
    client: str = ""

    def num_written(self, num_prompt_tokens: int, num_cached_tokens: int) -> dict[float, int]:
        """Return how many tokens of a prompt are retained that were not cached, by the seconds.

        The last token is none of them: each request computes it.  Clients take 0 tokens beside the cached ones for none said.
        """
        written: dict[float, int] = {}
        done = num_cached_tokens
        for num_tokens, seconds in self.prefixes:
            last = num_prompt_tokens - 1
            stop = last if num_tokens is None else min(num_tokens, last)
            written[seconds] = max(0, stop - done)
            done = max(done, stop)
        return written


NOT_RETAINED: Final = Retention()
NOT_STORED: Final = Retention(may_store=False)
PINNED: Final = Retention("pinned", (RetainedPrefix(None, inf),))
