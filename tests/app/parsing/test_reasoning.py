"""Reasoning is separated from content, however the text is split into pieces."""

import re
from itertools import pairwise

from hypothesis import example, given, strategies as st

from app.parsing.events import ContentPiece, MessageEvent, ReasoningPiece, join_pieces
from app.parsing.reasoning.reasoning_parser import ReasoningParser
from tests.support.rows import rows

START, END = "<a>", "</a>"

# Markers whole and in part, so that they meet in every way.
texts = st.lists(st.sampled_from([START, END, "<", "/", "a", ">", "\n", " ", "x"])).map("".join)


def parse(pieces: list[str], *, is_open: bool = False) -> list[MessageEvent]:
    parser = ReasoningParser(START, END, is_open=is_open)
    events = [event for piece in pieces for event in parser.add(piece)]
    return join_pieces([*events, *parser.flush()])


def expected(text: str, *, is_open: bool) -> list[MessageEvent]:
    """The specification: cut at the markers, then drop the line breaks that set them off."""
    sections: list[MessageEvent] = []
    parts = [END if not is_open else START, *re.split(f"({START}|{END})", text)]
    for marker, part, closes in zip(parts[::2], parts[1::2], [*parts[2::2], None], strict=True):
        part = part.lstrip("\n")
        if marker == START:
            sections.append(ReasoningPiece(part if closes is None else part.rstrip("\n")))
        else:
            sections.append(ContentPiece(part))
    return join_pieces(sections)


@given(texts, st.lists(st.integers(0, 40)), st.booleans())
@example("\n<a>\n\nhm\n\n</a>\n\nyes\n", [], False)
@example("hm\n</a>", [3], True)
def test_the_pieces_do_not_matter(text: str, cuts: list[int], is_open: bool) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(places)]
    assert parse(pieces, is_open=is_open) == expected("".join(pieces), is_open=is_open)


@rows(
    ("is_open", "pieces", "events"),
    [
        (False, ["Hi"], [[ContentPiece("Hi")]]),
        (True, ["hm", "</a>", "Hi"], [[ReasoningPiece("hm")], [], [ContentPiece("Hi")]]),
        (False, ["<", "a>h", "m</"], [[], [ReasoningPiece("h")], [ReasoningPiece("m")]]),
        (True, ["a\n", "\n", "b"], [[ReasoningPiece("a")], [], [ReasoningPiece("\n\nb")]]),
        (False, ["1 < 2"], [[ContentPiece("1 < 2")]]),
    ],
)
def test_events_are_returned_as_soon_as_they_are_certain(
    is_open: bool, pieces: list[str], events: list[list[MessageEvent]]
) -> None:
    parser = ReasoningParser(START, END, is_open=is_open)
    assert [parser.add(piece) for piece in pieces] == events


def test_text_held_back_is_returned_at_the_end() -> None:
    assert parse(["hm\n</"], is_open=True) == [ReasoningPiece("hm\n</")]
    assert parse(["hm\n"], is_open=True) == [ReasoningPiece("hm\n")]
    assert parse(["x<"]) == [ContentPiece("x<")]
