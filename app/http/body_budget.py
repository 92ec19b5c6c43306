"""How many bytes the bodies of all requests may hold together, and each client's share of them."""

from collections import Counter

from app.http.client import Client


class BodyBudget:
    """The bytes of all bodies that are being read, or whose requests are in flight.

    Half of the total is divided among the clients, as shares that others never hold; the other half is
    taken in the order of arrival.  So one client may hold all but the shares of the others, and all of
    them together never hold more than the total, except for bytes that are about to be rejected.

    num_bytes: held by all clients together.
    """

    def __init__(self, max_bytes: int, num_clients: int) -> None:
        self._share = max_bytes // 2 // num_clients
        self._max_of_one = max_bytes - (num_clients - 1) * self._share
        self._by_client: Counter[Client] = Counter()
        self.num_bytes = 0

    def hold(self, client: Client, num_bytes: int) -> None:
        """Count bytes that have been received; each must be released."""
        self._by_client[client] += num_bytes
        self.num_bytes += num_bytes

    def release(self, client: Client, num_bytes: int) -> None:
        self.hold(client, -num_bytes)

    def exceeds(self, client: Client) -> bool:
        """Return whether the client holds more than its share and more than the others leave."""
        return self.num_bytes > self._max_of_one and self._by_client[client] > self._share
