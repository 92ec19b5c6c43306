"""Which addresses are of the internet."""

from ipaddress import ip_address

import pytest

from app.media.addresses import is_public, resolve
from tests.support.rows import rows

PRIVATE = [
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "100.64.0.1",  # carrier-grade NAT, and the metadata of a cloud: 100.100.100.200
    "100.100.100.200",
    "127.0.0.1",
    "127.8.8.8",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.1",
    "192.0.2.1",
    "192.168.1.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::8.8.8.8",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::7f00:1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::8.8.8.8",
    "100::1",
    "2001::1",
    "2001:db8::1",
    "2002:7f00:1::",
    "2002:a00:1::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%2",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
]
PUBLIC = [
    "8.8.8.8",
    "93.184.215.14",
    "172.32.0.1",
    "2606:4700::1",
    "2a00:1450:4001::1",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "2002:808:808::1",
]


@rows(("text", "expected"), [*((a, False) for a in PRIVATE), *((a, True) for a in PUBLIC)])
def test_an_address_is_public_or_not(text: str, expected: bool) -> None:
    assert is_public(ip_address(text)) is expected


@pytest.mark.anyio
@rows("host", ["127.0.0.1", "2130706433", "0x7f000001", "0177.0.0.1", "127.1"])
async def test_a_number_in_any_form_is_seen_as_its_address(host: str) -> None:
    """As the system reads it, which is what would be dialled."""
    assert await resolve(host, 80) == [ip_address("127.0.0.1")]
