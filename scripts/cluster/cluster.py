"""Replicas behind a router, started and ended together."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from scripts.cluster.replica import Replica, share_signing_key
from scripts.cluster.router import ROUTERS, Router


class Cluster:
    """A number of replicas behind a router; leaving the context kills all of them.

    settings: of each replica; the machine's cores are divided unless `cpu_threads` is set.
    router: a name in `ROUTERS`; options: further flags of its command.
    kv_event_model: the model by whose KV events vllm-router routes; else it goes by its own records.
    folder: for data, logs and configuration.
    port: the router's.
    """

    def __init__(
        self,
        num_replicas: int,
        folder: Path,
        *,
        router: str = "smg",
        settings: Mapping[str, str] | None = None,
        kv_event_model: str | None = None,
        options: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        shared = {"cpu_threads": str(max(1, num_cores() // num_replicas)), **(settings or {})}
        self.replicas: Final = [
            Replica(str(number), folder, shared, kv_events=kv_event_model is not None)
            for number in range(1, num_replicas + 1)
        ]
        urls = [replica.url for replica in self.replicas]
        api_key = shared.get("api_keys", "").partition(",")[0] or None
        self.router: Final[Router] = ROUTERS[router](
            urls,
            folder,
            port=port,
            api_key=api_key,
            environment={"KV_EVENT_MODEL": kv_event_model} if kv_event_model else {},
            options=options,
        )
        share_signing_key(self.replicas)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.router.kill()
        for replica in self.replicas:
            replica.kill()

    @property
    def url(self) -> str:
        return self.router.url

    def start(self) -> None:
        """Start all that does not run; `wait_until_ready` says when requests are passed on."""
        for replica in self.replicas:
            replica.start()
        self.router.start()

    def wait_until_ready(self) -> None:
        """Wait until the router passes requests on to every replica.

        Raises:
            ServerFailed: a process has ended; the text has what it wrote.
            TimeoutError: it takes too long.
        """
        for replica in self.replicas:
            replica.wait_until_ready()
        self.router.wait_until_ready()

    def is_ready(self) -> bool:
        """Return whether the router passes requests on to every replica.

        Raises:
            ServerFailed: a process has ended.
        """
        return all(r.has_started() for r in self.replicas) and self.router.has_started()

    def stop(self) -> None:
        """Let requests in flight finish, and end all."""
        for replica in self.replicas:
            replica.terminate()
        for replica in self.replicas:
            replica.stop()
        # It has nothing to pass on, but may take seconds to end by itself.
        self.router.kill()

    def supervise(self, report: Callable[[str], None]) -> None:
        """Start again what has ended, and report it."""
        for replica in self.replicas:
            if not replica.is_running:
                report(f"{replica.url} ended with {replica.exit_status} and is started again")
                replica.start()
        if not self.router.is_running:
            report(f"{self.router.name} ended and is started again")
            self.router.start()


def num_cores() -> int:
    """Return how many cores this process may use; on a Mac, how many there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
