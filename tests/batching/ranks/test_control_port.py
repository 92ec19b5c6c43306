"""Who may join at rank 0's port, and what becomes of all that is not a rank."""

import errno
import json
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import NoReturn

import pytest

from batching.ranks.control_port import CannotJoin, ControlPort
from batching.ranks.frames import framed
from batching.ranks.hello import MAX_HELLO_BYTES, Answer, Hello, read_answer, read_hello
from batching.ranks.member import TcpMember, join_ranks
from tests.support.rank_links import (
    HOSTS,
    Ends,
    answer,
    control_port,
    is_dropped,
    say_hello,
    stranger,
)

JOIN_SECONDS = 30.0


class Joining:
    """A port whose owner waits for the ranks, in a thread."""

    def __init__(self, num_ranks: int, timeout: float = JOIN_SECONDS) -> None:
        self.port, self.address = control_port(num_ranks)
        self._threads = ThreadPoolExecutor(1)
        self.joined = self._threads.submit(self.port.join, timeout)

    def join(self, rank: int, num_ranks: int) -> TcpMember:
        return join_ranks(self.address, HOSTS[:num_ranks], rank, JOIN_SECONDS, Ends())

    def end(self, *ranks: int) -> None:
        """Let the ranks come that are missing, so that the port is closed."""
        with ThreadPoolExecutor(len(ranks)) as threads:
            num_ranks = max(ranks) + 1
            members = [*threads.map(lambda rank: self.join(rank, num_ranks), ranks)]
        for rank in self.joined.result(30).values():
            rank.close()
        for member in members:
            member.close()
        self._threads.shutdown()


FOREIGN = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\0\0\0\0x",
    b"\xff" * 5000,
    framed(b"x" * (MAX_HELLO_BYTES + 1)),
    framed(b"{}"),
    framed(b"[" * 4000),
    framed(b"[1]"),
    framed(b"\xff\xfe"),
    framed(b'{"rank": 1' + b"0" * 4000 + b"}"),
    framed(Hello(1, 2, "heartbeats", "guessed").encode()),
    framed(
        json.dumps({"rank": 1, "num_ranks": 2, "channel": "x", "token": "", "protocol": 1}).encode()
    ),
]


@pytest.mark.parametrize("sent", FOREIGN)
def test_what_is_no_rank_is_dropped(sent: bytes) -> None:
    joining = Joining(2)
    with stranger(joining.address, sent) as sock:
        assert is_dropped(sock)
    joining.end(1)


def test_random_bytes_change_nothing() -> None:
    random = Random(7)
    joining = Joining(2)
    hello = framed(Hello(1, 2, "messages").encode())
    for _ in range(300):
        changed = bytearray(hello)
        for _ in range(random.randrange(1, 4)):
            changed[random.randrange(4, len(changed))] = random.randrange(256)
        try:
            read_hello(bytes(changed[4:]))
        except ValueError:
            sent = bytes(changed)
        else:
            sent = random.randbytes(random.randrange(1, 200))
        stranger(joining.address, sent).close()
    joining.end(1)


def test_more_connections_than_are_kept_do_not_keep_a_rank_out() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    port = ControlPort(sock, HOSTS[:2], lambda: 0.0)
    idle = [stranger(sock.getsockname()) for _ in range(40)]
    for _ in idle:
        port.turn(1)
    with say_hello(sock.getsockname(), Hello(1, 2, "messages")) as rank:
        for _ in range(3):
            # Connection, length, hello.
            port.turn(1)
        assert read_answer(answer(rank)).token
    assert is_dropped(idle[0])
    port.close()
    for each in idle:
        each.close()


def test_one_that_sends_nothing_or_slowly_is_dropped_in_time() -> None:
    now = 0.0
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    port = ControlPort(sock, HOSTS[:2], lambda: now)
    with stranger(sock.getsockname(), b"\0\0") as slow, stranger(sock.getsockname()) as idle:
        for _ in range(4):
            port.turn(0.1)
        now = 4.0
        slow.sendall(b"\0")
        port.turn(0.1)
        now = 5.1
        port.turn(0.1)
        assert is_dropped(slow)
        assert is_dropped(idle)
    port.close()


def test_a_rank_that_is_there_twice_waits_for_its_place() -> None:
    joining = Joining(3)
    with say_hello(joining.address, Hello(1, 3, "messages")) as first:
        assert read_answer(answer(first)).token
        with say_hello(joining.address, Hello(1, 3, "messages")) as second:
            assert read_answer(answer(second)) == Answer(is_taken=True)
            assert is_dropped(second)
    # The first one has left.
    joining.end(1, 2)


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_number_that_no_rank_has_is_not_taken(rank: int) -> None:
    joining = Joining(2)
    with say_hello(joining.address, Hello(rank, 2, "messages")) as sock:
        assert read_answer(answer(sock)).is_taken
    joining.end(1)


