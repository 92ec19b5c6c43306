"""Waits that end when the caller gives up."""

import threading

import pytest

from batching.sandbox.interruption import Interrupted, Interruption, interruptible


def waiting_function(ended: threading.Event) -> str:
    """Wait for an event that only an interruption sets."""
    with interruptible(ended.set):
        assert ended.wait(20), "it is never interrupted"
    return "done"


def test_a_wait_in_another_thread_ends_at_once() -> None:
    interruption, ended, waits = Interruption(), threading.Event(), threading.Event()
    raised: list[type[BaseException]] = []

    def work() -> None:
        def wait() -> str:
            with interruptible(ended.set):
                waits.set()
                assert ended.wait(20), "it is never interrupted"
            return "done"

        try:
            interruption.run(wait)
        except Interrupted as error:
            raised.append(type(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert waits.wait(20)
    interruption.interrupt()
    thread.join(20)
    assert raised == [Interrupted]


def test_a_wait_that_begins_later_does_not_begin() -> None:
    interruption, ended = Interruption(), threading.Event()
    interruption.interrupt()
    with pytest.raises(Interrupted):
        interruption.run(lambda: waiting_function(ended))
    assert not ended.is_set()


def test_what_has_ended_is_not_ended_again() -> None:
    interruption, ended = Interruption(), threading.Event()

    def work() -> str:
        with interruptible(ended.set):
            pass
        return "done"

    assert interruption.run(work) == "done"
    interruption.interrupt()
    assert not ended.is_set()


def test_without_a_caller_that_can_give_up_a_wait_is_a_wait() -> None:
    ended = threading.Event()
    ended.set()
    assert waiting_function(ended) == "done"


def test_an_interruption_counts_for_its_own_function_only() -> None:
    first, ended = Interruption(), threading.Event()
    first.run(lambda: None)
    first.interrupt()
    ended.set()
    assert Interruption().run(lambda: waiting_function(ended)) == "done"
