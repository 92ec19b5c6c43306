"""Rank 0, with others that are threads of the test."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest

from app.ranks import first_rank as module
from app.ranks.first_rank import FirstRank, first_rank
from app.ranks.launcher import Launcher
from app.ranks.plan import RankPlan, divided_model, rank_plan
from app.ranks.shared_facts import MODEL_FACT, shared_facts
from app.settings import Settings
from batching import (
    CannotJoin,
    EngineConfig,
    LoadedEngine,
    LoadSlices,
    ModelLoadError,
    RankLost,
    RankRefused,
    RanksEnded,
    TcpLeader,
    TcpMember,
    agree_with_leader,
    join_ranks,
    model_digest,
)
from batching.engine.load_slices import ONE_SLICE
from tests.support.rank_links import Ends
from tests.support.rank_servers import free_ports, hosts
from tests.support.small_model import small_model


def planned(**fields: Any) -> tuple[RankPlan, Settings]:
    settings = Settings(
        _env_file=None,
        ranks=hosts("mac0", "mac1"),
        ranks_port=free_ports(3),
        model=str(small_model()),
        **fields,
    )
    return rank_plan(settings, {"MLX_RANK": "0"}), settings


@dataclass
class Other:
    """The rank 1 of a test."""

    plan: RankPlan
    ends: Ends = field(default_factory=Ends)

    def join(self) -> TcpMember:
        return join_ranks(self.plan.control_address, ["mac0", "mac1"], 1, 30, self.ends)


def leave_with_rank_0(member: TcpMember) -> None:
    """Close a rank when its end has come, for which rank 0 waits."""
    member._fate.wait(60)
    member.close()


@contextmanager
def first_and_other(**fields: Any) -> Iterator[tuple[FirstRank, TcpMember, Ends, EngineConfig]]:
    plan, settings = planned(**fields)
    other = Other(plan)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(other.join)
        with first_rank(plan, settings) as first:
            member = joining.result()
            threads.submit(leave_with_rank_0, member)
            yield first, member, other.ends, divided_model(settings).config


def test_ranks_end_well_where_the_first_has(capsys: pytest.CaptureFixture[str]) -> None:
    with first_and_other() as (first, _, ends, _):
        assert first.lost is None
    assert isinstance(ends.wait(), RanksEnded)
    assert isinstance(first.lost, RanksEnded)
    assert capsys.readouterr().err == "waiting for 1 other ranks ...\n"


def test_ranks_end_with_a_failure_where_the_first_does() -> None:
    with first_and_other() as (first, _, ends, _):
        first.status = 1
    error = ends.wait()
    assert (str(error), error.status) == ("rank 0 (mac0) has failed", 1)


@pytest.mark.parametrize(
    ("raised", "line", "status"),
    [
        (ModelLoadError("no such model"), "rank 0 (mac0) cannot start: no such model", 2),
        (RankLost(0, "cannot compute"), "rank 0 cannot compute", 1),
    ],
)
def test_ranks_end_with_what_the_first_cannot_start_for(
    raised: Exception, line: str, status: int
) -> None:
    with pytest.raises(type(raised)), first_and_other() as (_, _, ends, _):
        raise raised
    error = ends.wait()
    assert (str(error), error.status) == (line, status)


def test_a_rank_that_does_not_come_is_named() -> None:
    plan, settings = planned(ranks_timeout=0.2)
    with pytest.raises(CannotJoin, match=r"not connected within 0.2 s: rank 1"):
        first_rank(plan, settings).__enter__()


def test_the_process_ends_in_any_case_when_a_rank_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LAST_SECONDS", 0.0)
    with first_and_other() as (first, member, _, _):
        left = SimpleQueue[int]()
        first._leave = left.put
        member.end(RankRefused(1, "(mac1) cannot start: no room"))
        assert left.get(timeout=30) == 2
        assert str(first.lost) == "rank 1 (mac1) cannot start: no room"
    assert capsys.readouterr().err.splitlines()[1:] == ["rank 1 (mac1) cannot start: no room"]


def test_a_first_rank_that_stands_still_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LAST_SECONDS", 0.0)
    left = SimpleQueue[int]()

    def stand_still() -> None:
        with first_and_other() as (first, _, _, _):
            first._leave = left.put
            assert first._leader is not None
            first._leader.limit(0.0)
            assert left.get(timeout=30) == 1
            # As the load does if MLX goes on when the others have ended.
            assert first.lost is not None
            raise first.lost

    with pytest.raises(RankLost, match=r"rank 0 \(mac0\) has stood still for 0 s, or ") as error:
        stand_still()
    assert capsys.readouterr().err.splitlines()[1:] == [str(error.value)]


def test_a_signal_before_it_serves_ends_the_processes_that_it_has_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(Launcher, "kill", lambda _: ended.append("kill"))
    monkeypatch.setattr(module, "stop_at_once", lambda number: ended.append(f"exit {number}"))
    with first_and_other():
        signal.raise_signal(signal.SIGTERM)
        assert ended == ["kill", "exit 15"]


def test_ranks_are_started_unless_a_supervisor_does(monkeypatch: pytest.MonkeyPatch) -> None:
    _, settings = planned()
    calls: list[str] = []
    for name in ("start", "check", "close"):
        monkeypatch.setattr(Launcher, name, lambda _, name=name: calls.append(name))
    plan = rank_plan(settings, {})
    other = Other(plan)
    with ThreadPoolExecutor(1) as threads:
        joining = threads.submit(other.join)
        with first_rank(plan, settings):
            threads.submit(joining.result().close)
    assert (calls[0], calls[1], calls[-1]) == ("start", "check", "close")


class Build:
    """Stands for what builds the engine of MLX."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.variables: dict[str, str] = {}

    def __call__(
        self, config: EngineConfig, leader: TcpLeader, backend: str, slices: LoadSlices
    ) -> LoadedEngine:
        self.variables = {name: os.environ[name] for name in ("MLX_RANK", "MLX_HOSTFILE")}
        leader.send(backend.encode())
        if self.error is not None:
            raise self.error
        return "the engine"  # type: ignore[return-value]


