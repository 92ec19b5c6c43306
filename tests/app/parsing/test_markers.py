"""Markers in streamed text."""

from collections.abc import Sequence
from copy import copy

from hypothesis import given, strategies as st

from app.parsing.markers import MarkerSearch

texts = st.text("<ab", max_size=12)
markers = st.lists(st.text("<ab", min_size=1, max_size=4), min_size=1, max_size=5)


def pieces_of(text: str, search: MarkerSearch) -> list[str]:
    """Return texts and markers in turn, and what is left in the end."""
    pieces = [""]
    for character in text:
        certain, marker = search.push(character)
        pieces[-1] += certain
        pieces += [marker, ""] if marker else []
    return [*pieces, search.flush()]


def looked_up(text: str, markers: Sequence[str]) -> list[str]:
    """Return the same by looking at all markers."""
    pieces, held = [""], ""
    for character in text:
        held += character
        while not any(marker.startswith(held) for marker in markers):
            pieces[-1] += held[0]
            held = held[1:]
        if held in markers:
            pieces += [held, ""]
            held = ""
    return [*pieces, held]


@given(texts, markers)
def test_text_is_split_at_the_first_marker_of_any(text: str, markers: list[str]) -> None:
    search = MarkerSearch(*markers)
    expected = looked_up(text, markers)
    assert pieces_of(text, copy(search)) == expected
    assert pieces_of(text, search) == expected
