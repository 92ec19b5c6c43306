"""Hosts that the operator lists."""

import pytest

from app.media.hosts import listed_origins
from app.settings import SettingsError
from tests.support.rows import rows


@rows(
    ("host", "origins"),
    [
        ("images.example.org", [("images.example.org", 80), ("images.example.org", 443)]),
        ("Images.Example.ORG.", [("images.example.org", 80), ("images.example.org", 443)]),
        ("a.example:8080", [("a.example", 8080)]),
        ("a.example:80", [("a.example", 80)]),
        ("b\u00fccher.example:1", [("xn--bcher-kva.example", 1)]),
        ("8.8.8.8:1", [("8.8.8.8", 1)]),
        ("[2606:4700::1]:1", [("2606:4700::1", 1)]),
    ],
)
def test_a_host_is_listed_with_its_ports(host: str, origins: list[tuple[str, int]]) -> None:
    assert listed_origins([host]) == set(origins)


@rows(
    "host",
    [
        "https://example.org",
        "example.org/",
        "example.org?",
        "user@example.org",
        "*.example.org",
        ".example.org",
        "example.org:x",
        "a b",
        "\ud800",
        "\u2603\u2603.",
        ":80",
        "[::1",
    ],
)
def test_what_is_no_host_is_rejected(host: str) -> None:
    with pytest.raises(SettingsError, match=r"^MLX_SERVER_MEDIA_DOMAINS: .* is no host; "):
        listed_origins([host])


def test_no_host_is_listed_by_default() -> None:
    assert listed_origins([]) == set()
