"""Which engine runs the next step: the order of the aging queue, for all models of a server."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from batching.scheduling.best_effort import QUIET_PERIOD

Key = TypeVar("Key", bound=Hashable)

# Seconds between turns of engines that only store beside the work of others: about 2 % of the time.
_IDLE_INTERVAL: Final = 1.0


class Turn(NamedTuple):
    """What an engine may do in its step.

    may_prefill: it may process prompts beside its decodes; those of other engines come first otherwise.
    is_alone: no other engine has work, so that the next step can be queued behind this one.
    has_other_streams: other engines decode, so that prompts may take only a short time, as beside its own.
    expects_others: an interactive request may soon arrive at another engine.
    """

    may_prefill: bool = True
    is_alone: bool = True
    has_other_streams: bool = False
    expects_others: bool = False


ALONE: Final = Turn()


class Demand(NamedTuple):
    """What an engine has to do.

    num_streams: interactive requests that decode.
    rank, due_time, num_pending: of the interactive prompts that can advance, the highest class, the earliest
        due time, see `PriorityQueueWithAging`, and the tokens of the shortest one; inf if there are none.
    has_best_effort: best-effort requests are here.
    is_best_effort_due: they may take part in a step beside interactive requests.
    is_in_flight: the next step is queued already.
    """

    num_streams: int = 0
    rank: float = inf
    due_time: float = inf
    num_pending: float = inf
    has_best_effort: bool = False
    is_best_effort_due: bool = False
    is_in_flight: bool = False

    @property
    def has_requests(self) -> bool:
        """False if there is only something to store, which has time."""
        return self.is_interactive or self.has_best_effort or self.is_in_flight

    @property
    def is_interactive(self) -> bool:
        return self.num_streams > 0 or self.due_time < inf

    def takes_part(self, has_interactive: bool) -> bool:
        """Return whether best-effort requests alone are reason for a turn."""
        if not self.has_best_effort or self.is_interactive:
            return False
        return self.is_best_effort_due or not has_interactive


_Order = Callable[[Demand], tuple[float, float]]


def _highest_class(demand: Demand) -> tuple[float, float]:
    return demand.rank, demand.due_time


def _due_first(demand: Demand) -> tuple[float, float]:
    return demand.due_time, 0.0


def _shortest(demand: Demand) -> tuple[float, float]:
    return demand.num_pending, demand.due_time


# The share of the time of prompts that each order decides about.
_ORDERS: Final[Mapping[_Order, float]] = {_highest_class: 0.5, _due_first: 0.25, _shortest: 0.25}


class EngineTurns(Generic[Key]):
    """Divides the time of the device among engines, and a load.

    Who has used the device least is next, as in start-time fair queueing (Goyal et al. 1996): engines with
    streams, the load if there is one, and the engine whose prompts may advance.  Half of the time of prompts
    is for the highest class in the whole server, a quarter for the prompt that is due first, and a quarter
    for the shortest one, as in a step of one engine (`share_prefill_budget`).  Best-effort requests take
    turns when no engine has other work, and now and then beside it; so do engines that have only something to
    store, behind all others.

    It is pure: the caller measures the time, in seconds, and reports it to `charge`.
    """

    def __init__(self) -> None:
        # Who has been idle does not get the time of others for that: all begin at what the last one had used.
        self._used: dict[Key, float] = {}
        self._last_used = 0.0
        # The time of prompts that each of the orders has had, divided by its share.
        self._had = dict.fromkeys(_ORDERS, 0.0)
        self._order: _Order | None = None
        self._others_served = -QUIET_PERIOD
        # When an engine without requests had a turn.
        self._idle_served = -inf

    def next(
        self, demands: Mapping[Key, Demand], now: float, load: Key | None = None
    ) -> tuple[Key, Turn] | None:
        """Return who is next, and what it may do; None if there is nothing to do.

        demands: of the engines that have work.
        load: the load that is running, if there is one; it always has work.
        """
        has_interactive = any(demand.is_interactive for demand in demands.values())
        if has_interactive:
            self._others_served = now
        order = min(_ORDERS, key=self._had.__getitem__)
        prompts = {key: d for key, d in demands.items() if d.due_time < inf}
        prefills = min(prompts, key=lambda key: order(prompts[key]), default=None)
        candidates = [
            key
            for key, demand in demands.items()
            if demand.num_streams or key == prefills or demand.takes_part(has_interactive)
        ]
        if load is not None:
            candidates.append(load)
        idle = [key for key, demand in demands.items() if not demand.has_requests]
        if idle and (not candidates or now - self._idle_served >= _IDLE_INTERVAL):
            self._idle_served = now
            candidates = idle
        if not candidates:
            return None
        in_flight = [key for key, demand in demands.items() if demand.is_in_flight]
        chosen = in_flight[0] if in_flight else self._least_used(candidates)
        self._order = order if chosen == prefills else None
        turn = Turn(
            may_prefill=chosen == prefills
            or chosen not in demands
            or not demands[chosen].is_interactive,
            is_alone=load is None and all(key in (chosen, *idle) for key in demands),
            has_other_streams=any(d.num_streams for key, d in demands.items() if key != chosen),
            expects_others=now - self._others_served < QUIET_PERIOD,
        )
        return chosen, turn

    def charge(self, key: Key, seconds: float) -> None:
        """Count the time of the turn that `next` has returned."""
        self._used[key] = self._used.get(key, self._last_used) + seconds
        if self._order is not None:
            self._had[self._order] += seconds / _ORDERS[self._order]

    def forget(self, key: Key) -> None:
        """Forget an engine or a load that has ended."""
        self._used.pop(key, None)

    def _least_used(self, candidates: Sequence[Key]) -> Key:
        for key in candidates:
            self._used[key] = max(self._used.get(key, 0.0), self._last_used)
        chosen = min(candidates, key=self._used.__getitem__)
        self._last_used = self._used[chosen]
        return chosen
