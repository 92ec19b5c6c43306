"""A tensor as a file stores it, of whatever format."""

from typing import NamedTuple


class StoredTensor(NamedTuple):
    """A tensor of a file.

    type_name: as the format calls it: `BF16`, `U32`, `Q4_K`.
    num_bytes: in the file.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    num_bytes: int
