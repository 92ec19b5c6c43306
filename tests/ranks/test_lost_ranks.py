"""A rank that is lost, in whatever way and at whatever time, ends all of them: clearly, and within ten seconds."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep

import httpx
import pytest

from scripts.server_process import ServerProcess, wait_until
from tests.support import stuck_rank
from tests.support.rank_servers import (
    ENDED_WITHIN,
    Answer,
    ask,
    ended,
    loading_ranks,
    rank,
    ranks,
    settings,
    url_of,
)

pytestmark = pytest.mark.ranks
KILLED = -signal.SIGKILL
TIMES = ["idle", "mid-stream", "in prefill"]


def fail_at(time: str, processes: list[ServerProcess], fail: Callable[[], object]) -> Answer | None:
    """Let something fail at a time; return what the client gets that has asked by then."""
    url = url_of(processes[0])
    if time == "idle":
        fail()
        return None
    if time == "mid-stream":
        return ask(url, fail)
    # The second rank does not take part in the step.
    processes[1].pause()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(ask, url, is_long=True)
        wait_until(lambda: _num_running(url) > 0, "the request does not run")
        fail()
        processes[1].resume()
        return asked.result()


def _num_running(url: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    found = [line for line in text.splitlines() if line.startswith("vllm:num_requests_")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


@pytest.mark.parametrize("time", TIMES)
def test_a_rank_that_is_killed_ends_the_first_with_errors_for_its_clients(time: str) -> None:
    with ranks() as processes:
        first, second = processes
        answer = fail_at(time, processes, second.kill)
        assert ended(first) == [1]
        # Once, and no future has an error that was not waited for.
        assert first.log.count("rank 1 (mac1) is gone") == 1
        assert "never retrieved" not in first.log
        assert second.wait() == KILLED
    if answer is not None:
        assert answer.error is not None, answer
        assert "rank 1" in answer.error["message"], answer
        assert answer.error["code"] == "rank_lost"
        assert answer.is_done or answer.status == 503


@pytest.mark.parametrize("time", TIMES)
def test_a_first_rank_that_is_killed_ends_the_others(time: str) -> None:
    shared = settings()
    with ranks(**shared) as processes:
        first, second = processes
        answer = fail_at(time, processes, first.kill)
        assert ended(second) == [1]
        assert "rank 0 (mac0) is gone" in second.log
    assert answer is None or answer.is_cut
    if time == "mid-stream":
        # As supervisors do, at the same ports.
        with ranks(**shared) as processes:
            assert ask(url_of(processes[0]), num_tokens=5).is_done


def test_a_rank_that_is_stopped_is_named_by_the_health_while_all_others_end() -> None:
    with ranks() as processes, ThreadPoolExecutor(1) as threads:
        first, second = processes
        url = url_of(first)
        health = threads.submit(_first_failure, url)
        answer = ask(url, second.pause)
        assert answer.error is not None
        assert answer.error["message"] == "rank 1 (mac1) has not answered for 5 s"
        assert answer.is_done
        assert ended(first) == [1]
        assert health.result() == "rank 1 (mac1) has not answered for 5 s"
        second.resume()
        assert ended(second) == [1]


def _first_failure(url: str) -> str:
    """Probe as a supervisor does; return what the first failure says."""
    with httpx.Client(timeout=10) as client:
        while (response := client.get(f"{url}/health")).status_code == 200:
            sleep(0.1)
    return str(response.json()["error"]["message"])


def test_a_first_rank_that_is_stopped_ends_the_others() -> None:
    with ranks() as processes:
        first, second = processes
        first.pause()
        assert ended(second) == [1]
        assert "rank 0 (mac0) has not answered for 5 s" in second.log
        first.resume()
        assert ended(first) == [1]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_while_it_loads_ends_the_other(killed: int) -> None:
    with loading_ranks() as processes:
        processes[0].wait_for_line("loading ")
        processes[killed].kill()
        assert ended(processes[1 - killed]) == [1]
        assert f"rank {killed} (mac{killed}) is gone" in processes[1 - killed].log


@contextmanager
def stuck(number: int, at: str, step_timeout: float) -> Iterator[list[ServerProcess]]:
    """Start two ranks, one of which never goes on at something, and then the other one waits for it in MLX."""
    shared = settings(step_timeout=step_timeout)
    fault = {"module": stuck_rank.__name__, stuck_rank.STUCK: f"{number} {at}"}
    with rank(shared, 0, **fault) as first, rank(shared, 1, **fault) as second:
        yield [first, second]


@pytest.mark.parametrize("number", [0, 1])
def test_a_load_in_which_a_rank_never_goes_on_ends_all(number: int) -> None:
    with stuck(number, stuck_rank.LOADING, step_timeout=1) as processes:
        processes[number].wait_for_line(stuck_rank.LINE)
        assert ended(*processes, within=3 + ENDED_WITHIN) == [1, 1]
        for process in processes:
            said = [line for line in process.log.splitlines() if line.startswith("rank ")]
            assert said == [
                "rank 0 (mac0) has stood still for 3 s, or waits in MLX for a rank that has"
            ]


def test_a_step_in_which_a_rank_never_goes_on_ends_all() -> None:
    with stuck(1, stuck_rank.STEP, step_timeout=2) as processes:
        answer = ask(url_of(processes[0]))
        assert answer.error is not None
        assert answer.error["message"] == "the model does not respond: its step has taken too long"
        assert answer.is_done or answer.status == 503
        assert ended(*processes) == [1, 1]
        assert "a step of the model has not ended for " in processes[0].log
        assert processes[1].log.splitlines()[-1] == "rank 0 (mac0) has failed"


def test_a_slow_rank_is_waited_for() -> None:
    with ranks() as processes:
        first, second = processes
        whole = ask(url_of(first), num_tokens=20)
        has_answered = threading.Event()

        def slow_down() -> None:
            while not has_answered.is_set():
                second.pause()
                sleep(0.2)
                second.resume()
                sleep(0.02)

        slow = threading.Thread(target=slow_down)
        slow.start()
        answer = ask(url_of(first), num_tokens=20)
        has_answered.set()
        slow.join()
        assert whole.is_done
        assert (answer.tokens, answer.error, answer.is_done) == (whole.tokens, None, True)


def test_the_first_rank_drains_and_then_all_end_well() -> None:
    with ranks() as processes:
        first, second = processes
        answer = ask(url_of(first), lambda: first.send_signal(signal.SIGTERM), num_tokens=60)
        assert (answer.is_done, answer.error) == (True, None)
        assert ended(first, second) == [0, 0]


def test_a_rank_that_is_told_to_end_leaves_and_the_first_ends_as_lost() -> None:
    with ranks() as processes:
        first, second = processes
        answer = ask(url_of(first), lambda: second.send_signal(signal.SIGTERM))
        assert answer.error is not None
        assert answer.error["message"] == "rank 1 (mac1) was stopped by SIGTERM"
        assert ended(first, second) == [1, 128 + signal.SIGTERM]
