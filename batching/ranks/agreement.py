"""Whether all ranks have what they must have in common; rank 0 names the first difference."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Final

from batching.errors import RankRefused, printable
from batching.ranks.leader import TcpLeader
from batching.ranks.member import TcpMember

_AGREED: Final = b"agreed"
# What is longer is compared and shown by its digest.
_MAX_SHOWN: Final = 60
_NOTHING: Final = "none"


def agree_with_members(
    leader: TcpLeader, facts: Mapping[str, object], hosts: Sequence[str]
) -> None:
    """Compare facts of all ranks with those of this one, by their names, in this one's order.

    Raises:
        RankRefused: a rank differs; all ranks get this error.
        RankLost: a rank is gone.
    """
    ours = _texts(facts)
    for rank, message in enumerate(leader.receive(), start=1):
        if (line := _difference(ours, _read(message))) is not None:
            error = RankRefused(rank, f"({hosts[rank]}) {line}")
            leader.end(error)
            raise error
    leader.send(_AGREED)


def agree_with_leader(member: TcpMember, facts: Mapping[str, object]) -> None:
    """Have rank 0 compare facts of this rank with its own.

    Raises:
        RankRefused: this rank or another one differs.
        RankLost: a rank is gone.
    """
    member.send(json.dumps(_texts(facts)).encode())
    member.receive()


def _texts(facts: Mapping[str, object]) -> dict[str, str]:
    return {name: _text(value) for name, value in facts.items()}


def _text(value: object) -> str:
    text = _NOTHING if value is None else str(value)
    if len(text) <= _MAX_SHOWN:
        return text
    return f"text {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _read(message: bytes) -> dict[str, str]:
    try:
        found = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    for name in dict.fromkeys((*ours, *theirs)):
        mine, other = ours.get(name, _NOTHING), theirs.get(name, _NOTHING)
        if mine != other:
            return f"has {name} {printable(str(other))}, rank 0 has {printable(mine)}"
    return None
