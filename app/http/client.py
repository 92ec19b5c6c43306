"""The client that sends a request, as its key identifies it."""

from dataclasses import dataclass
from typing import Final

from starlette.types import Scope


@dataclass(frozen=True, slots=True)
class Client:
    """The client that sent a request, identified by its API key; without keys there is only one.

    name: for logs and metrics; the key cannot be derived from it.
    cache_salt: separates the cached prefixes of clients; an empty salt is shared.
    is_admin: whether it may see what the server does for other clients.
    key_digest: identifies the owner of stored responses, files and batches.
    is_batch: the request is a line of a batch: low priority, and no limits of the key.
    pins: its prompts stay in the prefix cache without a time limit, whatever its requests say.
    """

    name: str
    cache_salt: str = ""
    key_digest: str = ""
    is_admin: bool = False
    is_batch: bool = False
    pins: bool = False


# Without keys every client may do what an admin may.
ANONYMOUS: Final = Client("anonymous", is_admin=True)
# The client of a path that needs no key, where others do.
VISITOR: Final = Client("anonymous")


def client_in(scope: Scope) -> Client:
    """Return the client that `Authentication` has identified."""
    client: Client = scope.get("state", {}).get("client", ANONYMOUS)
    return client
