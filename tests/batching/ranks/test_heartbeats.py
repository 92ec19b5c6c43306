"""Signs of life, on a clock of the test: who is silent, and for how long."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from unittest.mock import Mock, patch

import pytest

from batching.errors import RankLost, RankRefused, RanksEnded
from batching.ranks.fate import Fate
from batching.ranks.heartbeats import Heartbeats, Peer, error_of, line_of


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Beating:
    """The heartbeats of a rank 0 with two others, whose ends are the test's."""

    clock: Clock
    fate: Fate
    heartbeats: Heartbeats
    others: list[socket.socket]
    guarded: list[float | None]

    def pass_time(self, seconds: float, *alive: int) -> None:
        """Let so much time pass in steps of half a second, in which some ranks say that they live."""
        for _ in range(round(seconds * 2)):
            self.clock.now += 0.5
            for rank in alive:
                self.others[rank - 1].send(b".\n")
            self.heartbeats.turn()


@pytest.fixture
def beating() -> Iterator[Beating]:
    pairs = [socket.socketpair() for _ in range(2)]
    peers = [Peer(rank, f"mac{rank}", pair[0]) for rank, pair in enumerate(pairs, start=1)]
    clock, guarded = Clock(), list[float | None]()
    fate = Fate(lambda error: heartbeats.tell(error))
    heartbeats = Heartbeats("mac0", 0, peers, fate, guarded.append, clock)
    yield Beating(clock, fate, heartbeats, [pair[1] for pair in pairs], guarded)
    fate.decide(RanksEnded(0, "has ended"))
    for _, other in pairs:
        other.close()
    heartbeats.start()
    heartbeats.close()
    # The process may live on.
    assert guarded[-1] is None


def test_it_says_every_second_that_it_lives(beating: Beating) -> None:
    beating.heartbeats.turn()
    beating.pass_time(3.0, 1, 2)
    assert [other.recv(100) for other in beating.others] == [b".\n" * 4] * 2


def test_a_rank_that_is_silent_for_more_than_five_seconds_is_lost(beating: Beating) -> None:
    beating.pass_time(5.0, 1)
    assert beating.fate.error is None
    beating.pass_time(0.5, 1)
    assert str(beating.fate.error) == "rank 2 (mac2) has not answered for 5 s"
    # The others are told, it as well.
    told = [other.recv(100).rpartition(b".\n")[2] for other in beating.others]
    assert told == [b"lost 2 (mac2) has not answered for 5 s\n"] * 2


def test_a_late_sign_of_life_is_one(beating: Beating) -> None:
    for _ in range(4):
        beating.pass_time(4.5, 1)
        beating.pass_time(0.5, 1, 2)
    assert beating.fate.error is None


def test_each_turn_lets_the_process_live_for_longer_than_the_others_wait(beating: Beating) -> None:
    beating.pass_time(1.0)
    assert beating.guarded == [7.0, 7.0]


def test_all_ranks_may_be_silent_for_longer_where_rank_0_says_so(beating: Beating) -> None:
    beating.heartbeats.allow_silence(60.0)
    assert [other.recv(100) for other in beating.others] == [b"silence 60.0\n"] * 2
    beating.pass_time(60.0, 1)
    assert (beating.fate.error, beating.guarded[-1]) == (None, 62.0)
    beating.pass_time(0.5, 1)
    assert str(beating.fate.error) == "rank 2 (mac2) has not answered for 60 s"


def test_another_rank_takes_the_silence_that_rank_0_allows() -> None:
    clock, fate = Clock(), Fate(lambda error: heartbeats.tell(error))
    ours, theirs = socket.socketpair()
    heartbeats = Heartbeats("mac1", 1, [Peer(0, "mac0", ours)], fate, clock=clock)
    with theirs:
        theirs.send(b"silence 60.0\nsilence long\n")
        heartbeats.turn()
        for _ in range(60):
            clock.now += 1
            heartbeats.turn()
        assert fate.error is None
        clock.now += 1
        heartbeats.turn()
        assert str(fate.error) == "rank 0 (mac0) has not answered for 60 s"
    heartbeats.start()
    heartbeats.close()


@pytest.mark.parametrize("line", [b"silence 9999\n", b"silence x\n"])
def test_no_other_rank_allows_silence(beating: Beating, line: bytes) -> None:
    beating.others[1].send(line)
    beating.pass_time(5.5, 1)
    assert str(beating.fate.error) == "rank 2 (mac2) has not answered for 5 s"


