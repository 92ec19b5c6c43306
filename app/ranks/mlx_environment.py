"""The environment from which `mx.distributed` learns of the ranks, as `mlx.launch` sets it."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Final

from app.ranks.hostfile import Host
from app.settings import SettingsError, env_name

RANK_VARIABLE: Final = "MLX_RANK"
# Rank 0 has started this process, and holds the other end of its standard input.
LAUNCHED_VARIABLE: Final = "MLX_RANK_LAUNCHED"


@dataclass(frozen=True)
class MlxEnvironment:
    """Variables of a rank.

    files: contents by the variables that name files with them.
    """

    variables: Mapping[str, str]
    files: Mapping[str, str]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Set the variables of this process, and write the files, for as long as the context lasts."""
        with ExitStack() as stack:
            variables = dict(self.variables)
            for name, text in self.files.items():
                file = stack.enter_context(NamedTemporaryFile("w", suffix=".json"))
                file.write(text)
                file.flush()
                variables[name] = file.name
            before = {name: os.environ.get(name) for name in variables}
            stack.callback(_restore, before)
            os.environ.update(variables)
            yield


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def mlx_environment(
    backend: str, hosts: Sequence[Host], rank: int, first_port: int
) -> MlxEnvironment:
    """Return the environment of a rank.

    first_port: of those that the backend listens on.

    Raises:
        SettingsError: the hosts lack what the backend needs.
    """
    own = {RANK_VARIABLE: str(rank)}
    found = _BACKENDS[backend](hosts, rank, first_port)
    return MlxEnvironment({**own, **found.variables}, found.files)


def ring_places(hosts: Sequence[Host], first_port: int) -> list[list[str]]:
    """Return where each rank listens, as `address:port`, by all its addresses.

    Raises:
        SettingsError: there are not so many ports.
    """
    ports = iter(range(first_port, 1 << 16))
    try:
        return [[f"{address}:{next(ports)}" for address in host.addresses] for host in hosts]
    except StopIteration:
        raise SettingsError(f"{env_name('ranks_port')}: too few ports follow it") from None


def _ring(hosts: Sequence[Host], rank: int, first_port: int) -> MlxEnvironment:
    return MlxEnvironment({}, {"MLX_HOSTFILE": json.dumps(ring_places(hosts, first_port))})


def _jaccl(hosts: Sequence[Host], rank: int, first_port: int) -> MlxEnvironment:
    _check_devices(hosts, lambda index: [*range(len(hosts))])
    return _of_devices(hosts, first_port, {})


def _jaccl_ring(hosts: Sequence[Host], rank: int, first_port: int) -> MlxEnvironment:
    size = len(hosts)
    _check_devices(hosts, lambda index: [(index - 1) % size, (index + 1) % size])
    return _of_devices(hosts, first_port, {"MLX_JACCL_RING": "1"})


def _of_devices(
    hosts: Sequence[Host], first_port: int, variables: Mapping[str, str]
) -> MlxEnvironment:
    coordinator = f"{hosts[0].addresses[0]}:{first_port}"
    return MlxEnvironment(
        {"MLX_JACCL_COORDINATOR": coordinator, **variables},
        {"MLX_IBV_DEVICES": json.dumps([host.rdma for host in hosts])},
    )


def _check_devices(hosts: Sequence[Host], reached: Callable[[int], Sequence[int]]) -> None:
    """Check that each host has a device by which it reaches the others that it has to."""
    for index, host in enumerate(hosts):
        for other in reached(index):
            if other == index:
                continue
            if len(host.rdma) != len(hosts) or host.rdma[other] is None:
                raise SettingsError(
                    f'{env_name("ranks")}: host {index} ({host.name}) has no device in "rdma" for host {other}'
                )


def _nccl(hosts: Sequence[Host], rank: int, first_port: int) -> MlxEnvironment:
    variables = {
        "NCCL_HOST_IP": hosts[0].addresses[0],
        "NCCL_PORT": str(first_port),
        "MLX_WORLD_SIZE": str(len(hosts)),
    }
    names = [host.name for host in hosts]
    if names.count(names[rank]) > 1:
        # Each rank of a host has a GPU of its own.
        variables["CUDA_VISIBLE_DEVICES"] = str(names[:rank].count(names[rank]))
    return MlxEnvironment(variables, {})


_BACKENDS: Final = {"ring": _ring, "jaccl": _jaccl, "jaccl-ring": _jaccl_ring, "nccl": _nccl}
