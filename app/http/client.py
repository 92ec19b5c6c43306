"""The client that sends a request, as its key identifies it."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Client:
    """The holder of a key; without keys all requests come from the same client.

    name: for logs and metrics; the key cannot be derived from it.
    cache_salt: separates cached prefixes of clients; an empty salt is shared.
    is_admin: whether it may see what the server does for others.
    key_digest: what the key alone gives: whose stored responses the client may see.
    is_batch: its requests are lines of a batch: of low priority, and without limits of the key.
    """

    name: str
    cache_salt: str = ""
    key_digest: str = ""
    is_admin: bool = False
    is_batch: bool = False


# Without keys every client may do what an admin may.
ANONYMOUS: Final = Client("anonymous", is_admin=True)
# The client of a path that needs no key, where others do.
VISITOR: Final = Client("anonymous")
