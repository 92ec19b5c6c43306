"""Which models are loaded: stories, and random histories on a virtual clock."""

from collections.abc import Iterable
from typing import Final

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from batching.errors import EngineClosed, ModelLoadError, ModelTooLarge
from batching.models.residency.actions import Action, Begin, Cancel, Close, Grant, Refuse, Waiter
from batching.models.residency.ledger import Ledger
from batching.models.residency.model_state import MemoryNeed, ModelState
from batching.models.residency.residency import RETRY_INTERVAL, Residency

CAPACITY: Final = 10
STAY: Final = 5.0


def need(least: int, wanted: int | None = None) -> MemoryNeed:
    return MemoryNeed(least, least if wanted is None else wanted)


def residency(**sizes: int) -> Residency:
    """Return models of these sizes, none of which is loaded."""
    made = Residency(CAPACITY, STAY)
    for model_id, size in sizes.items():
        made.add(model_id, need(size))
    return made


def ask(made: Residency, model_id: str, due_time: float = 0.0) -> Waiter:
    waiter = Waiter(model_id, due_time)
    made.ask(waiter)
    return waiter


def load(made: Residency, model_id: str, now: float = 0.0) -> Waiter:
    """Ask for a model, load it, and return the waiter that has it."""
    waiter = ask(made, model_id, now)
    (begin,) = made.actions(now)
    assert isinstance(begin, Begin) and begin.model_id == model_id
    made.loaded(model_id, begin.num_bytes, now)
    assert made.actions(now) == [Grant(waiter)]
    return waiter


def named(actions: Iterable[Action]) -> list[str]:
    """Write actions in one word each."""
    return [
        f"{type(a).__name__} {a.waiter.model_id if isinstance(a, Grant | Refuse) else a.model_id}"
        for a in actions
    ]


def test_all_that_wait_for_a_model_get_it_by_one_load() -> None:
    made = residency(a=4)
    waiters = [ask(made, "a", due) for due in (0.0, 1.0, 2.0)]
    assert made.actions(0.0) == [Begin("a", 4)]
    assert made.actions(0.0) == []
    made.loaded("a", 4, 1.0)
    assert made.actions(1.0) == [Grant(waiter) for waiter in waiters]
    assert made.num_leases("a") == 3


def test_the_least_recently_used_idle_model_makes_room() -> None:
    made = residency(a=4, b=4, c=4)
    for model_id in "ab":
        load(made, model_id)
    made.release("b", 10.0)
    made.release("a", 11.0)
    ask(made, "c", 12.0)
    assert named(made.actions(20.0)) == ["Close b"]
    assert made.actions(20.0) == []
    assert made.state("a") is ModelState.LOADED
    made.closed("b", 21.0)
    assert named(made.actions(21.0)) == ["Begin c"]


def test_models_that_do_not_fit_together_take_turns_and_stay_a_while() -> None:
    made = residency(a=6, b=6)
    load(made, "a")
    made.release("a", 1.0)
    ask(made, "b", 1.0)
    # Requests still get a model that is loaded, until it has stayed long enough.
    assert made.actions(1.0) == []
    late = ask(made, "a", 2.0)
    assert made.actions(2.0) == [Grant(late)]
    assert made.actions(STAY) == []
    assert made.state("a") is ModelState.DRAINING
    # From now on they wait for the next turn, behind the one who waits already.
    ask(made, "a", STAY)
    assert made.actions(STAY) == []
    made.release("a", 6.0)
    assert named(made.actions(6.0)) == ["Close a"]
    made.closed("a", 6.0)
    assert named(made.actions(6.0)) == ["Begin b"]
    made.loaded("b", 6, 7.0)
    assert named(made.actions(7.0)) == ["Grant b"]
    assert made.actions(7.0 + STAY) == []
    made.release("b", 13.0)
    assert named(made.actions(13.0)) == ["Close b"]
    made.closed("b", 13.0)
    assert named(made.actions(13.0)) == ["Begin a"]


def test_busy_models_drain_for_the_least_of_a_model_and_not_for_more() -> None:
    made = residency(a=4)
    made.add("b", need(6, 9))
    load(made, "a")
    ask(made, "b")
    assert made.actions(STAY) == [Begin("b", 6)]
    assert made.state("a") is ModelState.LOADED
    made.loaded("b", 6, STAY)
    assert made.ledger.free == 0


