"""What a rank says first on a connection to rank 0, and the answer, as JSON."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

# Of all that the ranks say to each other.
PROTOCOL: Final = 1
MAX_HELLO_BYTES: Final = 4096

Channel = Literal["messages", "heartbeats"]
# What rank 0 sends on the first connection when all ranks have come.
START: Final = b"start"


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection.

    channel: what the connection is for; a rank opens one for messages and then one for heartbeats.
    token: what rank 0 has answered to the first one; empty in that.
    """

    rank: int
    num_ranks: int
    channel: Channel
    token: str = ""
    protocol: int = PROTOCOL

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a hello.

    refusal: why this rank can never take part; empty if it can.
    token: what the hello of the second connection names.
    is_taken: a rank with this number is there; it may be one that has just ended.
    """

    refusal: str = ""
    token: str = ""
    is_taken: bool = False

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def read_hello(message: bytes) -> Hello:
    """Return the hello that a message is.

    Raises:
        ValueError: it is none.
    """
    fields = _object(message)
    match fields:
        case {
            "rank": int(rank),
            "num_ranks": int(num_ranks),
            "channel": "messages" | "heartbeats" as channel,
            "token": str(token),
            "protocol": int(protocol),
        }:
            return Hello(rank, num_ranks, channel, token, protocol)
    raise ValueError("no hello")


def read_answer(message: bytes) -> Answer:
    """Return the answer that a message is.

    Raises:
        ValueError: it is none.
    """
    match _object(message):
        case {"refusal": str(refusal), "token": str(token), "is_taken": bool(is_taken)}:
            return Answer(refusal, token, is_taken)
    raise ValueError("no answer")


def _object(message: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(message)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("no object")
    return fields
