"""A rank other than 0, with a rank 0 that is a thread of the test."""

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from app.ranks import other_rank as module
from app.ranks.other_rank import serve_other_rank
from app.ranks.plan import RankPlan, divided_model, rank_plan
from app.ranks.shared_facts import MODEL_FACT, shared_facts
from app.settings import Settings
from batching import (
    CannotJoin,
    ControlPort,
    EngineConfig,
    ModelLoadError,
    RankLost,
    TcpLeader,
    TcpMember,
    agree_with_members,
    model_digest,
)
from tests.support.rank_links import Ends
from tests.support.rank_servers import free_ports, hosts
from tests.support.small_model import small_model

NAMES = ["mac0", "mac1"]
Lead = Callable[[TcpLeader], None]
Run = Callable[[EngineConfig, TcpMember, str], None]


def planned(**fields: Any) -> tuple[RankPlan, EngineConfig]:
    settings = Settings(
        _env_file=None,
        ranks=hosts(*NAMES),
        ranks_port=free_ports(3),
        model=str(small_model()),
        **fields,
    )
    return rank_plan(settings, {"MLX_RANK": "1"}), divided_model(settings).config


def follow(config: EngineConfig, member: TcpMember, backend: str) -> None:
    """Follow rank 0 until it says that it ends, as the real one does."""
    while member.receive() != b"end":
        pass


def served(run: Run, lead: Lead) -> tuple[int, RankLost]:
    """Serve as rank 1; return the exit status, and how rank 0 has seen the end."""
    plan, config = planned()
    ends = Ends()

    def first() -> None:
        sock = socket.create_server(plan.control_address)
        leader = TcpLeader(ControlPort(sock, NAMES).join(30), NAMES, ends)
        try:
            agree_with_members(leader, shared_facts(config, plan.of(0)), NAMES)
            agree_with_members(leader, {MODEL_FACT: model_digest(small_model())}, NAMES)
            lead(leader)
        except RankLost:
            pass
        finally:
            leader.close()

    with ThreadPoolExecutor(1) as threads:
        leading = threads.submit(first)
        status = serve_other_rank(plan, config, 30, run)
        leading.result(30)
    return status, ends.wait()


def nothing(leader: TcpLeader) -> None:
    """End on purpose at once."""


def until_the_end(leader: TcpLeader) -> None:
    with pytest.raises(RankLost):
        leader.receive()


def test_it_ends_well_where_rank_0_has_ended_on_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    assert served(follow, nothing)[0] == 0
    assert served(follow, lambda leader: leader.send(b"end"))[0] == 0
    assert capsys.readouterr().err == ""


def test_it_has_the_environment_of_its_rank() -> None:
    found: list[str] = []

    def run(config: EngineConfig, member: TcpMember, backend: str) -> None:
        found.extend((backend, os.environ["MLX_RANK"]))
        member.send(b"found")

    served(run, lambda leader: [*leader.receive()].clear())
    assert found == ["ring", "1"]


def test_it_fails_where_rank_0_does_even_if_its_mlx_hangs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    is_over = Event()

    def hang(config: EngineConfig, member: TcpMember, backend: str) -> None:
        is_over.wait()

    def lead(leader: TcpLeader) -> None:
        leader.end(RankLost(2, "(mac2) has not answered for 5 s"))

    status, _ = served(hang, lead)
    is_over.set()
    assert status == 1
    assert capsys.readouterr().err == "rank 2 (mac2) has not answered for 5 s\n"


def test_a_part_that_it_cannot_open_is_named_to_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    def run(config: EngineConfig, member: TcpMember, backend: str) -> None:
        raise ModelLoadError("there is no room")

    status, end = served(run, until_the_end)
    assert (status, str(end)) == (2, "rank 1 (mac1) cannot start: there is no room")
    assert capsys.readouterr().err == "rank 1 (mac1) cannot start: there is no room\n"


def test_a_fault_of_its_own_is_named_to_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    def run(config: EngineConfig, member: TcpMember, backend: str) -> None:
        raise RuntimeError("out of memory")

    status, end = served(run, until_the_end)
    assert (status, str(end)) == (1, "rank 1 (mac1) has failed: RuntimeError")
    assert "out of memory" in caplog.text


def test_a_fault_that_another_rank_causes_is_that_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLX notices it before the links do."""
    has_failed, check = Event(), TcpMember.check

    def checking(member: TcpMember) -> None:
        has_failed.set()
        check(member)

    def run(config: EngineConfig, member: TcpMember, backend: str) -> None:
        raise RuntimeError("[ring] connection to a peer was lost")

    def lead(leader: TcpLeader) -> None:
        has_failed.wait(30)
        leader.end(RankLost(2, "(mac2) is gone"))

    monkeypatch.setattr(TcpMember, "check", checking)
    assert served(run, lead)[0] == 1
    assert capsys.readouterr().err == "rank 2 (mac2) is gone\n"


def test_an_end_that_rank_0_does_not_explain_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_LAST_SECONDS", 0.1)

    def lead(leader: TcpLeader) -> None:
        leader.send(b"end")
        until_the_end(leader)

    status, end = served(follow, lead)
    assert (status, str(end)) == (1, "rank 0 (mac0) has not said how it has ended")
    assert "has not said how it has ended" in capsys.readouterr().err


def test_a_signal_makes_it_leave() -> None:
    def run(config: EngineConfig, member: TcpMember, backend: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        follow(config, member, backend)

    status, end = served(run, until_the_end)
    assert (status, str(end)) == (128 + 15, "rank 1 (mac1) was stopped by SIGTERM")


def test_it_leaves_when_the_rank_0_that_has_started_it_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, config = planned()
    statuses: SimpleQueue[int] = SimpleQueue()
    reader, writer = os.pipe()
    os.write(writer, b"what is written does not count")
    os.close(writer)
    monkeypatch.setenv("MLX_RANK_LAUNCHED", "1")
    with open(reader) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        with pytest.raises(CannotJoin):
            serve_other_rank(plan, config, 0.3, leave=statuses.put)
        assert statuses.get(timeout=30) == 1


def test_a_rank_0_that_does_not_come_is_named() -> None:
    plan, config = planned()
    with pytest.raises(CannotJoin, match=r"rank 0 \(mac0\) at 127.0.0.1 port \d+ was not there"):
        serve_other_rank(plan, config, 0.3)
