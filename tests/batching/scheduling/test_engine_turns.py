"""Which engine is next: shares of the device, the order of prompts, best-effort requests last."""

from collections import Counter
from dataclasses import dataclass, field
from math import inf
from typing import Final

from hypothesis import given, settings, strategies as st

from batching.scheduling.best_effort import QUIET_PERIOD
from batching.scheduling.engine_turns import ALONE, Demand, EngineTurns, Turn

STREAMS: Final = Demand(num_streams=1)
BATCH: Final = Demand(has_best_effort=True)


def prompt(due_time: float, num_pending: int = 100, num_streams: int = 0, rank: int = 1) -> Demand:
    return Demand(num_streams, rank, due_time, num_pending)


def order(demands: dict[str, Demand], durations: dict[str, float], num_turns: int) -> list[str]:
    """Return who is next, again and again, if what there is to do stays the same."""
    turns, chosen = EngineTurns[str](), list[str]()
    for _ in range(num_turns):
        found = turns.next(demands, 0.0)
        assert found is not None
        chosen.append(found[0])
        turns.charge(found[0], durations[found[0]])
    return chosen


def shares(demands: dict[str, Demand], durations: dict[str, float]) -> dict[str, float]:
    """Return the shares of the time in the long run."""
    num_turns = Counter(order(demands, durations, 1000))
    times = {key: num * durations[key] for key, num in num_turns.items()}
    return {key: round(time / sum(times.values()), 2) for key, time in times.items()}


def test_one_engine_is_alone_and_nothing_to_do_is_no_turn() -> None:
    turns = EngineTurns[str]()
    assert turns.next({}, 0.0) is None
    assert turns.next({"a": prompt(0.0)}, 0.0) == ("a", ALONE._replace(expects_others=True))


def test_streams_share_the_time_and_not_the_number_of_steps() -> None:
    chosen = Counter(order({"fast": STREAMS, "slow": STREAMS}, {"fast": 1.0, "slow": 4.0}, 100))
    assert chosen == {"fast": 80, "slow": 20}


def test_an_engine_that_was_idle_does_not_get_that_time_later() -> None:
    turns = EngineTurns[str]()
    for _ in range(100):
        turns.next({"a": STREAMS}, 0.0)
        turns.charge("a", 1.0)
    chosen = list[str]()
    for _ in range(10):
        found = turns.next({"a": STREAMS, "b": STREAMS}, 0.0)
        assert found is not None
        chosen.append(found[0])
        turns.charge(found[0], 1.0)
    assert Counter(chosen) == {"a": 5, "b": 5}


def test_prompts_share_their_time_by_class_by_due_time_and_by_length() -> None:
    demands = {
        "high": prompt(9.0, 900, rank=0),
        "first": prompt(1.0, 900),
        "short": prompt(3.0, 10),
        "other": prompt(2.0, 500),
    }
    durations = {"high": 2.0, "first": 4.0, "short": 1.0}
    assert shares(demands, durations) == {"high": 0.5, "first": 0.25, "short": 0.25}
    del demands["high"]
    assert shares(demands, durations) == {"first": 0.75, "short": 0.25}
    assert set(order({"both": prompt(1.0, 10), "other": prompt(2.0)}, {"both": 1.0}, 9)) == {"both"}


def test_prompts_that_must_wait_do_so_beside_the_streams_of_their_engine() -> None:
    turns = EngineTurns[str]()
    demands = {"a": prompt(2.0, 50, num_streams=1), "b": prompt(1.0, 10)}
    found = dict(_turns(turns, demands, 2))
    assert found["a"] == Turn(
        may_prefill=False, is_alone=False, has_other_streams=False, expects_others=True
    )
    assert found["b"] == Turn(
        may_prefill=True, is_alone=False, has_other_streams=True, expects_others=True
    )


def _turns(
    turns: EngineTurns[str], demands: dict[str, Demand], number: int
) -> list[tuple[str, Turn]]:
    found = list[tuple[str, Turn]]()
    for _ in range(number):
        each = turns.next(demands, 0.0)
        assert each is not None
        turns.charge(each[0], 1.0)
        found.append(each)
    return found


def test_best_effort_requests_wait_for_interactive_ones_of_other_engines() -> None:
    demands = {"chat": STREAMS, "batch": BATCH}
    assert set(order(demands, {"chat": 1.0}, 9)) == {"chat"}
    demands["batch"] = BATCH._replace(is_best_effort_due=True)
    assert set(order(demands, {"chat": 1.0, "batch": 1.0}, 2)) == {"chat", "batch"}
    assert set(order({"x": BATCH, "y": BATCH}, {"x": 1.0, "y": 1.0}, 2)) == {"x", "y"}


