"""What every router does with two servers that work."""

import httpx
import pytest

from scripts.cluster.cluster import Cluster
from scripts.cluster.router import ROUTERS
from tests.support.clusters import TIMEOUT, StartCluster


@pytest.fixture(params=ROUTERS)
def cluster(request: pytest.FixtureRequest, shared_cluster: StartCluster) -> Cluster:
    return shared_cluster(request.param)


def test_requests_are_passed_on(cluster: Cluster) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=TIMEOUT)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 3


def test_requests_that_pass_their_time_limit_leave_no_server_out(cluster: Cluster) -> None:
    body = {"model": "small", "prompt": "hi", "max_tokens": 1}

    def status(**fields: float) -> int:
        url = f"{cluster.url}/v1/completions"
        return httpx.post(url, json=body | fields, timeout=TIMEOUT).status_code

    assert [status(timeout=1e-6) for _ in range(2)] == [504] * 2
    assert [status() for _ in range(4)] == [200] * 4


def test_one_leaves_and_joins_again(cluster: Cluster) -> None:
    urls = {replica.url for replica in cluster.replicas}
    last = cluster.replicas[-1].url
    cluster.router.leave(last)
    assert cluster.router.healthy() == urls - {last}
    cluster.router.join(last)
    assert cluster.router.healthy() == urls