LIMITED = "rank 0 (mac0) has stood still for 9 s, or waits in MLX for a rank that has"


def test_what_goes_on_for_longer_than_its_limit_ends_all(beating: Beating) -> None:
    beating.heartbeats.limit(9.0)
    beating.pass_time(9.0, 1, 2)
    beating.heartbeats.limit(9.0)
    beating.pass_time(9.0, 1, 2)
    assert beating.fate.error is None
    beating.pass_time(1.5, 1, 2)
    assert str(beating.fate.error) == LIMITED
    told = beating.others[0].recv(4096).rpartition(b".\n")[2]
    assert told.decode() == LIMITED.replace("rank 0", "lost 0") + "\n"


def test_time_in_which_a_rank_waits_for_another_one_is_not_its_own(beating: Beating) -> None:
    beating.heartbeats.limit(9.0)
    beating.pass_time(8.0, 1, 2)
    with beating.heartbeats.unlimited():
        beating.pass_time(3600.0, 1, 2)
    beating.pass_time(9.0, 1, 2)
    assert beating.fate.error is None
    beating.heartbeats.limit(None)
    beating.pass_time(60.0, 1, 2)
    assert beating.fate.error is None
    beating.clock.now += 3600
    beating.heartbeats.limit(9.0)
    beating.heartbeats.turn()
    assert beating.fate.error is None


def test_time_in_which_this_process_did_not_run_is_no_silence_of_others(beating: Beating) -> None:
    beating.pass_time(1.0, 1, 2)
    beating.clock.now += 3600
    beating.heartbeats.turn()
    beating.pass_time(2.0, 1, 2)
    assert beating.fate.error is None


@pytest.mark.parametrize("pieces", [[b"lost 1 it ", b"is full\n"], [b".\n.\nlost 1 it is full\n."]])
def test_a_line_may_come_in_pieces(beating: Beating, pieces: list[bytes]) -> None:
    for piece in pieces:
        beating.others[0].send(piece)
        beating.heartbeats.turn()
    assert str(beating.fate.error) == "rank 1 it is full"


def test_a_closed_connection_is_lost_at_once(beating: Beating) -> None:
    beating.others[1].close()
    beating.heartbeats.turn()
    assert str(beating.fate.error) == "rank 2 (mac2) is gone: its connection was closed"


def test_a_connection_that_was_cut_is_lost_at_once(beating: Beating) -> None:
    # Unread data makes it a reset.
    beating.heartbeats.turn()
    beating.others[0].close()
    beating.heartbeats.turn()
    assert "rank 1 (mac1) is gone" in str(beating.fate.error)


def test_what_is_no_sign_of_life_is_not_kept(beating: Beating) -> None:
    for _ in range(3):
        beating.others[0].send(b"x" * 4096)
        beating.heartbeats.turn()
    assert str(beating.fate.error) == "rank 1 (mac1) has sent what is no sign of life"


@pytest.mark.parametrize(
    "error",
    [RankLost(2, "(mac2) is gone"), RankRefused(1, "has MLX 1"), RanksEnded(0, "has ended")],
)
def test_a_line_tells_of_an_end(error: RankLost) -> None:
    read = error_of(line_of(error).rstrip(b"\n"))
    assert (type(read), str(read)) == (type(error), str(error))


@pytest.mark.parametrize(
    "line", [b"", b".", b"lost", b"lost 1", b"lost x y", b"won 1 y", b"\xff 1 y"]
)
def test_another_line_tells_of_none(line: bytes) -> None:
    assert error_of(line) is None


def test_a_reason_is_one_line(beating: Beating) -> None:
    error = RankLost(1, "has\nended 0 \x1b[31m" + "x" * 1000)
    line = line_of(error)
    assert line.count(b"\n") == 1
    assert len(line) < 400


def test_nothing_that_has_come_is_neither_life_nor_an_end(beating: Beating) -> None:
    beating.pass_time(4.0, 1)
    beating.others[1].send(b".")
    peer = beating.heartbeats._peers[1]
    # As if the system had said too early that there is something.
    with patch.object(peer, "sock", Mock(recv=Mock(side_effect=BlockingIOError))):
        beating.pass_time(1.0, 1)
    assert (peer.silence, beating.fate.error) == (5.0, None)