def test_an_interactive_request_is_expected_after_one_of_any_engine() -> None:
    turns = EngineTurns[str]()
    assert turns.next({"batch": BATCH}, 0.0) == ("batch", ALONE)
    turns.next({"chat": STREAMS}, 100.0)
    for now, expects in ((100.0 + QUIET_PERIOD / 2, True), (100.0 + QUIET_PERIOD, False)):
        found = turns.next({"batch": BATCH}, now)
        assert found is not None and found[1].expects_others is expects


def test_a_load_is_one_more_and_steps_are_not_queued_beside_it() -> None:
    turns = EngineTurns[str]()
    chosen = list[str]()
    for _ in range(30):
        found = turns.next({"a": STREAMS}, 0.0, load="load")
        assert found is not None and not found[1].is_alone
        chosen.append(found[0])
        turns.charge(found[0], 2.0 if found[0] == "load" else 1.0)
    assert Counter(chosen) == {"a": 20, "load": 10}
    turns.forget("load")
    turns.forget("load")
    assert turns.next({}, 0.0, load="load") is not None


def test_a_step_that_is_queued_already_comes_first() -> None:
    demands = {"a": STREAMS, "b": STREAMS._replace(is_in_flight=True)}
    assert order(demands, {"b": 9.0}, 3) == ["b", "b", "b"]


@dataclass
class Prompts:
    """An engine with prompts: due times and pending tokens; tokens take seconds."""

    pending: dict[float, int] = field(default_factory=dict)
    num_streams: int = 0

    def demand(self) -> Demand:
        due_time = min(self.pending, default=inf)
        num_pending = min(self.pending.values(), default=inf)
        return Demand(self.num_streams, 1.0 if self.pending else inf, due_time, num_pending)

    def step(self, turn: Turn) -> tuple[float, list[float]]:
        """Return how long a step takes, and the due times of the prompts that it ends."""
        duration = 0.1 * self.num_streams
        if turn.may_prefill and self.pending:
            due = min(self.pending)
            num_tokens = min(8, self.pending[due])
            self.pending[due] -= num_tokens
            duration += 0.1 * num_tokens
        ended = [due for due, pending in self.pending.items() if not pending]
        for due in ended:
            del self.pending[due]
        return duration, ended


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 40), st.floats(0, 30)), min_size=1, max_size=12
    ),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_no_prompt_waits_longer_than_twice_the_work_that_is_due_before_it(
    prompts: list[tuple[int, int, float]], streams: list[int]
) -> None:
    """And streams of other engines: each of the three takes as much of the device as the prompts do."""
    engines = {str(i): Prompts(num_streams=streams[i]) for i in range(3)}
    work: dict[float, float] = {}
    for number, (engine, num_tokens, due) in enumerate(prompts):
        due += number * 1e-6
        engines[str(engine)].pending[due] = num_tokens
        work[due] = 0.1 * num_tokens
    turns, now, ended = EngineTurns[str](), 0.0, dict[float, float]()
    while any(engine.pending for engine in engines.values()):
        demands = {k: e.demand() for k, e in engines.items() if e.demand().is_interactive}
        found = turns.next(demands, now)
        assert found is not None
        duration, done = engines[found[0]].step(found[1])
        turns.charge(found[0], duration)
        now += duration
        ended |= dict.fromkeys(done, now)
    num_with_streams = sum(number > 0 for number in streams)
    longest = 0.1 * max(streams) + 0.8
    for due, at in ended.items():
        before = sum(seconds for other, seconds in work.items() if other <= due)
        # A turn of streams has them beside its prompts, too.
        share = 2 * (1 + num_with_streams) * (1 + max(streams))
        assert at <= share * (before + longest), (due, at, before)


def test_an_engine_that_only_stores_has_a_turn_a_second_beside_others() -> None:
    turns, demands = EngineTurns[str](), {"idle": Demand(), "busy": STREAMS}
    found = [turns.next(demands, now) for now in (0.0, 0.3, 0.9, 1.0, 1.1)]
    assert [each and each[0] for each in found] == ["idle", "busy", "busy", "idle", "busy"]
    # It does not keep the other one's steps from being queued.
    assert all(turn.is_alone for key, turn in filter(None, found) if key == "busy")
    assert not found[0] or found[0][1].has_other_streams


def test_engines_that_only_store_take_turns_when_nothing_else_is_to_be_done() -> None:
    assert order({"a": Demand(), "b": Demand()}, {"a": 1.0, "b": 1.0}, 4) == ["a", "b", "a", "b"]