def agree(member: TcpMember, plan: RankPlan, config: EngineConfig, digest: str) -> bytes:
    agree_with_leader(member, shared_facts(config, plan))
    agree_with_leader(member, {MODEL_FACT: digest})
    return member.receive()


@contextmanager
def building(
    build: Build, digest: str | None = None
) -> Iterator[tuple[Future[LoadedEngine], TcpMember, Future[bytes]]]:
    with (
        first_and_other() as (first, member, _, config),
        ThreadPoolExecutor(2) as threads,
    ):
        first._build = build
        known = digest or model_digest(small_model())
        agreed = threads.submit(agree, member, first._plan, config, known)
        yield threads.submit(first.build, config, ONE_SLICE), member, agreed


def test_an_engine_is_built_when_all_have_agreed() -> None:
    build = Build()
    with building(build) as (built, _, agreed):
        assert built.result(60) == "the engine"  # type: ignore[comparison-overlap]
        assert agreed.result(60) == b"ring"
    assert build.variables["MLX_RANK"] == "0"


def test_another_model_is_refused() -> None:
    with building(Build(), digest="0123") as (built, _, agreed):
        line = r"rank 1 \(mac1\) has a model with the digest 0123, rank 0 has "
        for future in (built, agreed):
            with pytest.raises(RankRefused, match=line):
                future.result(60)


def test_a_fault_of_this_rank_is_its_own() -> None:
    with (
        building(Build(ModelLoadError("no room"))) as (built, _, _),
        pytest.raises(ModelLoadError, match="no room"),
    ):
        built.result(60)


def test_a_fault_that_another_rank_causes_is_named_as_that() -> None:
    with building(Build(RuntimeError("[ring] lost"))) as (built, member, agreed):
        assert agreed.result(60) == b"ring"
        member.end(RankLost(1, "(mac1) is gone"))
        with pytest.raises(RankLost, match=r"rank 1 \(mac1\) is gone"):
            built.result(60)


def test_a_rank_that_is_lost_meanwhile_is_named() -> None:
    with building(Build(RankLost(1, "(mac1) is gone"))) as (built, _, _):
        with pytest.raises(RankLost, match=r"rank 1 \(mac1\) is gone"):
            built.result(60)
