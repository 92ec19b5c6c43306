"""Which engine runs the next step: the order of the aging queue, for all models of a server."""

from collections.abc import Hashable, Mapping, Sequence
from math import inf
from typing import Final, Generic, NamedTuple, TypeVar

from batching.scheduling.best_effort import QUIET_PERIOD

Key = TypeVar("Key", bound=Hashable)


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
    due_time: when the first interactive prompt that can advance is due, see `PriorityQueueWithAging`; inf
        if there is none.
    num_pending: tokens of the shortest of these prompts.
    has_best_effort: best-effort requests are here.
    is_best_effort_due: they may take part in a step beside interactive requests.
    is_in_flight: the next step is queued already.
    """

    num_streams: int = 0
    due_time: float = inf
    num_pending: int = 0
    has_best_effort: bool = False
    is_best_effort_due: bool = False
    is_in_flight: bool = False

    @property
    def is_interactive(self) -> bool:
        return self.num_streams > 0 or self.due_time < inf

    def takes_part(self, has_interactive: bool) -> bool:
        """Return whether best-effort requests alone are reason for a turn."""
        if not self.has_best_effort or self.is_interactive:
            return False
        return self.is_best_effort_due or not has_interactive


class EngineTurns(Generic[Key]):
    """Divides the time of the device among engines, and a load.

    Who has used the device least is next, as in start-time fair queueing (Goyal et al. 1996): engines with
    streams, the load if there is one, and the engine whose prompts may advance.  Half of the time of prompts
    goes to the prompt that is due first in the whole server, the rest to the shortest one, as within one
    engine; so no prompt waits for prompts of another model that are due later and longer.  Best-effort
    requests take turns when no engine has other work, and now and then beside it.

    It is pure: the caller measures the time, in seconds, and reports it to `charge`.
    """

    def __init__(self) -> None:
        # Who has been idle does not get the time of others for that: all begin at what the last one had used.
        self._used: dict[Key, float] = {}
        self._last_used = 0.0
        # By how many seconds the prompts that are due first are ahead of the shortest ones.
        self._lead_of_first = 0.0
        self._is_first = self._is_shortest = False
        self._others_served = -QUIET_PERIOD

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
        first, shortest = _first_due(demands), _shortest(demands)
        prefills = first if self._lead_of_first <= 0 else shortest
        candidates = [
            key
            for key, demand in demands.items()
            if demand.num_streams or key == prefills or demand.takes_part(has_interactive)
        ]
        if load is not None:
            candidates.append(load)
        if not candidates:
            return None
        in_flight = [key for key, demand in demands.items() if demand.is_in_flight]
        chosen = in_flight[0] if in_flight else self._least_used(candidates)
        may_prefill = chosen == prefills
        self._is_first = may_prefill and chosen == first
        self._is_shortest = may_prefill and chosen == shortest
        turn = Turn(
            may_prefill=may_prefill or chosen not in demands or not demands[chosen].is_interactive,
            is_alone=load is None and len(demands) == 1,
            has_other_streams=any(d.num_streams for key, d in demands.items() if key != chosen),
            expects_others=now - self._others_served < QUIET_PERIOD,
        )
        return chosen, turn

    def charge(self, key: Key, seconds: float) -> None:
        """Count the time of the turn that `next` has returned."""
        self._used[key] = self._used.get(key, self._last_used) + seconds
        if self._is_first != self._is_shortest:
            self._lead_of_first += seconds if self._is_first else -seconds

    def forget(self, key: Key) -> None:
        """Forget an engine or a load that has ended."""
        self._used.pop(key, None)

    def _least_used(self, candidates: Sequence[Key]) -> Key:
        for key in candidates:
            self._used[key] = max(self._used.get(key, 0.0), self._last_used)
        chosen = min(candidates, key=self._used.__getitem__)
        self._last_used = self._used[chosen]
        return chosen


def _first_due(demands: Mapping[Key, Demand]) -> Key | None:
    return _least({key: d.due_time for key, d in demands.items() if d.due_time < inf})


def _shortest(demands: Mapping[Key, Demand]) -> Key | None:
    return _least({key: d.num_pending for key, d in demands.items() if d.due_time < inf})


def _least(values: Mapping[Key, float]) -> Key | None:
    return min(values, key=values.__getitem__, default=None)