def test_idle_models_make_room_for_all_that_is_wanted() -> None:
    made = residency(a=4)
    made.add("b", need(6, 9))
    load(made, "a")
    made.release("a", 1.0)
    ask(made, "b")
    assert named(made.actions(STAY)) == ["Close a"]
    made.closed("a", STAY)
    assert made.actions(STAY) == [Begin("b", 9)]


def test_the_model_whose_waiter_is_due_first_is_loaded_first() -> None:
    made = residency(a=6, b=6, c=6)
    for model_id, due in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        ask(made, model_id, due)
    order: list[str] = []
    now = 0.0
    for _ in range(40):
        for action in made.actions(now):
            match action:
                case Begin(model_id, num_bytes):
                    order.append(model_id)
                    made.loaded(model_id, num_bytes, now)
                case Grant(waiter):
                    made.release(waiter.model_id, now)
                case Close(model_id):
                    made.closed(model_id, now)
                case other:
                    raise AssertionError(other)
        now += 1.0
    assert order == ["b", "c", "a"]


def test_a_load_that_no_request_waits_for_is_cancelled_and_may_come_again() -> None:
    made = residency(a=4)
    waiter = ask(made, "a")
    made.actions(0.0)
    made.leave(waiter)
    assert made.actions(0.0) == [Cancel("a")]
    assert made.actions(0.0) == []
    again = ask(made, "a")
    assert made.actions(0.0) == []
    made.failed("a", None, 1.0)
    assert made.state("a") is ModelState.LOADING or made.actions(1.0) == [Begin("a", 4)]
    made.loaded("a", 4, 2.0)
    assert made.actions(2.0) == [Grant(again)]


def test_a_load_that_ends_before_it_is_cancelled_leaves_an_idle_model() -> None:
    made = residency(a=4)
    made.leave(ask(made, "a"))
    waiter = ask(made, "a")
    made.actions(0.0)
    made.leave(waiter)
    made.leave(waiter)
    made.actions(0.0)
    made.loaded("a", 4, 1.0)
    assert made.actions(1.0) == []
    assert made.state("a") is ModelState.LOADED


def test_a_failed_load_is_told_to_all_and_tried_again_later() -> None:
    made = residency(a=4)
    error = ModelLoadError("a corrupt file")
    waiter = ask(made, "a")
    made.actions(0.0)
    made.failed("a", error, 1.0)
    assert made.actions(1.0) == [Refuse(waiter, error)]
    assert made.error("a") is error
    assert made.ledger.used == 0
    soon = ask(made, "a", 2.0)
    assert made.actions(2.0) == [Refuse(soon, error)]
    ask(made, "a", 2.0)
    assert made.actions(1.0 + RETRY_INTERVAL) == [Begin("a", 4)]
    made.loaded("a", 4, 9.0)
    assert made.error("a") is None


def test_a_model_that_never_fits_is_refused_with_the_numbers() -> None:
    mib = 1 << 20
    made = Residency(10 * mib, STAY)
    made.add("big", need(8 * mib))
    made.add("pinned", need(3 * mib), is_pinned=True)
    waiter = ask(made, "big")
    (refusal,) = made.actions(0.0)
    assert isinstance(refusal, Refuse) and refusal.waiter is waiter
    assert isinstance(refusal.error, ModelTooLarge)
    assert str(refusal.error) == (
        "the model 'big' needs 8 MiB, and 7 MiB are there for it beside 3 MiB of pinned models"
    )


def test_a_pinned_model_stays_where_one_used_later_makes_room() -> None:
    made = residency(a=4, b=6)
    made.add("pinned", need(4), is_pinned=True)
    for model_id, now in (("pinned", 0.0), ("a", 1.0)):
        load(made, model_id, now)
        made.release(model_id, now)
    ask(made, "b")
    assert named(made.actions(9.0)) == ["Close a"]


def test_pinned_models_do_not_expire() -> None:
    made = Residency(CAPACITY, STAY)
    made.add("pinned", need(4), is_pinned=True, idle_unload=1.0)
    made.add("a", need(6), idle_unload=1.0)
    made.add("b", need(6))
    for model_id in ("pinned", "a"):
        load(made, model_id)
        made.release(model_id, 0.0)
    assert (made.expires("pinned"), made.expires("a")) == (None, 1.0)
    assert named(made.actions(1.0)) == ["Close a"]
    made.closed("a", 1.0)
    load(made, "b", 1.0)
    assert made.state("pinned") is ModelState.LOADED
    # An operator may.
    made.unload("pinned")
    assert named(made.actions(2.0)) == ["Close pinned"]


