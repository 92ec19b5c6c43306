"""Faults inside the server, at random steps: who is concerned fails alone, the others never know."""

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest

from scripts.server_process import Address, Server, wait_until
from scripts.soak.client import CHAT, Outcome, ask, ask_all
from scripts.soak.departures import reset_in_the_stream
from tests.support.faulty_server import POISON_TOKEN, Fault, seed_for
from tests.support.hostile.apis import MESSAGES
from tests.support.live import (
    golden_cases,
    golden_request,
    live_server,
    status_of,
    strange,
    warm_up,
)
from tests.support.responses import events_in
from tests.support.small_model import Case

pytestmark = pytest.mark.timeout(240)

COMMAND: Final = ("-m", "tests.support.faulty_server")
NUM_BYSTANDERS: Final = 12
SEATS: Final = 8
# The latest step at which a fault may happen; every golden answer is longer.
LAST_STEP: Final = 5


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with live_server(COMMAND, step_timeout="1.5") as started:
        yield warm_up(started)
        assert started.stop() == 0


def poisoned(fault: Fault, step: int, **fields: Any) -> dict[str, Any]:
    """Return a request that is answered until, at a step, it brings a fault along."""
    case = golden_cases(1)[0]
    return golden_request(case, max_tokens=40, ignore_eos=True, seed=seed_for(fault, step)) | fields


async def ask_beside_others(
    address: Address, *bodies: dict[str, Any]
) -> tuple[list[Outcome], list[Case], list[Outcome]]:
    """Ask amid golden requests; return what became of these, and of the golden ones."""
    cases = golden_cases(NUM_BYSTANDERS)
    golden = [golden_request(case, stream=i % 4 > 0) for i, case in enumerate(cases)]
    middle = 5  # so that all asked run at once with some of the others
    requests = [*golden[:middle], *bodies, *golden[middle:]]
    outcomes = await ask_all(address, CHAT, requests)
    asked = outcomes[middle : middle + len(bodies)]
    return asked, cases, outcomes[:middle] + outcomes[middle + len(bodies) :]


async def post_beside_others(
    address: Address, path: str, *bodies: dict[str, Any]
) -> list[httpx.Response]:
    """Send bodies to another API amid golden requests, which must not notice."""
    async with (
        httpx.AsyncClient(base_url=f"http://{address.host}:{address.port}", timeout=60) as client,
        asyncio.TaskGroup() as group,
    ):
        beside = group.create_task(ask_beside_others(address))
        asked = [group.create_task(client.post(path, json=body)) for body in bodies]
    _, cases, others = beside.result()
    assert strange(cases, others) == []
    return [task.result() for task in asked]


def has_failed(outcome: Outcome) -> bool:
    """True if the server said so: with a status, or by an event of a stream that it then ended."""
    if outcome.error is None or outcome.broken is not None or not outcome.is_done:
        return False
    is_stream = "event-stream" in outcome.headers["content-type"]
    return outcome.status == (200 if is_stream else 500)


def num_failed_in_steps(log: str) -> int:
    return sum(map(int, re.findall(r"a step of (\d+) requests failed", log)))


@pytest.mark.parametrize("fault", [Fault.FORWARD, Fault.MEMORY])
def test_a_step_that_fails_fails_its_own_requests_only(
    server: Server, address: Address, fault: Fault
) -> None:
    log_before = len(server.log)
    step = random.Random(fault).randrange(LAST_STEP)
    (poison,), cases, others = asyncio.run(ask_beside_others(address, poisoned(fault, step)))
    assert has_failed(poison), poison
    failed = [has_failed(outcome) for outcome in others]
    served = [i for i, is_failed in enumerate(failed) if not is_failed]
    assert strange([cases[i] for i in served], [others[i] for i in served]) == []
    assert 1 + sum(failed) == num_failed_in_steps(server.log[log_before:]) <= SEATS


@pytest.mark.parametrize("fault", [Fault.NOT_A_NUMBER, Fault.SAMPLER])
def test_requests_that_cannot_be_sampled_fail_alone(address: Address, fault: Fault) -> None:
    rng = random.Random(fault)
    bodies = [poisoned(fault, rng.randrange(LAST_STEP), stream=stream) for stream in (True, False)]
    poisons, cases, others = asyncio.run(ask_beside_others(address, *bodies))
    assert [str(poison) for poison in poisons if not has_failed(poison)] == []
    assert strange(cases, others) == []


