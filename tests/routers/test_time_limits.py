"""`--request-timeout-secs` of routers: why no file in deploy/ sets it.

It frees what waits for a server that does not answer, but it ends a stream that goes on, too.
"""

import pytest

from scripts.server_process import wait_until
from tests.support.asks import End, counted
from tests.support.clusters import StartCluster
from tests.support.router_faults import Faults, scripted_python


@pytest.fixture(scope="module", params=["smg", "vllm-router"])
def faults(
    request: pytest.FixtureRequest,
    start_cluster: StartCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Faults:
    folder = tmp_path_factory.mktemp("limits")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SERVER_PYTHON", str(scripted_python(folder)))
        cluster = start_cluster(request.param, options=("--request-timeout-secs", "5"))
    return Faults(cluster, folder)


def test_it_sends_what_waits_to_another_server(faults: Faults) -> None:
    held, gate = faults.held(stream=False)
    [stopped] = faults.busy()
    stopped.pause()
    gate.touch()
    answer = held.answer()
    stopped.resume()
    assert (answer.end, answer.text) == (End.COMPLETE, "one two three")
    wait_until(lambda: not faults.busy(), "a server still has a request")


def test_it_cuts_a_stream_that_goes_on(faults: Faults) -> None:
    answer = faults.ask("count 999").answer()
    assert answer.end in (End.ERROR_EVENT, End.CUT)
    assert answer.has_begun
    assert counted(999).startswith(answer.text)
