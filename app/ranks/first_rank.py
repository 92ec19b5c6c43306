"""Rank 0: starts the others, has them build their parts of the model, and ends them all."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

from app.observability.logs import print_stderr
from app.ranks.exit_later import exit_later
from app.ranks.launcher import Launcher
from app.ranks.plan import RankPlan
from app.ranks.shared_facts import MODEL_FACT, shared_facts
from app.server.stop_signals import set_stop_handler, stop_at_once
from app.server.uvicorn_server import bind
from app.settings import Settings
from batching import (
    HEARTBEAT_TIMEOUT,
    ControlPort,
    EngineConfig,
    LoadedEngine,
    LoadSlices,
    RankLost,
    RankRefused,
    RanksEnded,
    TcpLeader,
    agree_with_members,
    build_ranked_engine,
    fetch_model,
    model_digest,
)

# Seconds after which this process ends in any case when a rank is lost: by then the clients have their errors.
_LAST_SECONDS: Final = 3.0

Build = Callable[[EngineConfig, TcpLeader, str, LoadSlices], LoadedEngine]


class FirstRank:
    """Rank 0 with the links to the others.

    status: with which it ends; anything but 0 is a failure for all.
    """

    def __init__(
        self,
        plan: RankPlan,
        launcher: Launcher,
        build: Build = build_ranked_engine,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """Make it; `leave` ends the process."""
        self._plan, self._launcher, self._build, self._leave = plan, launcher, build, leave
        self._leader: TcpLeader | None = None
        self._is_ending = False
        self.status = 0

    @property
    def lost(self) -> RankLost | None:
        """Why the ranks can compute nothing any more; None while they can."""
        return None if self._leader is None else self._leader.lost

    def join(self, port: ControlPort, timeout: float) -> None:
        """Wait until all others are there.

        Raises:
            CannotJoin: one does not come.
        """
        joined = port.join(timeout, self._launcher.check)
        self._leader = TcpLeader(joined, self._plan.hostfile.names, self._has_ended, exit_later)

    def build(self, config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        """Build the engine with all others, in the MLX thread; see `SchedulerManager`.

        Raises:
            ModelLoadError: the model cannot be found, read or divided.
            RankLost: a rank is gone, or differs from this one.
        """
        leader, names = self._leader, self._plan.hostfile.names
        assert leader is not None
        leader.allow_silence(self._plan.load_silence)
        try:
            agree_with_members(leader, shared_facts(config, self._plan), names)
            self._plan.check_ports()
            path = slices.in_thread(partial(fetch_model, config))
            digest = slices.in_thread(partial(model_digest, path))
            agree_with_members(leader, {MODEL_FACT: digest}, names)
            with self._plan.mlx_environment().entered():
                engine = self._build(config, leader, self._plan.mlx_backend, slices)
            leader.allow_silence(HEARTBEAT_TIMEOUT)
            return engine
        except RankLost:
            raise
        except Exception:
            # It may have failed since another rank has.
            leader.check()
            raise

    def end(self, reason: RankLost) -> None:
        """End all ranks, and wait for them, for some seconds at most."""
        self._is_ending = self.lost is None
        if self._leader is not None:
            self._leader.end(reason)
            self._leader.close()
        self._launcher.close()

    def _has_ended(self, error: RankLost) -> None:
        if isinstance(error, RanksEnded):
            return
        if not self._is_ending:
            # What this rank ends for is said where that is found.
            print_stderr(str(error), logging.ERROR)
        timer = threading.Timer(_LAST_SECONDS, self._end_at_once, [error.status])
        timer.daemon = True
        timer.start()

    def _end_at_once(self, status: int) -> None:
        self._launcher.kill()
        self._leave(status)


@contextmanager
def first_rank(plan: RankPlan, settings: Settings) -> Iterator[FirstRank]:
    """Start the other ranks unless a supervisor does, and yield this one; on leaving, end them all.

    Raises:
        BindError: this machine cannot listen on the address of rank 0.
        CannotJoin: a rank cannot be started, or does not come.
    """
    launcher = Launcher(plan, settings)
    first = FirstRank(plan, launcher)
    reason: RankLost = RankLost(0, f"({plan.host}) has failed")
    try:
        with bind(*plan.control_address) as sock:
            set_stop_handler(partial(_stop, launcher))
            os.environ.update(plan.hostfile.variables)
            port = ControlPort(sock, plan.hostfile.names)
            if plan.launches:
                launcher.start()
            print_stderr(f"waiting for {plan.num_ranks - 1} other ranks ...")
            first.join(port, settings.ranks_timeout)
        yield first
        if not first.status:
            reason = RanksEnded(0, "has ended")
    except RankLost as error:
        if first.lost is None:
            print_stderr(str(error), logging.ERROR)
        reason = error
        raise
    except Exception as error:
        # What happens to a rank that serves is its status.
        reason = RankRefused(0, f"({plan.host}) cannot start: {error}")
        raise
    finally:
        first.end(reason)


def _stop(launcher: Launcher, number: int, frame: object) -> None:
    launcher.kill()
    stop_at_once(number)