def test_a_token_that_was_guessed_opens_nothing() -> None:
    joining = Joining(3)
    with say_hello(joining.address, Hello(1, 3, "messages")) as messages:
        token = read_answer(answer(messages)).token
        with say_hello(joining.address, Hello(1, 3, "heartbeats", "guessed")) as guessed:
            assert is_dropped(guessed)
        with say_hello(joining.address, Hello(1, 3, "heartbeats", token)):
            with say_hello(joining.address, Hello(1, 3, "heartbeats", token)) as again:
                assert is_dropped(again)
            with stranger(joining.address, framed(Hello(7, 9, "messages").encode())) as other:
                expected = "rank 7 (unknown) has a file of 9 hosts, rank 0 has one of 3"
                assert read_answer(answer(other)).refusal == expected
            # Those that wait for the others are told.
            assert answer(messages).decode() == expected
    with pytest.raises(CannotJoin, match="has a file of 9 hosts"):
        joining.joined.result(30)


def test_another_protocol_is_named_on_both_sides() -> None:
    joining = Joining(3)
    line = r"rank 1 \(mac1\) has protocol 2, rank 0 has 1"
    with say_hello(joining.address, Hello(1, 3, "messages", protocol=2)) as sock:
        assert "protocol 2" in read_answer(answer(sock)).refusal
    with pytest.raises(CannotJoin, match=line):
        joining.joined.result(30)


def test_another_number_of_hosts_is_named_on_both_sides() -> None:
    joining = Joining(2)
    line = r"rank 1 \(mac1\) has a file of 3 hosts, rank 0 has one of 2"
    with pytest.raises(CannotJoin, match=line):
        joining.join(1, 3)
    with pytest.raises(CannotJoin, match=line):
        joining.joined.result(30)


def test_ranks_that_do_not_come_are_named_to_those_that_have() -> None:
    joining = Joining(4, timeout=1.0)
    line = r"not connected within 1 s: rank 2 \(mac2\), rank 3 \(mac3\)"
    with pytest.raises(CannotJoin, match=line):
        joining.join(1, 4)
    with pytest.raises(CannotJoin, match=line):
        joining.joined.result(30)


def test_a_rank_0_that_is_not_there_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = sock.getsockname()
        line = rf"rank 0 \(mac0\) at 127.0.0.1 port {address[1]} was not there within 0.3 s: "
        with pytest.raises(CannotJoin, match=line):
            join_ranks(address, HOSTS[:2], 1, 0.3, Ends())


def test_a_rank_waits_for_a_rank_0_that_starts_later() -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        joined: list[TcpMember] = []
        thread = threading.Thread(
            target=lambda: joined.append(join_ranks(sock.getsockname(), HOSTS[:2], 1, 30, Ends()))
        )
        thread.start()
        port = ControlPort(sock.dup(), HOSTS[:2])
        ranks = port.join(JOIN_SECONDS)
        thread.join()
        assert (len(joined), [*ranks]) == (1, [1])
        ranks[1].close()
        joined[0].close()


@pytest.mark.parametrize("said", [b"{}", b"SSH-2.0-server\r\n", b"[]"])
def test_another_server_at_the_port_is_no_rank_0(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join_ranks, server.getsockname(), HOSTS[:2], 1, 30, Ends())
        theirs, _ = server.accept()
        with theirs:
            theirs.sendall(framed(said))
            with pytest.raises(CannotJoin, match="no server of this kind"):
                joining.result(30)


def test_a_rank_tries_again_where_rank_0_has_left_or_has_its_number() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        joining = threads.submit(join_ranks, server.getsockname(), HOSTS[:2], 1, 30, Ends())
        server.accept()[0].close()
        for said in (Answer(is_taken=True), Answer(refusal="rank 1 has protocol 1")):
            theirs, _ = server.accept()
            with theirs:
                theirs.sendall(framed(said.encode()))
                assert is_dropped(theirs)
        with pytest.raises(CannotJoin, match="rank 1 has protocol 1"):
            joining.result(30)


def test_what_is_checked_meanwhile_may_end_the_wait() -> None:
    def fail() -> None:
        raise CannotJoin("rank 1 (mac1) has ended with status 1")

    port, _ = control_port(2)
    with pytest.raises(CannotJoin, match="ended with status 1"):
        port.join(JOIN_SECONDS, fail)


def test_once_all_are_there_nobody_else_can_connect() -> None:
    joining = Joining(2)
    joining.end(1)
    with pytest.raises(OSError, match="refused"):
        stranger(joining.address)


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_connections_that_were_cut_are_forgotten() -> None:
    port, address = control_port(2)
    cut = stranger(address)
    port.turn(1)
    _reset(cut)
    port.turn(1)
    messages = say_hello(address, Hello(1, 2, "messages"))
    for _ in range(3):
        # Connection, length, hello.
        port.turn(1)
    assert read_answer(answer(messages)).token
    _reset(messages)
    with pytest.raises(CannotJoin, match="not connected"):
        port.join(-1)


def test_a_connection_that_cannot_be_taken_is_left_to_its_owner() -> None:
    class Full(socket.socket):
        def accept(self) -> NoReturn:
            raise OSError(errno.EMFILE, "Too many open files")

    sock = Full()
    sock.bind(("127.0.0.1", 0))
    port = ControlPort(sock, HOSTS[:2])
    with stranger(sock.getsockname()):
        port.turn(1)
        port.close()