@pytest.mark.parametrize("fault", [Fault.NOT_A_NUMBER, Fault.SAMPLER])
def test_messages_that_cannot_be_sampled_fail_alone(address: Address, fault: Fault) -> None:
    # Greedy: a random token may be the last one before the fault is due.
    body = {"messages": golden_cases(1)[0].messages, "temperature": 0, "top_k": seed_for(fault, 2)}

    bodies = [body | {"stream": stream} for stream in (True, False)]
    streamed, whole = asyncio.run(post_beside_others(address, MESSAGES, *bodies))
    assert (streamed.status_code, whole.status_code) == (200, 500)
    assert whole.json()["error"]["type"] == "api_error"
    *events, last = streamed.text.removesuffix("\n\n").split("\n\n")
    assert events[0].startswith("event: message_start\n")
    assert last.startswith('event: error\ndata: {"type": "error", "error": {"type": "api_error"')


@pytest.mark.parametrize("fault", [Fault.NOT_A_NUMBER, Fault.SAMPLER])
def test_a_response_that_cannot_be_sampled_fails_alone(
    server: Server, address: Address, fault: Fault
) -> None:
    body = {
        "input": golden_cases(1)[0].messages,
        "max_output_tokens": 40,
        "seed": seed_for(fault, 1),
    }

    bodies = [body, body | {"stream": True}, body | {"background": True}]
    whole, streamed, begun = asyncio.run(post_beside_others(address, "/v1/responses", *bodies))
    url = f"{server.url}/v1/responses/{begun.json()['id']}"
    while (background := httpx.get(url).json())["status"] in ("queued", "in_progress"):
        pass
    assert whole.status_code == 500
    failed = events_in(streamed.text)[-1]["response"]
    for each in (failed, background):
        assert (each["status"], each["error"]["code"]) == ("failed", "server_error")


def test_a_text_that_cannot_be_decoded_fails_its_request_alone(address: Address) -> None:
    bodies = [
        golden_request(golden_cases(1)[0], stream=stream, n=2, logit_bias={str(POISON_TOKEN): 100})
        for stream in (True, False)
    ]
    poisons, cases, others = asyncio.run(ask_beside_others(address, *bodies))
    assert [str(poison) for poison in poisons if not has_failed(poison)] == []
    assert strange(cases, others) == []


def test_connections_that_are_reset_concern_no_other(address: Address) -> None:
    async def reset_some() -> tuple[list[Case], list[Outcome]]:
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(ask_beside_others(address))
            for seed in range(8):
                group.create_task(reset_in_the_stream(address, random.Random(seed)))
        _, cases, others = asked.result()
        return cases, others

    assert strange(*asyncio.run(reset_some())) == []


def test_a_step_that_does_not_end_is_noticed_and_ends_what_waits_for_it(address: Address) -> None:
    """The engine is not lost: once the step ends after all, the server serves again."""

    async def stall() -> tuple[Outcome, Outcome]:
        poison = asyncio.create_task(ask(address, CHAT, poisoned(Fault.STALL, 2)))
        while await status_of(address, "/health") == 200:
            pass
        ready = await status_of(address, "/ready")
        rejected = await ask(address, CHAT, golden_request(golden_cases(1)[0]))
        assert ready == 503
        return await poison, rejected

    poison, rejected = asyncio.run(stall())
    assert poison.is_done
    for outcome, status in ((poison, 200), (rejected, 503)):
        assert outcome.status == status
        assert outcome.error is not None
        assert outcome.error["code"] == "engine_stalled"
    wait_until(lambda: asyncio.run(status_of(address, "/health")) == 200, "it stays unhealthy")


def test_an_engine_that_fails_again_and_again_says_so_until_it_works_again(
    address: Address,
) -> None:
    async def fail(num_times: int) -> list[int | None]:
        statuses = []
        for _ in range(num_times):
            assert has_failed(await ask(address, CHAT, poisoned(Fault.FORWARD, 0)))
            statuses.append(await status_of(address, "/health"))
        return statuses

    statuses = asyncio.run(fail(3))
    assert statuses == [200, 200, 503]
    assert asyncio.run(status_of(address, "/ready")) == 503
    # It takes requests all the same: only a step that goes well shows that it works again.
    (outcome,) = asyncio.run(ask_all(address, CHAT, [golden_request(golden_cases(1)[0])]))
    assert outcome.is_complete


def test_an_engine_that_fails_again_and_again_ends_the_process_if_the_operator_wants_that() -> None:
    with live_server(COMMAND, exit_on_engine_failure="true") as server:
        address = server.address()

        async def fail_thrice() -> None:
            for _ in range(3):
                assert has_failed(await ask(address, CHAT, poisoned(Fault.FORWARD, 0)))

        asyncio.run(fail_thrice())
        assert server.wait() == 1
