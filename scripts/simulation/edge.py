"""What is before the replicas: routers with a policy each, what a request costs them, and admission."""

import math
from collections.abc import Generator, Sequence
from random import Random
from typing import Any

from simpy import Environment, Event, Resource

from scripts.simulation.policies import Policy
from scripts.simulation.records import Served
from scripts.simulation.replica import Replica

# The weight of the latest request in the mean of how long one takes.
_NEWEST = 0.1


class Router:
    """One of several routers before the same replicas; it sees its own requests only.

    It is one core: requests take it one after another.
    """

    def __init__(
        self,
        env: Environment,
        replicas: Sequence[Replica],
        policy: Policy,
        *,
        seconds_each: float = 0.0,
        max_in_flight: float = math.inf,
    ) -> None:
        """Make a router without requests.

        seconds_each: of its core for a request.
        max_in_flight: requests that it has at once; others get a 429.
        """
        self._env = env
        self._replicas = replicas
        self._policy = policy
        self._seconds_each = seconds_each
        self._max_in_flight = max_in_flight
        self._core = Resource(env)
        self._loads = [0] * len(replicas)
        self._num_in_flight = 0
        self._seconds = 1.0

    def ask(
        self, prompt: tuple[int, ...], max_tokens: int, rng: Random
    ) -> Generator[Event, Any, Served]:
        """Send a request until it is admitted, and wait for its end."""
        served = Served(sent=self._env.now, num_prompt=len(prompt))
        yield from self._take_core()
        while self._num_in_flight >= self._max_in_flight:
            served.num_rejections += 1
            # Not all at once.
            yield self._env.timeout(self._retry_after() * rng.uniform(1, 1.5))
            yield from self._take_core()
        began, chosen = self._env.now, self._policy.choose(prompt, self._loads)
        self._loads[chosen] += 1
        self._num_in_flight += 1
        yield self._replicas[chosen].submit(prompt, max_tokens, served)
        self._loads[chosen] -= 1
        self._num_in_flight -= 1
        self._seconds += _NEWEST * (self._env.now - began - self._seconds)
        return served

    def _retry_after(self) -> int:
        """Return what the header says: whole seconds, about as long as a request takes."""
        return math.ceil(self._seconds)

    def _take_core(self) -> Generator[Event, Any, None]:
        if self._seconds_each:
            with self._core.request() as turn:
                yield turn
                yield self._env.timeout(self._seconds_each)
