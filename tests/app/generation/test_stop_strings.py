"""Stop strings: the output does not depend on how the text is split into pieces."""

from hypothesis import given, strategies as st

from app.generation.stop_strings import StopStrings
from tests.support.rows import rows

# Two letters, so that texts and stop strings overlap in every way.
texts = st.text("ab", max_size=20)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str]) -> str:
    """The specification: cut before the longest stop string that the shortest prefix ends in."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return text[: end - max(map(len, found))]
    return text


@given(st.lists(texts, max_size=6), stop_lists)
def test_the_pieces_do_not_matter(pieces: list[str], stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    output = "".join(map(stop_strings.add, pieces)) + stop_strings.flush()
    text = "".join(pieces)
    assert output == expected(text, stops)
    assert stop_strings.is_matched == any(stop in text for stop in stops)
    if stop_strings.matched is not None:
        assert stop_strings.matched in stops
        assert text.startswith(output + stop_strings.matched)


@given(texts, stop_lists)
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    output = "".join(map(stop_strings.add, text))
    held = text[len(output) :]
    if not stop_strings.is_matched:
        assert held == "" or any(stop.startswith(held) for stop in stops)


@rows(
    ("stops", "pieces", "outputs"),
    [
        ([], ["ab", "c"], ["ab", "c"]),
        (["<end>"], ["a<", "b<e", "nd>c", "d"], ["a", "<b", "", ""]),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", ""]),
        (["b", "ab"], ["xab"], ["x"]),
        (["abcd", "c"], ["abcd"], ["ab"]),
    ],
)
def test_text_is_returned_as_soon_as_it_is_certain(
    stops: list[str], pieces: list[str], outputs: list[str]
) -> None:
    assert list(map(StopStrings(stops).add, pieces)) == outputs
