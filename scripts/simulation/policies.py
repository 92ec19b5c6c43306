"""How a router chooses a replica.  A policy knows what it has sent and what is in flight, and nothing of the pools."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from typing import Final, Protocol

# Tokens of a node in the tree of prefixes.
_NODE: Final = 16


class Policy(Protocol):
    """One router's; `loads` has for each replica the requests of this router that are in flight."""

    def choose(self, prompt: Sequence[int], loads: Sequence[int]) -> int:
        """Return the index of a replica, to which the prompt then goes."""
        ...


class RoundRobin:
    """The next one; routers begin anywhere, so that several do not go in step."""

    def __init__(self, rng: Random) -> None:
        self._turns = count(rng.getrandbits(32))

    def choose(self, prompt: Sequence[int], loads: Sequence[int]) -> int:
        return next(self._turns) % len(loads)


class LeastLoaded:
    """One with the fewest requests in flight; of several any, or routers would all choose the same."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, prompt: Sequence[int], loads: Sequence[int]) -> int:
        least, start = min(loads), self._rng.randrange(len(loads))
        try:
            return loads.index(least, start)
        except ValueError:
            return loads.index(least)


class PrefixAware:
    """The replica that has got the longest prefix of the prompt before, if that is long and the replica not overloaded.

    That is what SGLang's router and its successor call cache-aware: one approximate tree of all prompts says which
    replicas may have which prefixes.  Nothing is ever forgotten here, as in smg before its tree has 67 million
    characters.
    """

    def __init__(
        self,
        rng: Random,
        *,
        min_share: float = 0.3,
        max_ratio: float = 1.5,
        max_more: int = 4,
    ) -> None:
        """Make one with an empty tree.

        min_share: of the prompt, which a prefix must have to count.
        max_ratio, max_more: a replica is overloaded if it has so many times the mean load, and so many requests more.
        """
        self._min_share = min_share
        self._max_ratio = max_ratio
        self._max_more = max_more
        # By the hash of a prefix, the replicas that have got it.
        self._holders: dict[int, set[int]] = {}
        self._rng = rng
        self._others = LeastLoaded(rng)

    def choose(self, prompt: Sequence[int], loads: Sequence[int]) -> int:
        prefixes = list(_prefixes(prompt))
        chosen = self._match(prefixes, len(prompt), loads)
        if chosen is None:
            chosen = self._others.choose(prompt, loads)
        for each in prefixes:
            self._holders.setdefault(each, set()).add(chosen)
        return chosen

    def _match(self, prefixes: Sequence[int], num_tokens: int, loads: Sequence[int]) -> int | None:
        known = next(
            (i for i, each in enumerate(prefixes) if each not in self._holders), len(prefixes)
        )
        if known == 0 or known * _NODE < self._min_share * num_tokens:
            return None
        # Sorted, since the order of a set is no order.
        holders = sorted(self._holders[prefixes[known - 1]])
        least = min(loads[i] for i in holders)
        best = self._rng.choice([i for i in holders if loads[i] == least])
        mean = sum(loads) / len(loads)
        is_overloaded = loads[best] > max(self._max_ratio * mean, mean + self._max_more)
        return None if is_overloaded else best


def _prefixes(prompt: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each prefix of whole nodes; those of integers are alike in each process."""
    prefix = 0
    for start in range(0, len(prompt) - _NODE + 1, _NODE):
        prefix = hash((prefix, *prompt[start : start + _NODE]))
        yield prefix


POLICIES: Final[dict[str, Callable[[Random], Policy]]] = {
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "prefix-aware": PrefixAware,
}
