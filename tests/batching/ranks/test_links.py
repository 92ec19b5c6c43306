"""Messages between ranks over TCP, and how each end of a link is seen on the other side."""

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from batching.errors import RankLost, RankRefused, RanksEnded
from batching.ranks import frames
from batching.ranks.control_port import JoinedRank
from batching.ranks.frames import ConnectionEnded, framed, receive
from batching.ranks.leader import TcpLeader
from batching.ranks.links import Leader, Member
from tests.support.rank_links import Ends, linked


def test_messages_keep_their_order_and_their_bytes() -> None:
    sizes = (0, 1, 100, 1 << 16, (1 << 20) + 3)
    sent = [bytes([size % 251]) * size for size in sizes]
    with linked(3) as links, ThreadPoolExecutor(2) as threads:
        leader: Leader = links.leader
        members: list[Member] = [*links.members]
        assert (leader.num_ranks, [member.rank for member in members]) == (3, [1, 2])

        def echo(member: Member) -> None:
            for _ in sent:
                member.send(bytes([member.rank]) + member.receive())

        echoes = [threads.submit(echo, member) for member in members]
        for message in sent:
            leader.send(message)
            assert leader.receive() == [b"\1" + message, b"\2" + message]
        for each in echoes:
            each.result()


def test_a_rank_that_says_why_it_ends_is_named_to_all_with_its_reason() -> None:
    with linked(3) as links:
        links.members[0].end(RankRefused(1, "(mac1) has no room\nfor the model"))
        seen = [links.leader_ends.wait(), links.member_ends[1].wait()]
        assert {str(error) for error in seen} == {"rank 1 (mac1) has no room for the model"}
        assert [error.status for error in seen] == [2, 2]


def test_a_rank_whose_process_is_gone_ends_all_others() -> None:
    with linked(3) as links:
        # What the system does to the connections of a process that was killed.
        links.members[1]._heartbeats._peers[0].sock.shutdown(socket.SHUT_RDWR)
        expected = "rank 2 (mac2) is gone: its connection was closed"
        assert str(links.leader_ends.wait()) == expected
        assert str(links.member_ends[0].wait()) == expected
        with pytest.raises(RankLost, match="rank 2") as error:
            links.leader.send(b"plan")
        assert error.value.status == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stands_still_is_named_to_all(rank: int) -> None:
    with linked(2) as links:
        ends: list[Leader | Member] = [links.leader, *links.members]
        ends[rank].limit(0.0)
        seen = [links.leader_ends.wait(), links.member_ends[0].wait()]
        expected = (
            f"rank {rank} (mac{rank}) has stood still for 0 s, or waits in MLX for a rank that has"
        )
        assert [str(error) for error in seen] == [expected] * 2


def test_a_rank_that_fails_finds_out_whether_another_one_has_before() -> None:
    with linked(2) as links:
        links.leader.allow_silence(60)
        links.leader.end(RankLost(1, "(mac1) is gone"))
        for check in (links.leader.check, links.members[0].check):
            with pytest.raises(RankLost, match="rank 1"):
                check()


def test_rank_0_ends_all_on_purpose() -> None:
    with linked(3) as links:
        links.leader.end()
        ends = [each.wait() for each in (links.leader_ends, *links.member_ends)]
        assert {(type(error), error.status) for error in ends} == {(RanksEnded, 0)}
        with pytest.raises(RanksEnded):
            links.members[0].receive()


def test_a_link_ends_once() -> None:
    with linked(2) as links:
        links.leader.end(RankLost(1, "is slow"))
        links.leader.end()
        assert str(links.leader.lost) == "rank 1 is slow"
        assert str(links.member_ends[0].wait()) == "rank 1 is slow"
        assert str(links.members[0].lost) == "rank 1 is slow"
    assert links.leader_ends.found.qsize() == 1


def test_who_waits_for_a_message_hears_of_the_end() -> None:
    with linked(3) as links, ThreadPoolExecutor(3) as threads:
        waiting: list[Future[Any]] = [
            threads.submit(links.leader.receive),
            *[threads.submit(member.receive) for member in links.members],
        ]
        links.leader.end(RankLost(2, "(mac2) has not answered for 5 s"))
        for each in waiting:
            assert str(each.exception(30)) == "rank 2 (mac2) has not answered for 5 s"


def test_rank_0_waits_no_longer_for_a_rank_that_does_nothing() -> None:
    """As one that was stopped: its connections stay, and nothing comes."""
    (messages, their_messages), (beats, their_beats) = socket.socketpair(), socket.socketpair()
    with their_messages, their_beats, ThreadPoolExecutor(1) as threads:
        leader = TcpLeader({1: JoinedRank(messages, "", beats)}, ["mac0", "mac1"], Ends())
        waiting = threads.submit(leader.receive)
        leader.end(RankLost(1, "(mac1) has not answered for 5 s"))
        assert str(waiting.exception(30)) == "rank 1 (mac1) has not answered for 5 s"
        leader.close()


def test_who_waits_for_room_for_a_message_hears_of_the_end() -> None:
    with linked(2) as links, ThreadPoolExecutor(1) as threads:
        sending = threads.submit(links.members[0].send, bytes(1 << 26))
        # It has begun, and there is no room for so much.
        links.leader._channels[0]._peer.sock.recv(1, socket.MSG_PEEK)
        links.leader.end(RankLost(0, "(mac0) has failed"))
        assert str(sending.exception(30)) == "rank 0 (mac0) has failed"


def test_a_connection_for_messages_alone_that_ends_is_the_end() -> None:
    with linked(2) as links:
        links.members[0]._channel.interrupt()
        with pytest.raises(RankLost, match=r"rank 1 \(mac1\) is gone: the connection was closed"):
            links.leader.receive()
        assert str(links.member_ends[0].wait()).startswith("rank 1 (mac1) is gone")


def test_a_message_that_is_too_long_is_not_sent() -> None:
    class Long(bytes):
        def __len__(self) -> int:
            return frames.MAX_MESSAGE_BYTES + 1

    with linked(2) as links, pytest.raises(ValueError, match="at most 268435456 bytes"):
        links.leader.send(Long())


def test_a_message_that_claims_to_be_too_long_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(framed(b"12345"))
        with pytest.raises(ConnectionEnded, match="a message of 5 bytes"):
            receive(ours, max_bytes=4)


def test_a_message_is_waited_for_no_longer_than_the_socket_allows() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0)
        with pytest.raises(ConnectionEnded):
            receive(ours)


def test_all_threads_end() -> None:
    before = {*threading.enumerate()}
    with linked(4):
        assert len({*threading.enumerate()} - before) == 4
    assert {*threading.enumerate()} <= before
