"""Servers that are killed, stopped or restarted behind each router: docs/replicas.md has the table.

The servers are real but for their model, which does as it is told.  What had not begun is never lost, and a
response that another server gives is the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import httpx
import pytest

from scripts.cluster.router import ROUTERS
from tests.support.asks import Answer, Ask, End, Load, counted
from tests.support.clusters import StartCluster
from tests.support.router_faults import BOUND, LOST, Faults, scripted_python

# Of a stream whose server is gone.
CUT: Final[Mapping[str, End]] = {
    "smg": End.ERROR_EVENT,
    "vllm-router": End.CUT,
    "haproxy": End.CUT,
}
# Those that end what waits for a server that does not answer; behind the others it waits until that is killed.
ENDS_THE_WAIT: Final = {"haproxy"}
# What asks an endpoint, and the status of those that a router does not send again.
TURN: Final = {"role": "user", "content": "hi"}
BODIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [TURN], "max_tokens": 9},
}
SENT_ONCE: Final = {"vllm-router": {"/v1/responses": 502, "/v1/messages": 502}}
# By all tests of a router.
NUM_KILLS: Final = 30


@pytest.fixture(scope="module", params=ROUTERS)
def faults(
    request: pytest.FixtureRequest,
    model: Path,
    start_cluster: StartCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Faults]:
    folder = tmp_path_factory.mktemp("faults")
    (folder / "slow").write_text("1")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SERVER_PYTHON", str(scripted_python(folder)))
        cluster = start_cluster(request.param, num_replicas=3, models=f"slow={folder / 'slow'}")
    with cluster:
        yield Faults(cluster, folder)


@pytest.fixture(autouse=True)
def healed(faults: Faults) -> None:
    faults.heal()


def check(answers: Sequence[Answer], text: str) -> None:
    """Fail unless all are whole, and in time."""
    wrong = [a for a in answers if a.end is not End.COMPLETE or a.text != text or a.seconds > BOUND]
    assert wrong == []


def check_cut(faults: Faults, answers: Sequence[Answer], text: str) -> int:
    """Fail unless each is whole, or a beginning that ends as this router ends it; return how many are cut."""
    cut = [answer for answer in answers if answer.end is not End.COMPLETE]
    assert {answer.end for answer in cut} <= {CUT[faults.router.name]}, cut
    assert all(answer.status == 200 and text.startswith(answer.text) for answer in cut), cut
    check([answer for answer in answers if answer.end is End.COMPLETE], text)
    return len(cut)


@pytest.mark.parametrize("turn", range(3))
def test_idle_servers_are_killed(faults: Faults, turn: int) -> None:
    replicas = faults.cluster.replicas
    for replica in (replicas[turn], replicas[turn - 1]):
        faults.kill(replica)
        asks = [faults.ask("say one two", stream=index % 2 == 0) for index in range(4)]
        check([ask.answer() for ask in asks], "one two")
        check([faults.ask("say one", stream=False).answer() for _ in range(4)], "one")


@pytest.mark.parametrize("turn", range(2))
def test_servers_are_killed_under_load(faults: Faults, turn: int) -> None:
    for _ in range(2):
        with Load(faults.cluster.url) as load:
            load.wait_for(6)
            faults.kill(faults.busiest())
            load.wait_for(12)
        check_cut(faults, load.answers, load.text)


@pytest.mark.parametrize("turn", range(3))
def test_servers_are_killed_while_they_read_a_prompt(faults: Faults, turn: int) -> None:
    for _ in range(2):
        held = [faults.held(stream=stream) for stream in (True, False)]
        faults.kill(faults.busiest())
        for _, gate in held:
            gate.touch()
        check([ask.answer() for ask, _ in held], "one two three")


@pytest.mark.parametrize("turn", range(3))
def test_servers_are_killed_in_the_middle_of_streams(faults: Faults, turn: int) -> None:
    asks = faults.begun(6)
    busy = faults.busy()
    idle = [replica for replica in faults.cluster.replicas if replica not in busy]
    faults.kill_at_once([*busy, *idle][:2])
    assert check_cut(faults, [ask.answer() for ask in asks], counted(60)) > 0


@pytest.mark.parametrize("turn", range(2))
def test_a_server_is_killed_while_it_loads_a_model(faults: Faults, turn: int) -> None:
    faults.hold_slow_model()
    ask = faults.ask("say loaded", model="slow")
    if is_unknown := faults.router.name == "smg":
        # It knows a server's first model only.
        assert ask.answer().status == 404
        ask = Ask(faults.cluster.replicas[turn].url, "say loaded", model="slow")
    loading = faults.busiest()
    others = [faults.ask("say one", stream=False) for _ in range(4)]
    faults.kill(loading)
    faults.load_slow_model()
    check([other.answer() for other in others], "one")
    if is_unknown:
        assert ask.answer().end is End.CUT
    else:
        check([ask.answer()], "loaded")


@pytest.mark.parametrize("turn", range(3))
def test_servers_are_killed_at_once(faults: Faults, turn: int) -> None:
    with Load(faults.cluster.url) as load:
        load.wait_for(6)
        faults.kill_at_once([faults.cluster.replicas[turn - i] for i in range(2)])
        faults.until_known()
        load.wait_for(12)
    lost = LOST[faults.router.name]
    check_cut(faults, [a for a in load.answers if a.status not in lost], load.text)
    assert all(answer.seconds <= BOUND for answer in load.answers)
    check([faults.ask("say one").answer() for _ in range(4)], "one")


def test_a_server_is_killed_and_each_endpoint_is_asked(faults: Faults) -> None:
    faults.kill(faults.cluster.replicas[0])

    def status(path: str) -> int:
        headers = {"Authorization": f"Bearer {uuid4()}"}
        body = {"model": "small", **BODIES[path]}
        url = faults.cluster.url + path
        return httpx.post(url, json=body, headers=headers, timeout=BOUND).status_code

    with ThreadPoolExecutor() as threads:
        found = {path: [threads.submit(status, path) for _ in range(6)] for path in BODIES}
    sent_once = SENT_ONCE.get(faults.router.name, {})
    for path, statuses in found.items():
        assert {status.result() for status in statuses} <= {200, sent_once.get(path, 200)}, path


def test_servers_are_restarted_one_after_the_other_under_load(faults: Faults) -> None:
    streams = faults.begun(3)
    with Load(faults.cluster.url, to=20) as load:
        for replica in faults.cluster.replicas:
            load.wait_for(4)
            assert replica.stop() == 0
            load.wait_for(4)
            faults.heal()
    check(load.answers, load.text)
    check([stream.answer() for stream in streams], counted(60))


def test_a_server_leaves_and_joins_under_load(faults: Faults) -> None:
    url = faults.cluster.replicas[0].url
    with Load(faults.cluster.url, to=20) as load:
        load.wait_for(4)
        faults.router.leave(url)
        load.wait_for(8)
        faults.router.join(url)
        load.wait_for(8)
    check(load.answers, load.text)


def test_a_server_stops_answering(faults: Faults) -> None:
    held, gate = faults.held(stream=False)
    [stopped] = faults.busy()
    streams = faults.begun(4, to=30)
    stopped.pause()
    at_once = faults.spread("say one", 8)
    faults.until_known()
    # Those which the others have: they wait for nothing.
    assert any(ask.is_over for ask in at_once)
    check([faults.ask("say one").answer() for _ in range(4)], "one")
    gate.touch()
    if faults.router.name in ENDS_THE_WAIT:
        check([held.answer()], "one two three")
    else:
        assert not held.is_over
        faults.kill(stopped)
        check([held.answer()._replace(seconds=0.0)], "one two three")
    check_cut(faults, [stream.answer() for stream in streams], counted(30))
    stopped.resume()
    check([ask.answer() for ask in at_once], "one")


def test_these_were_many_kills(faults: Faults) -> None:
    assert faults.num_kills >= NUM_KILLS
