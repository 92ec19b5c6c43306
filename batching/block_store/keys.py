"""What the store has by which names."""

from enum import Enum, StrEnum, auto
from typing import NamedTuple

from batching.block_manager import BlockHash


class Kind(StrEnum):
    """What an entry has: one of a block of either pool, or the recurrent state behind a block."""

    BLOCK = "block"
    WINDOW = "window"
    STATE = "state"


class Fetch(Enum):
    """What has become of an entry that was asked for."""

    UNASKED = auto()
    READING = auto()
    READY = auto()
    LOST = auto()


class Key(NamedTuple):
    """An entry of a model: its kind, and the hash of the prefix that it belongs to."""

    kind: Kind
    block_hash: BlockHash

    @property
    def name(self) -> str:
        """The name of its file: 64 hexadecimal digits and the kind."""
        return f"{self.block_hash.hex()}.{self.kind}"

    @classmethod
    def of_name(cls, name: str) -> "Key | None":
        """Return the key of a file; None if it is none of the store's."""
        digits, _, kind = name.partition(".")
        try:
            key = cls(Kind(kind), BlockHash(bytes.fromhex(digits)))
        except ValueError:
            return None
        # Capital letters and spaces are digits of another name.
        return key if len(digits) == 64 and key.name == name else None
