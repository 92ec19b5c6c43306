"""One rank of a test, as a process: see `tests.support.ranks`."""

import pickle
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import batching.backend  # noqa: F401  # its BLAS has to come before MLX

# isort: split
from batching.backend.builder.ranked import build_ranked_engine, run_member
from batching.errors import EngineError
from batching.ranks.control_port import ControlPort
from batching.ranks.leader import TcpLeader
from batching.ranks.member import TcpMember, join_ranks
from tests.support.ranks import HOST, Job, RankSpec

_JOIN_SECONDS = 60.0


def main(spec: RankSpec) -> None:
    results: list[Any] = []
    with _linked(spec) as link:
        for job in spec.jobs:
            with job.fault_of(spec.rank):
                try:
                    results.append(_done(job, spec.rank, link))
                except EngineError as error:
                    results.append(f"{type(error).__name__}: {error}")
                finally:
                    spec.results.write_bytes(pickle.dumps(results))


def _done(job: Job, rank: int, link: TcpLeader | TcpMember) -> Any:
    config = job.config_of(rank)
    if isinstance(link, TcpMember):
        return run_member(config, link, "ring")
    return job.scenario(config, partial(build_ranked_engine, leader=link, backend="ring"))


@contextmanager
def _linked(spec: RankSpec) -> Iterator[TcpLeader | TcpMember]:
    hosts = [f"host{rank}" for rank in range(spec.num_ranks)]
    link: TcpLeader | TcpMember
    if spec.rank == 0:
        port = ControlPort(socket.create_server((HOST, spec.port)), hosts)
        link = TcpLeader(port.join(_JOIN_SECONDS), hosts, _note)
        # Models are loaded again and again.
        link.allow_silence(_JOIN_SECONDS)
    else:
        address = (HOST, spec.port)
        link = join_ranks(address, hosts, spec.rank, _JOIN_SECONDS, _note)
    try:
        yield link
    finally:
        link.close()


def _note(_: Exception) -> None:
    """Nothing is done when a link ends: calls that use it raise."""


if __name__ == "__main__":
    main(pickle.loads(Path(sys.argv[1]).read_bytes()))
