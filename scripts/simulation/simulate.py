"""One run: clients, routers and replicas, from a trace to the figures."""

import math
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from random import Random
from typing import Any

from simpy import Environment, Event

from scripts.simulation.costs import StepCosts
from scripts.simulation.edge import Router
from scripts.simulation.policies import POLICIES
from scripts.simulation.records import Served, Summary, summarise
from scripts.simulation.replica import OUTPUT_TOKEN, Replica, config_of
from scripts.simulation.traces import Conversation, Session, make_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is simulated.

    num_routers: clients keep to one each.
    router_seconds: of a router's core for a request.
    max_queue: requests in flight for each replica, beyond which a router answers 429; infinity is no limit.
    num_blocks: of a replica's pool; None is the trace's.
    """

    trace: str
    policy: str
    num_replicas: int
    num_routers: int = 1
    router_seconds: float = 0.0
    max_queue: float = math.inf
    num_blocks: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the requests, and what the replicas did: by replica, in their order."""

    served: Sequence[Served]
    num_computed: Sequence[int]
    num_preemptions: int


def simulate(setup: Setup, costs: StepCosts) -> Outcome:
    """Run until all clients have ended."""
    env = Environment()
    trace = make_trace(setup.trace, setup.num_replicas, setup.seed)
    config = config_of(setup.num_blocks or trace.num_blocks)
    replicas = [Replica(env, config, costs) for _ in range(setup.num_replicas)]
    routers = _routers(env, setup, replicas)
    served: list[Served] = []
    clients = [
        env.process(_client(env, routers[i % len(routers)], sessions, Random(i), served))
        for i, sessions in enumerate(trace.clients)
    ]
    env.run(env.all_of(clients))
    return Outcome(
        served,
        [replica.num_computed for replica in replicas],
        sum(replica.num_preemptions for replica in replicas),
    )


def figures(setups: Sequence[Setup], costs: StepCosts, jobs: int) -> list[Summary]:
    """Return the figures of several runs, in their order, from so many processes."""
    summary = partial(_summary, costs=costs)
    if jobs == 1:
        return [summary(setup) for setup in setups]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return list(pool.map(summary, setups))


def _summary(setup: Setup, costs: StepCosts) -> Summary:
    return summarise(simulate(setup, costs).served)


def _routers(env: Environment, setup: Setup, replicas: Sequence[Replica]) -> list[Router]:
    max_in_flight = setup.max_queue * setup.num_replicas / setup.num_routers
    return [
        Router(
            env,
            replicas,
            POLICIES[setup.policy](Random(f"{number} {setup.seed}")),
            seconds_each=setup.router_seconds,
            max_in_flight=max_in_flight,
        )
        for number in range(setup.num_routers)
    ]


def _client(
    env: Environment,
    router: Router,
    sessions: Sequence[Session],
    rng: Random,
    served: list[Served],
) -> Generator[Event, Any, None]:
    for session in sessions:
        conversation = Conversation(session.system)
        for turn in session.turns:
            yield env.timeout(turn.pause)
            prompt = conversation.prompt(turn)
            served.append((yield from router.ask(prompt, turn.max_tokens, rng)))
            conversation.add_answer([OUTPUT_TOKEN] * turn.max_tokens)
