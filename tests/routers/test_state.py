"""What one server alone knows, and which routers lead its client back to that server.

docs/replicas.md has it as a table.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import pytest

from scripts.cluster.cluster import Cluster
from scripts.cluster.replica import Replica
from tests.support.clusters import TIMEOUT, StartCluster

# So many that chance leads them to both servers, and not all to the right one; some at once, since routers
# treat servers without load otherwise.
NUM_CLIENTS: Final = 24
NUM_AT_ONCE: Final = 8

QUESTION: Final = {
    "model": "small",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "hi"}],
}
LINE: Final = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": QUESTION}


class Client:
    """One client, whose requests all have the same header; each method returns the JSON of a 200."""

    def __init__(self, url: str, name: str, value: str) -> None:
        self._http = httpx.Client(base_url=url, headers={name: value}, timeout=TIMEOUT)
        # Of its own: routers by prompts would lead equal ones to the same server.
        self._input = f"{value}, " * 20

    def get(self, path: str) -> Any:
        return self._answered(self._http.get(path))

    def post(self, path: str, **fields: Any) -> Any:
        return self._answered(self._http.post(path, json=fields))

    def respond(self, **fields: Any) -> str:
        """Return the id of a stored response."""
        fields = {"model": "small", "input": self._input, "max_output_tokens": 2, **fields}
        return str(self.post("/v1/responses", **fields)["id"])

    def upload(self) -> str:
        """Return the id of a file with one line of a batch."""
        files = {"file": ("lines.jsonl", httpx.Request("POST", "http://-", json=LINE).content)}
        data = {"purpose": "batch"}
        return str(self._answered(self._http.post("/v1/files", files=files, data=data))["id"])

    def _answered(self, response: httpx.Response) -> Any:
        assert response.status_code == 200, f"{response.request.url}: {response.text}"
        return response.json()


def goes_on(client: Client) -> None:
    client.respond(previous_response_id=client.respond())


def reads_a_response(client: Client) -> None:
    client.get(f"/v1/responses/{client.respond(background=True)}")


def goes_on_in_a_conversation(client: Client) -> None:
    conversation = client.post("/v1/conversations")["id"]
    client.respond(conversation=conversation)
    client.get(f"/v1/conversations/{conversation}/items")


def begins_a_batch(client: Client) -> None:
    fields = {"endpoint": LINE["url"], "completion_window": "24h"}
    batch = client.post("/v1/batches", input_file_id=client.upload(), **fields)
    client.get(f"/v1/batches/{batch['id']}")


def names_a_file(client: Client) -> None:
    part = {"type": "file", "file": {"file_id": client.upload()}}
    fields = {**QUESTION, "messages": [{"role": "user", "content": [part]}]}
    client.post("/v1/chat/completions", **fields)


STORIES: Final = (
    goes_on,
    reads_a_response,
    goes_on_in_a_conversation,
    begins_a_batch,
    names_a_file,
)


def each(cluster: Cluster, header: str, story: Callable[[Client], None]) -> None:
    """Let many clients do the same, each with its own value of a header."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        clients = [Client(cluster.url, header, f"Bearer {n}") for n in range(NUM_CLIENTS)]
        list(threads.map(story, clients))


def num_finished(replica: Replica) -> float:
    metrics = httpx.get(f"{replica.url}/metrics").text.splitlines()
    counts = [line for line in metrics if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in counts)


@pytest.fixture
def haproxy(shared_cluster: StartCluster) -> Cluster:
    return shared_cluster("haproxy")


@pytest.fixture
def smg(shared_cluster: StartCluster) -> Cluster:
    return shared_cluster("smg")


@pytest.fixture
def vllm_router(shared_cluster: StartCluster) -> Cluster:
    return shared_cluster("vllm-router")


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("header", ["Authorization", "X-API-Key"])
def test_haproxy_leads_a_key_to_its_server(
    haproxy: Cluster, header: str, story: Callable[[Client], None]
) -> None:
    each(haproxy, header, story)
    assert all(num_finished(replica) > 0 for replica in haproxy.replicas)


def test_haproxy_gives_a_key_one_server_however_much_it_asks(haproxy: Cluster) -> None:
    before = [num_finished(replica) for replica in haproxy.replicas]
    with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
        client = Client(haproxy.url, "Authorization", "Bearer busy")
        list(threads.map(lambda _: client.respond(), range(NUM_CLIENTS)))
    after = [num_finished(replica) for replica in haproxy.replicas]
    assert sorted(a - b for a, b in zip(after, before, strict=True)) == [0, NUM_CLIENTS]


def test_haproxy_takes_a_key_for_the_same_in_both_headers(haproxy: Cluster) -> None:
    for number in range(NUM_CLIENTS):
        stored = Client(haproxy.url, "Authorization", f"Bearer {number}").respond()
        Client(haproxy.url, "X-API-Key", str(number)).get(f"/v1/responses/{stored}")


@pytest.mark.parametrize("path", ["/metrics", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_haproxy_does_not_pass_on_what_concerns_each_server(haproxy: Cluster, path: str) -> None:
    assert httpx.post(haproxy.url + path).status_code == 404


def test_smg_leads_a_session_to_its_server(smg: Cluster) -> None:
    each(smg, "X-Session-Id", goes_on)
    assert all(num_finished(replica) > 0 for replica in smg.replicas)


def test_smg_looks_up_ids_in_a_store_of_its_own(smg: Cluster) -> None:
    client = Client(smg.url, "X-Session-Id", "1")
    assert httpx.get(f"{smg.url}/v1/responses/{client.respond()}").status_code == 404
    conversation = client.post("/v1/conversations")["id"]
    with pytest.raises(AssertionError, match=f"Conversation with id '{conversation}' not found"):
        client.respond(conversation=conversation)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches", "/tokenize", "/api/chat"])
def test_smg_does_not_know_the_path(smg: Cluster, path: str) -> None:
    assert httpx.post(smg.url + path, json={}).status_code == 404


def test_vllm_router_leads_a_session_to_its_server_with_a_policy_for_that(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster("vllm-router", options=("--policy", "sticky_least_loaded"))
    for story in (goes_on, reads_a_response, goes_on_in_a_conversation):
        each(cluster, "X-Session-Id", story)
    assert all(num_finished(replica) > 0 for replica in cluster.replicas)


def test_vllm_router_leads_a_session_to_its_server_beside_kv_events(
    start_cluster: StartCluster,
) -> None:
    cluster = start_cluster("vllm-router", kv_event_model="small")
    each(cluster, "X-Session-Id", goes_on)
    assert all(num_finished(replica) > 0 for replica in cluster.replicas)


def test_vllm_router_finds_a_response_by_its_id(vllm_router: Cluster) -> None:
    """By its policy for prompts it pins nothing: whether a response goes on from another one is chance."""
    each(vllm_router, "X-Session-Id", reads_a_response)
    assert all(num_finished(replica) > 0 for replica in vllm_router.replicas)


def test_vllm_router_takes_no_uploads(vllm_router: Cluster) -> None:
    with pytest.raises(AssertionError, match="Invalid JSON body"):
        Client(vllm_router.url, "X-Session-Id", "1").upload()


def test_replicas_take_each_others_signatures(haproxy: Cluster) -> None:
    keys = {(replica.data / "signing.key").read_bytes() for replica in haproxy.replicas}
    assert len(keys) == 1
