"""What this process is among the ranks, as the settings and the environment say."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from app.ranks.hostfile import Hostfile, read_hostfile
from app.ranks.mlx_environment import RANK_VARIABLE, MlxEnvironment, mlx_environment, ring_places
from app.server.uvicorn_server import BindError, bind
from app.settings import Settings, SettingsError, env_name
from app.settings.models import served_models
from batching import HEARTBEAT_TIMEOUT, ModelLoadError, ServedModel, check_served

_BACKENDS: Final = ("ring", "jaccl", "jaccl-ring", "nccl")
_CONNECT_SECONDS: Final = 60.0
# Several models, or what is a part of one, cannot be divided among the same ranks.
_ALONE: Final = (
    "models",
    "models_file",
    "models_dir",
    "serve_hub_cache",
    "idle_unload",
    "max_memory_gib",
    "adapters",
    "allow_runtime_adapters",
)


@dataclass(frozen=True)
class RankPlan:
    """This process among the ranks of a model.

    rank: its number.
    launches: it starts the other ranks itself; otherwise a supervisor starts each.
    backend: of `mx.distributed`.
    control_address: where rank 0 waits for the others.
    """

    hostfile: Hostfile
    rank: int
    backend: str
    control_address: tuple[str, int]
    launches: bool

    @property
    def num_ranks(self) -> int:
        return len(self.hostfile.hosts)

    @property
    def host(self) -> str:
        """The name of this rank's host."""
        return self.hostfile.names[self.rank]

    @property
    def first_port(self) -> int:
        """The first of those that MLX listens on."""
        return self.control_address[1] + 1

    @property
    def mlx_backend(self) -> str:
        """The name that `mx.distributed.init` knows."""
        return self.backend.removesuffix("-ring")

    def mlx_environment(self) -> MlxEnvironment:
        return mlx_environment(self.backend, self.hostfile.hosts, self.rank, self.first_port)

    @property
    def load_silence(self) -> float:
        """Seconds for which a rank may be silent while it loads: MLX keeps the interpreter's lock while it connects."""
        return HEARTBEAT_TIMEOUT if self.backend == "ring" else _CONNECT_SECONDS

    def check_ports(self) -> None:
        """Check that MLX can listen: where it cannot, other ranks would wait for it within MLX.

        Raises:
            ModelLoadError: another program has a port.
        """
        if self.backend != "ring":
            return
        for place in ring_places(self.hostfile.hosts, self.first_port)[self.rank]:
            address, _, port = place.rpartition(":")
            try:
                bind(address, int(port)).close()
            except BindError as error:
                raise ModelLoadError(str(error)) from None

    def of(self, rank: int) -> "RankPlan":
        return replace(self, rank=rank)


def rank_plan(settings: Settings, environ: Mapping[str, str] = os.environ) -> RankPlan:
    """Return what this process is; `ranks` is set.

    Raises:
        SettingsError: the file of hosts or the number of this rank is invalid, or settings do not go with ranks.
    """
    for field in _ALONE:
        if field in settings.model_fields_set and getattr(settings, field):
            raise SettingsError(
                f"{env_name(field)} is not served with {env_name('ranks')}: one model is divided among them"
            )
    hostfile = read_hostfile(settings.ranks or "")
    backend = hostfile.backend or settings.ranks_backend
    if "ranks_backend" in settings.model_fields_set:
        backend = settings.ranks_backend
    if backend not in _BACKENDS:
        raise SettingsError(f"{env_name('ranks')}: backend must be one of {', '.join(_BACKENDS)}")
    text = environ.get(RANK_VARIABLE, "")
    rank = _rank(text, len(hostfile.hosts)) if text else 0
    address = settings.ranks_host or hostfile.hosts[0].addresses[0], settings.ranks_port
    plan = RankPlan(hostfile, rank, backend, address, launches=not text)
    for other in range(plan.num_ranks):
        plan.of(other).mlx_environment()
    return plan


def _rank(text: str, num_ranks: int) -> int:
    with suppress(ValueError):
        if 0 <= (rank := int(text)) < num_ranks:
            return rank
    raise SettingsError(
        f"{RANK_VARIABLE} must be a number from 0 to {num_ranks - 1}, not {text[:20]!r}"
    )


def divided_model(settings: Settings) -> ServedModel:
    """Return the model that the ranks serve, which is never unloaded: they would all end.

    Raises:
        SettingsError: something is wrong with its settings.
        ModelLoadError: one of them is not served over ranks.
    """
    [model] = served_models(settings)
    check_served(model.config)
    return replace(model, is_pinned=True)
