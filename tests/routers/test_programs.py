"""What deploy/ says to routers, as their real programs take it."""

import os
import re
import subprocess
from typing import Final

import httpx
import pytest

from scripts.cluster.router import FILES, PATH, ROUTERS
from scripts.server_process import ROOT
from tests.support.clusters import TIMEOUT, StartCluster

FLAG: Final = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
HELP: Final = {
    "smg": ["smg", "launch", "--help"],
    "vllm-router": ["vllm-router", "--help"],
}


def output(*command: str) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": PATH},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT,
    )
    return done.stdout


@pytest.mark.parametrize("name", HELP)
def test_every_flag_of_a_script_exists(name: str) -> None:
    flags = set(FLAG.findall((FILES / f"{name}.sh").read_text(encoding="utf-8")))
    assert len(flags) > 8
    assert flags - set(FLAG.findall(output(*HELP[name]))) == set()


def test_haproxy_takes_its_file() -> None:
    output("haproxy", "-c", "-f", str(FILES / "haproxy.cfg"))


def test_smg_has_the_paths_of_the_probes(shared_cluster: StartCluster) -> None:
    """They need no key, also where all else does."""
    text = (ROOT / "deploy" / "kubernetes" / "router.yaml").read_text(encoding="utf-8")
    paths = re.findall(r"httpGet: { path: (\S+),", text)
    assert len(paths) == 2
    cluster = shared_cluster("smg")
    assert [httpx.get(cluster.url + path).status_code for path in paths] == [200, 200]


def test_smg_takes_one_key_of_its_servers_and_those_of_tenants(start_cluster: StartCluster) -> None:
    """It passes on what it takes, so that the servers must have it, too."""
    tenants = ("--tenant-api-key", "one:m", "--tenant-api-key", "two:n")
    cluster = start_cluster("smg", api_keys="k,l,m", options=tenants)
    assert httpx.post(f"{cluster.url}/workers", json={"url": cluster.url}).status_code == 401
    for key, status in (("k", 200), ("l", 401), ("m", 200), ("n", 401)):
        headers = {"Authorization": f"Bearer {key}"}
        body = {"model": "small", "prompt": "hi", "max_tokens": 2}
        response = httpx.post(
            f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT
        )
        assert response.status_code == status
    assert httpx.get(f"{cluster.url}/readiness").status_code == 200


@pytest.mark.parametrize("router", ROUTERS)
def test_pages_of_other_sites_may_not_call_a_router(
    router: str, shared_cluster: StartCluster
) -> None:
    headers = {
        "Origin": "http://site.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    url = f"{shared_cluster(router).url}/v1/responses"
    response = httpx.options(url, headers=headers, timeout=TIMEOUT)
    assert "access-control-allow-origin" not in response.headers
