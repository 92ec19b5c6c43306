"""Who sends a request, as far as the server knows."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Client:
    """A holder of a key, or everybody where there are no keys.

    name: for logs and metrics; the key cannot be worked out from it.
    cache_salt: what is cached for one client serves no other; empty is shared by all.
    """

    name: str
    cache_salt: str = ""


ANONYMOUS: Final = Client("anonymous")
