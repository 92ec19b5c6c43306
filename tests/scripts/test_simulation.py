"""A simulated load is the same each time, loses nothing, and prefers the policy that should be preferred."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from simpy import Environment

from scripts.simulation import measure
from scripts.simulation.__main__ import main
from scripts.simulation.costs import StepCosts, Timed, Work
from scripts.simulation.edge import Router
from scripts.simulation.policies import POLICIES, LeastLoaded, PrefixAware
from scripts.simulation.records import Served, summarise
from scripts.simulation.replica import Process, Replica, config_of
from scripts.simulation.simulate import Outcome, Setup, figures, simulate
from scripts.simulation.traces import TRACES, make_trace

COSTS = StepCosts(Work(step=0.01, prefill=0.001, attended=1e-7, rows=0.001, context=1e-6))


def run(
    trace: str, policy: str, num_replicas: int, *, num_routers: int = 1, max_queue: float = 1e9
) -> Outcome:
    setup = Setup(
        trace=trace,
        policy=policy,
        num_replicas=num_replicas,
        num_routers=num_routers,
        max_queue=max_queue,
        router_seconds=0.001,
    )
    return simulate(setup, COSTS)


def num_computed(trace: str, policy: str, num_replicas: int, **options: int) -> int:
    return sum(run(trace, policy, num_replicas, **options).num_computed)


@pytest.mark.parametrize("trace", TRACES)
def test_each_request_is_served_once_and_each_token_computed_or_found(trace: str) -> None:
    turns = [
        turn
        for sessions in make_trace(trace, 2, 0).clients
        for session in sessions
        for turn in session.turns
    ]
    for policy in POLICIES:
        outcome = run(trace, policy, 2)
        served = outcome.served
        assert sorted(s.num_output for s in served) == sorted(turn.max_tokens for turn in turns)
        assert all(s.sent < s.first <= s.ended for s in served)
        assert outcome.num_preemptions == 0
        num_cached = sum(s.num_cached for s in served)
        assert sum(outcome.num_computed) + num_cached == sum(s.num_prompt for s in served)


def test_a_run_is_the_same_each_time_also_in_other_processes() -> None:
    setups = [
        Setup(trace="agents", policy=policy, num_replicas=2, seed=seed)
        for policy in POLICIES
        for seed in (0, 1)
    ]
    found = figures(setups, COSTS, jobs=1)
    assert figures(setups, COSTS, jobs=2) == found
    assert len(set(found)) > 3


@pytest.mark.parametrize("trace", TRACES)
def test_before_one_replica_all_policies_are_equal(trace: str) -> None:
    first, *others = (run(trace, policy, 1) for policy in POLICIES)
    assert others == [first] * len(others)


def test_tenants_stay_where_their_instructions_are() -> None:
    aware, in_turns = (num_computed("tenants", p, 2) for p in ("prefix-aware", "round robin"))
    assert aware < 0.4 * in_turns


def test_routers_that_do_not_know_of_each_other_compute_more() -> None:
    one, four = (num_computed("tenants", "prefix-aware", 4, num_routers=n) for n in (1, 4))
    assert one < four < num_computed("tenants", "round robin", 4)


def test_a_full_edge_rejects_and_all_are_served_later() -> None:
    outcome = run("answers", "least loaded", 2, max_queue=4)
    assert sum(s.num_rejections for s in outcome.served) > 0
    assert len(outcome.served) == make_trace("answers", 2, 0).num_requests


def test_a_router_takes_requests_one_after_another() -> None:
    setup = Setup(trace="answers", policy="round robin", num_replicas=1, router_seconds=1.0)
    served = simulate(setup, COSTS).served
    # Those of the first clients, all sent at once.
    firsts = sorted(s.first for s in served if s.sent == 0)
    assert all(later - earlier > 0.9 for earlier, later in pairwise(firsts))


def test_the_least_loaded_is_any_of_those_with_the_fewest() -> None:
    policy = LeastLoaded(Random(0))
    assert {policy.choose((), [1, 0, 2, 0]) for _ in range(30)} == {1, 3}


def test_a_request_that_has_ended_is_no_load() -> None:
    env = Environment()
    replicas = [Replica(env, config_of(32), COSTS) for _ in range(2)]
    router = Router(env, replicas, LeastLoaded(Random(0)))
    long = env.process(router.ask((1,) * 40, 500, Random(0)))

    def short_ones() -> Process:
        yield env.timeout(0.1)
        for first in range(5):
            yield from router.ask((first,) * 10, 1, Random(0))

    env.run(env.process(short_ones()))
    assert long.is_alive
    assert sorted(replica.num_computed for replica in replicas) == [40, 50]


def test_a_prefix_leads_to_its_replica_unless_that_has_too_much_to_do() -> None:
    policy = PrefixAware(Random(0), min_share=0.5, max_ratio=1.5, max_more=2)
    a, b = tuple(range(64)), tuple(range(100, 164))
    assert policy.choose(a, [0, 1]) == 0
    assert policy.choose(b, [1, 0]) == 1
    assert policy.choose((*a, *b[:32]), [2, 0]) == 0
    assert policy.choose((*a, *b), [5, 0]) == 1, "overloaded"
    # Both have it now.
    assert policy.choose((*a, 99), [1, 0]) == 1
    assert policy.choose((*a[:16], *range(200, 264)), [0, 3]) == 0, "too short a prefix"


def test_figures_leave_the_end_of_a_run_out() -> None:
    served = [
        Served(sent=0, first=i / 2, ended=float(i), num_prompt=10, num_cached=5, num_output=2)
        for i in (*range(1, 10), 1000)
    ]
    found = summarise(served)
    assert (found.requests_per_second, found.output_per_second) == (1, 2)
    assert (found.first_p50, found.first_p99) == (2.5, 500)
    assert found.computed == 0.5


def test_the_fit_finds_the_costs_and_drops_what_has_no_effect() -> None:
    rng = Random(0)
    truth = Work(step=0.01, prefill=0.001, attended=0.0, rows=0.002, context=1e-6)
    works = [Work(1, *(rng.choice((0, 1, 10, 100)) for _ in range(4))) for _ in range(50)]
    timed = [
        Timed(work, sum(a * b for a, b in zip(truth, work, strict=True)) - 1e-9 * work.attended)
        for work in works
    ]
    found = measure.fit(timed).seconds
    assert found.attended == 0
    assert found == pytest.approx(truth, rel=0.01, abs=1e-8)


def test_the_command_prints_a_table_and_compares_with_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--trace", "tenants", "--replicas", "2,1", "--jobs", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * len(POLICIES)
    assert lines[2].startswith("| tenants | 1        | round robin ")
    runs = [
        {
            "setup": {"trace": "tenants", "policy": "round robin", "num_replicas": 1, "seed": seed},
            "summary": {"num_prompt": 100 + seed},
        }
        for seed in (0, 1)
    ]
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"runs": runs}), encoding="utf-8")
    assert main(["compare", str(path)]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert "| prompt tokens | 100 " in row


@pytest.mark.parametrize(
    "options", [["--replicas", "0"], ["--router-us", "-1"], ["--jobs", "none"], ["--trace", "x"]]
)
def test_options_that_make_no_sense_are_rejected(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", *options])
    assert ended.value.code == 2


@pytest.mark.parametrize("text", ["{}", "[]", "no JSON", '{"runs": [{"setup": {"color": 1}}]}'])
def test_a_file_that_is_another_one_is_rejected(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(text, encoding="utf-8")
    assert main(["compare", str(path)]) == 2
    assert main(["run", "--costs", str(path)]) == 2
    assert main(["compare", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("a file cannot be used: ") == 3
