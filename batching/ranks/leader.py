"""Rank 0's side of the TCP links."""

from collections.abc import Callable, Mapping, Sequence

from batching.errors import RankLost, RanksEnded
from batching.ranks.channel import Channel
from batching.ranks.control_port import JoinedRank
from batching.ranks.fate import Fate
from batching.ranks.frames import framed
from batching.ranks.heartbeats import Guard, Heartbeats, Peer, no_guard


class TcpLeader:
    """The links to all other ranks; see `batching.ranks.links.Leader`.

    One thread at a time sends and receives; any thread may end the links.
    """

    def __init__(
        self,
        joined: Mapping[int, JoinedRank],
        hosts: Sequence[str],
        on_end: Callable[[RankLost], None],
        guard: Guard = no_guard,
    ) -> None:
        """Own the connections.

        hosts: the names of the ranks' hosts, rank 0 included.
        on_end: is called once, in any thread, when a rank is lost or `end` was called.
        guard: see `Guard`.
        """
        self._on_end = on_end
        self._fate = Fate(self._tell)
        self._channels: list[Channel] = []
        beating: list[Peer] = []
        for rank, each in joined.items():
            assert each.heartbeats is not None
            self._channels.append(Channel(Peer(rank, hosts[rank], each.messages), self._fate))
            beating.append(Peer(rank, hosts[rank], each.heartbeats))
        self._heartbeats = Heartbeats(hosts[0], 0, beating, self._fate, guard)
        self._heartbeats.start()

    @property
    def num_ranks(self) -> int:
        return len(self._channels) + 1

    @property
    def lost(self) -> RankLost | None:
        """Why the links have ended; None while they have not."""
        return self._fate.error

    def send(self, message: bytes) -> None:
        frame = framed(message)
        for channel in self._channels:
            channel.send(frame)

    def receive(self) -> Sequence[bytes]:
        with self._heartbeats.unlimited():
            return [channel.receive() for channel in self._channels]

    def check(self) -> None:
        """Find out whether a rank is gone, which takes up to a second; see `Leader`."""
        self._fate.check()

    def allow_silence(self, seconds: float) -> None:
        """Let all ranks be silent for so long."""
        self._heartbeats.allow_silence(seconds)

    def limit(self, seconds: float | None) -> None:
        """Bound what this rank does; see `Leader`."""
        self._heartbeats.limit(seconds)

    def end(self, reason: RankLost | None = None) -> None:
        """End the links, which all ranks get to know; without a reason it is on purpose, and they end well."""
        self._fate.decide(reason or RanksEnded(0, "has ended"))

    def close(self) -> None:
        """End the links, wait for the others to hear of it, for a second at most, and close the connections."""
        self.end()
        self._heartbeats.close()
        for channel in self._channels:
            channel.close()

    def _tell(self, error: RankLost) -> None:
        self._heartbeats.tell(error)
        for channel in self._channels:
            channel.interrupt()
        self._on_end(error)
