"""Which addresses the server may connect to for a client: those of the internet, and none of its own networks."""

import asyncio
import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final

Address = IPv4Address | IPv6Address

# RFC 4291: all that is routed.  The rest is of one machine or network, or of no use.
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")
# RFC 6052: an IPv4 address behind a translator, in the last 32 bits.
_NAT64: Final = IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Return whether an address is one of the internet, and not a way to a private one."""
    if isinstance(address, IPv6Address):
        if (inner := _inner(address)) is not None:
            return is_public(inner)
        if address not in _GLOBAL_UNICAST:
            return False
    return address.is_global and not address.is_multicast


def _inner(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that packets to this one go to."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour


async def resolve(host: str, port: int) -> list[Address]:
    """Return the addresses of a name, the best one first.

    Raises:
        OSError: there is none.
        UnicodeError: it is no name.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(ip_address(address[0]) for *_, address in found))
