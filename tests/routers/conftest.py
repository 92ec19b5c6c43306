"""Servers behind the routers' real programs: `make test-routers`.

The routers have an environment of their own; the servers run in the main one, whose interpreter
`SERVER_PYTHON` names.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from scripts.cluster.cluster import Cluster
from scripts.server_process import ROOT
from tests.support.clusters import TIMEOUT, StartCluster

_COPY: Final = (
    "import shutil, sys; from tests.support.small_model import small_model; "
    "shutil.copytree(small_model(), sys.argv[1])"
)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model that starts in a second; its name is `small`."""
    folder = tmp_path_factory.mktemp("models") / "small"
    python = os.environ.get("SERVER_PYTHON", sys.executable)
    subprocess.run([python, "-c", _COPY, str(folder)], cwd=ROOT, check=True, timeout=TIMEOUT)
    return folder


@pytest.fixture(scope="session")
def shared_cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """Return what starts a router's cluster once for all tests that leave it as it is."""
    with ExitStack() as stack:
        yield cache(_starter(stack, model, tmp_path_factory))


@pytest.fixture(scope="module")
def start_cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartCluster]:
    """Return what starts a cluster, of the tests of one file.

    It takes a router's name, and of `Cluster` `options` and `kv_event_model`; all else are settings of the replicas.
    """
    with ExitStack() as stack:
        yield _starter(stack, model, tmp_path_factory)


def _starter(
    stack: ExitStack, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> StartCluster:
    """Return what starts a cluster of the small model, waits until it routes, and leaves its end to the stack."""

    def start(
        router: str,
        *,
        num_replicas: int = 2,
        options: tuple[str, ...] = (),
        kv_event_model: str | None = None,
        **settings: str,
    ) -> Cluster:
        made = Cluster(
            num_replicas,
            tmp_path_factory.mktemp(router),
            router=router,
            settings={"model": str(model), "cpu_threads": "1", **settings},
            kv_event_model=kv_event_model,
            options=options,
        )
        cluster = stack.enter_context(made)
        cluster.start()
        cluster.wait_until_ready()
        return cluster

    return start