def test_a_model_that_is_unloaded_while_it_loads_first_serves_those_that_wait() -> None:
    made = residency(a=4)
    waiter = ask(made, "a")
    made.actions(0.0)
    made.unload("a")
    assert made.actions(0.0) == []
    made.loaded("a", 4, 1.0)
    assert made.actions(1.0) == [Grant(waiter)]
    assert made.state("a") is ModelState.DRAINING
    made.release("a", 2.0)
    assert named(made.actions(2.0)) == ["Close a"]
    # Closed once.
    assert made.actions(2.0) == []
    made.unload("a")
    made.closed("a", 3.0)
    assert made.actions(3.0) == []


def test_in_the_end_all_are_refused_and_a_load_is_cancelled() -> None:
    made = residency(a=4)
    waiter = ask(made, "a")
    made.actions(0.0)
    made.end()
    (refusal, cancel) = made.actions(0.0)
    assert isinstance(refusal, Refuse) and refusal.waiter is waiter
    assert isinstance(refusal.error, EngineClosed)
    assert cancel == Cancel("a")


def test_best_effort_requests_wait_for_idle_models_and_for_all_others() -> None:
    made = residency(a=6, b=6, c=4)
    load(made, "a")
    line = Waiter("b", 0.0, is_best_effort=True)
    made.ask(line)
    assert made.actions(STAY) == []
    assert made.state("a") is ModelState.LOADED
    # One that others wait for comes first, however long the line has waited.
    ask(made, "c", 99.0)
    assert made.actions(STAY) == [Begin("c", 4)]
    made.loaded("c", 4, STAY)
    made.actions(STAY)
    made.release("a", 9.0)
    assert named(made.actions(9.0)) == ["Close a"]
    made.closed("a", 9.0)
    assert named(made.actions(9.0)) == ["Begin b"]


def test_a_model_whose_room_is_not_needed_any_more_stays() -> None:
    made = residency(a=6, b=6)
    load(made, "a")
    waiter = ask(made, "b", 1.0)
    assert made.actions(STAY) == []
    late = ask(made, "a", STAY)
    assert made.actions(STAY) == []
    assert made.state("a") is ModelState.DRAINING
    made.leave(waiter)
    made.actions(STAY + 1)
    assert made.state("a") is ModelState.LOADED
    assert made.actions(STAY + 1) == [Grant(late)]


def test_a_model_that_fits_beside_what_the_first_one_waits_for_is_loaded_meanwhile() -> None:
    made = residency(a=6, b=8, c=2, d=3)
    load(made, "a")
    for model_id, due in (("b", 1.0), ("d", 2.0), ("c", 3.0)):
        ask(made, model_id, due)
    # Of the 10, 6 will come: b needs 2 of the 4 that are free.
    assert made.actions(STAY) == [Begin("c", 2)]
    made.loaded("c", 2, STAY)
    assert named(made.actions(STAY)) == ["Grant c"]
    made.release("a", 9.0)
    assert named(made.actions(9.0)) == ["Close a"]
    made.closed("a", 9.0)
    assert made.actions(9.0) == [Begin("b", 8)]


def test_what_a_model_needs_is_known_once_it_was_loaded() -> None:
    made = Residency(CAPACITY, STAY)
    made.add("a")
    assert made.need("a") is None
    ask(made, "a")
    assert made.actions(0.0) == [Begin("a", 0)]
    made.loaded("a", 7, 0.0)
    assert made.need("a") == need(7)


def test_an_entry_of_the_ledger_is_made_once_and_settled() -> None:
    ledger = Ledger(10)
    ledger.reserve("a", 4)
    with pytest.raises(AssertionError):
        ledger.reserve("a", 4)
    with pytest.raises(AssertionError):
        ledger.settle("b", 1)
    ledger.settle("a", 12)
    assert (ledger.used, ledger.free, ledger.of("a"), ledger.of("b")) == (12, -2, 12, 0)
    ledger.release("a")
    assert ledger.free == 10


