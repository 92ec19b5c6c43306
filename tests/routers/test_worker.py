"""What routers read of a server: its model's name, and the tokens of a prompt."""

import re
from collections import Counter
from typing import Any, Final

import httpx

from scripts.cluster.ports import HOST, free_port
from tests.support.clusters import TIMEOUT, StartCluster

# vllm-router's own counter, by outcome.
DECISIONS: Final = re.compile(
    r'^vllm_router_prefix_routing_decisions_total\{.*outcome="(\w+)"\} (\d+)$', re.MULTILINE
)


def test_vllm_router_finds_prefixes_by_the_tokens_of_a_server(start_cluster: StartCluster) -> None:
    port = free_port()
    cluster = start_cluster("vllm-router", options=("--prometheus-port", str(port)))
    text = "One prompt, and always the same one. " * 4
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": text}]},
        # There it asks /tokenize.
        "/v1/completions": {"prompt": text},
    }
    for path, body in bodies.items():
        for _ in range(3):
            asked = {"model": "small", "max_tokens": 1, **body}
            response = httpx.post(cluster.url + path, json=asked, timeout=TIMEOUT)
            assert response.status_code == 200
    page = httpx.get(f"http://{HOST}:{port}/metrics", timeout=TIMEOUT).text
    decisions = Counter({outcome: int(number) for outcome, number in DECISIONS.findall(page)})
    assert decisions == {"prefix_miss": 2, "prefix_hit": 4}


def test_smg_knows_the_model_of_its_servers(shared_cluster: StartCluster) -> None:
    cluster = shared_cluster("smg")
    listed = httpx.get(f"{cluster.url}/v1/models", timeout=TIMEOUT).json()["data"]
    assert [model["id"] for model in listed] == ["small"]
    workers = httpx.get(f"{cluster.url}/workers", timeout=TIMEOUT).json()["workers"]
    assert {worker["model_id"] for worker in workers} == {"small"}
