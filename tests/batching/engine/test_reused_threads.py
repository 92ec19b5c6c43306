"""Threads that have used MLX."""

import logging
import threading

import pytest

from batching.engine.reused_threads import start_reused_thread


def test_a_function_that_raises_ends_and_its_thread_serves_the_next_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    threads: list[threading.Thread] = []

    def fail() -> None:
        threads.append(threading.current_thread())
        raise RuntimeError("it cannot be closed")

    def run() -> None:
        threads.append(threading.current_thread())

    with caplog.at_level(logging.ERROR):
        for function in (fail, run):
            has_ended = threading.Event()
            start_reused_thread(function, has_ended.set)
            assert has_ended.wait(20)
    assert threads[0] is threads[1]
    assert "it cannot be closed" in caplog.text