SIZES: Final = {"a": 4, "b": 6, "c": 7, "pinned": 2}


class Histories(RuleBasedStateMachine):
    """Requests come, leave and end; loads succeed or fail, whenever they like."""

    @initialize()
    def begin(self) -> None:
        self.made = Residency(CAPACITY, STAY)
        for model_id, size in SIZES.items():
            self.made.add(model_id, need(size), is_pinned=model_id == "pinned", idle_unload=60.0)
        self.now = 0.0
        self.waiting: list[Waiter] = []
        self.granted: list[Waiter] = []
        self.loading: list[str] = []
        self.closing: list[str] = []
        self.began: list[tuple[float, str]] = []

    def follow(self) -> None:
        """Do what is to be done, as far as it is done at once."""
        while actions := self.made.actions(self.now):
            for action in actions:
                self.do(action)

    def do(self, action: Action) -> None:
        match action:
            case Begin(model_id, num_bytes):
                assert not self.loading and num_bytes == SIZES[model_id]
                self.loading.append(model_id)
                self.began.append((self.now, model_id))
            case Cancel(model_id):
                assert model_id in self.loading
                assert all(waiter.model_id != model_id for waiter in self.waiting)
            case Close(model_id):
                assert all(waiter.model_id != model_id for waiter in self.granted)
                self.closing.append(model_id)
            case Grant(waiter):
                assert self.made.state(waiter.model_id) in (ModelState.LOADED, ModelState.DRAINING)
                self.waiting.remove(waiter)
                self.granted.append(waiter)
            case Refuse(waiter):
                assert self.made.state(waiter.model_id) is ModelState.FAILED
                self.waiting.remove(waiter)

    @rule(model_id=st.sampled_from(sorted(SIZES)), wait=st.floats(0, 20))
    def ask(self, model_id: str, wait: float) -> None:
        self.waiting.append(ask(self.made, model_id, self.now + wait))
        self.follow()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiter)
        self.made.leave(waiter)
        self.follow()

    @precondition(lambda self: self.granted)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        waiter = data.draw(st.sampled_from(self.granted))
        self.granted.remove(waiter)
        self.made.release(waiter.model_id, self.now)
        self.follow()

    @precondition(lambda self: self.loading)
    @rule(error=st.sampled_from([None, ModelLoadError("broken")]), succeeds=st.booleans())
    def end_load(self, error: ModelLoadError | None, succeeds: bool) -> None:
        model_id = self.loading.pop()
        if succeeds:
            self.made.loaded(model_id, SIZES[model_id], self.now)
        else:
            self.made.failed(model_id, error, self.now)
        self.follow()

    @precondition(lambda self: self.closing)
    @rule()
    def end_close(self) -> None:
        self.made.closed(self.closing.pop(0), self.now)
        self.follow()

    @rule(model_id=st.sampled_from(sorted(SIZES)))
    def unload(self, model_id: str) -> None:
        self.made.unload(model_id)
        self.follow()

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.follow()

    @invariant()
    def no_more_is_given_away_than_there_is(self) -> None:
        assert self.made.ledger.used <= CAPACITY

    @invariant()
    def what_has_room_is_not_kept_waiting(self) -> None:
        """A model that is asked for and fits beside all others is loading, or another one is."""
        absent = [
            m for m in SIZES if self.made.state(m) in (ModelState.UNLOADED, ModelState.FAILED)
        ]
        due = {
            m: min(w.due_time for w in self.waiting if w.model_id == m)
            for m in absent
            if any(w.model_id == m for w in self.waiting)
        }
        if due and not self.loading:
            first = min(due, key=due.__getitem__)
            assert self.made.ledger.free < SIZES[first]

    def teardown(self) -> None:
        """Requests end some time, and loads too: then each one that waits is served."""
        if not hasattr(self, "made"):
            return
        for _ in range(60):
            self.now += STAY
            self.follow()
            for waiter in [*self.granted]:
                self.granted.remove(waiter)
                self.made.release(waiter.model_id, self.now)
            if self.loading:
                model_id = self.loading.pop()
                self.made.loaded(model_id, SIZES[model_id], self.now)
            if self.closing:
                self.made.closed(self.closing.pop(0), self.now)
        assert self.waiting == []


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHistories = Histories.TestCase
