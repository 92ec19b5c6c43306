"""A rank other than 0: it has no clients, runs what rank 0 plans, and ends with it."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

from app.observability.logs import print_stderr
from app.ranks.exit_later import exit_later
from app.ranks.mlx_environment import LAUNCHED_VARIABLE
from app.ranks.plan import RankPlan
from app.ranks.shared_facts import MODEL_FACT, shared_facts
from app.server.stop_signals import KILLED_BY, set_stop_handler
from batching import (
    EngineConfig,
    ModelLoadError,
    RankLost,
    RankRefused,
    RanksEnded,
    TcpMember,
    agree_with_leader,
    fetch_model,
    join_ranks,
    model_digest,
    run_member,
)

logger = logging.getLogger(__name__)

Run = Callable[[EngineConfig, TcpMember, str], None]
# Seconds in which rank 0 says how it has ended, when there is nothing left to run.
_LAST_SECONDS: Final = 10.0


class _Left(Exception):
    """There is nothing left to run, as rank 0 has said, which ends now."""


def serve_other_rank(
    plan: RankPlan,
    config: EngineConfig,
    timeout: float,
    run: Run = run_member,
    leave: Callable[[int], object] = os._exit,
) -> int:
    """Join rank 0 and run what it plans; return the exit status: 0 only if rank 0 has ended on purpose.

    timeout: seconds within which rank 0 must be there.
    run: runs the plans of rank 0, in the MLX thread.
    leave: ends the process, if rank 0 has started it and is gone.

    Raises:
        CannotJoin: rank 0 does not come, or refuses this rank.
    """
    # What happens first decides, in whatever thread: a collective may hang for ever.
    ends: SimpleQueue[RankLost | Exception | signal.Signals] = SimpleQueue()
    os.environ.update(plan.hostfile.variables)
    if LAUNCHED_VARIABLE in os.environ:
        threading.Thread(target=_leave_with, args=(sys.stdin.fileno(), leave), daemon=True).start()
    member = join_ranks(
        plan.control_address, plan.hostfile.names, plan.rank, timeout, ends.put, exit_later
    )
    set_stop_handler(lambda number, _: ends.put(signal.Signals(number)))
    threading.Thread(target=_run, args=(plan, config, member, run, ends), daemon=True).start()
    try:
        return _status(plan, member, ends)
    finally:
        member.close()


def _leave_with(descriptor: int, leave: Callable[[int], object]) -> None:
    """Leave when the other end of a pipe is closed: the next rank 0 starts ranks of its own."""
    while os.read(descriptor, 1):
        pass
    print_stderr(
        "rank 0 is gone, which has started this one: the standard input has ended", logging.ERROR
    )
    leave(1)


def _run(
    plan: RankPlan,
    config: EngineConfig,
    member: TcpMember,
    run: Run,
    ends: "SimpleQueue[RankLost | Exception | signal.Signals]",
) -> None:
    try:
        agree_with_leader(member, shared_facts(config, plan))
        plan.check_ports()
        agree_with_leader(member, {MODEL_FACT: model_digest(fetch_model(config))})
        with plan.mlx_environment().entered():
            run(config, member, plan.mlx_backend)
        ends.put(_Left())
    except Exception as error:
        ends.put(error)


def _status(
    plan: RankPlan,
    member: TcpMember,
    ends: "SimpleQueue[RankLost | Exception | signal.Signals]",
) -> int:
    """Wait for the end, say why it has come, and return the exit status."""
    end = ends.get()
    if isinstance(end, _Left):
        with suppress(Empty):
            end = ends.get(timeout=_LAST_SECONDS)
    match end:
        case signal.Signals() as number:
            member.end(RankLost(plan.rank, f"({plan.host}) was stopped by {number.name}"))
            return KILLED_BY + number
        case RankLost() as lost:
            pass
        case error:
            lost = _reason(plan, member, error)
            member.end(lost)
    if not isinstance(lost, RanksEnded):
        print_stderr(str(lost), logging.ERROR)
    return lost.status


def _reason(plan: RankPlan, member: TcpMember, error: Exception) -> RankLost:
    """Return why this rank can do no more: another one may be the cause."""
    try:
        member.check()
    except RankLost as lost:
        return lost
    if isinstance(error, _Left):
        return RankLost(0, f"({plan.hostfile.names[0]}) has not said how it has ended")
    if isinstance(error, ModelLoadError):
        return RankRefused(plan.rank, f"({plan.host}) cannot start: {error}")
    logger.error("this rank cannot go on", exc_info=error)
    return RankLost(plan.rank, f"({plan.host}) has failed: {type(error).__name__}")
