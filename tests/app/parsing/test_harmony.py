"""Parts of gpt-oss's messages, however their text arrives."""

from collections.abc import Sequence

from hypothesis import given, strategies as st

from app.parsing.events import (
    ContentPiece,
    MessageEvent,
    ReasoningPiece,
    ToolCallArguments,
    ToolCallStart,
    join_pieces,
)
from app.parsing.harmony.harmony_parser import MARKERS, HarmonyParser
from tests.support.rows import rows

ANALYSIS = "<|channel|>analysis<|message|>Need the weather.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json"
    '<|message|>{"city": "Paris"}'
)
THOUGHT = ReasoningPiece("Need the weather.")
WEATHER = [ToolCallStart(0, "id", "weather"), ToolCallArguments(0, '{"city": "Paris"}')]


def parse(
    pieces: Sequence[str], *, has_tools: bool = True, is_parallel: bool = True
) -> tuple[list[MessageEvent], HarmonyParser]:
    parser = HarmonyParser(has_tools=has_tools, is_parallel=is_parallel, new_id=lambda: "id")
    events = [event for piece in pieces for event in parser.add(piece)]
    return join_pieces([*events, *parser.flush()]), parser


@rows(
    ("text", "events"),
    [
        ("", []),
        ("No header.", [ContentPiece("No header.")]),
        ("x" * 1000, [ContentPiece("x" * 1000)]),
        (ANALYSIS + FINAL, [THOUGHT, ContentPiece("It rains.")]),
        (ANALYSIS + CALL + "<|call|>", [THOUGHT, *WEATHER]),
        # The recipient may stand before the channel, and the end may be cut off.
        (
            ANALYSIS + "<|start|>assistant to=functions.weather<|channel|>commentary"
            '<|message|>{"city": "Paris"}',
            [THOUGHT, *WEATHER],
        ),
        # What is said to the user before a call.
        (
            "<|channel|>commentary<|message|>I look.<|end|>" + CALL,
            [ContentPiece("I look."), *WEATHER],
        ),
        # A tool of no namespace keeps its name.
        (
            "<|channel|>commentary to=browser.open<|message|>{}",
            [ToolCallStart(0, "id", "browser.open"), ToolCallArguments(0, "{}")],
        ),
        # Cut within a header: that is no text of the message.
        (ANALYSIS + "<|start|>assistant<|chan", [THOUGHT]),
        (ANALYSIS + "<|start|>assistant<|channel|>final", [THOUGHT]),
        # A channel that begins without the end of the one before.
        (
            "<|channel|>analysis<|message|>A<|channel|>final<|message|>B",
            [ReasoningPiece("A"), ContentPiece("B")],
        ),
        ("<|message|>B<|message|>C", [ContentPiece("BC")]),
        ("a < b", [ContentPiece("a < b")]),
        # Text without a header, in any place.
        (ANALYSIS + "It rains.", [THOUGHT, ContentPiece("It rains.")]),
        (ANALYSIS + "It rains. " * 99, [THOUGHT, ContentPiece("It rains. " * 99)]),
        (ANALYSIS + "It rains.<|start|>assistant", [THOUGHT, ContentPiece("It rains.")]),
        (ANALYSIS + "\n" + FINAL, [THOUGHT, ContentPiece("It rains.")]),
        (ANALYSIS + "a <", [THOUGHT, ContentPiece("a <")]),
        # Text in a header.
        ("<|channel|>final It rains.<|return|>", [ContentPiece("It rains.")]),
        ("<|channel|>final " + "It rains. " * 99, [ContentPiece("It rains. " * 99)]),
        (
            "<|channel|>analysis Need the weather.<|end|>" + FINAL,
            [THOUGHT, ContentPiece("It rains.")],
        ),
        (
            ANALYSIS + "<|start|>assistant It rains.<|return|>",
            [THOUGHT, ContentPiece("It rains.")],
        ),
        (CALL.replace("<|message|>", "") + "<|call|>", WEATHER),
        # Right after a name.
        ("<|channel|>finalThe answer.<|return|>", [ContentPiece("The answer.")]),
        (
            "<|channel|>analysisNeed the weather.<|end|>" + FINAL,
            [THOUGHT, ContentPiece("It rains.")],
        ),
        (ANALYSIS + "<|start|>assistantIt rains.", [THOUGHT, ContentPiece("It rains.")]),
        ('<|channel|>commentary to=functions.weather{"city": "Paris"}<|call|>', WEATHER),
        # A name in a text without a header is no recipient.
        ("Use to=functions.f.", [ContentPiece("Use to=functions.f.")]),
        # Cut within a header that has a recipient.
        (ANALYSIS + CALL.partition("<|message|>")[0], [THOUGHT]),
        (ANALYSIS + CALL.partition("son<|message|>")[0], [THOUGHT]),
        (" to=functions.weather<|channel|>commentary json", []),
        *[(ANALYSIS + "<|start|>assistant to=f"[:-cut], [THOUGHT]) for cut in (1, 2, 3)],
        # No arguments; without an end they may have been cut off.
        *[
            (
                f"<|channel|>commentary to=functions.weather<|message|>{end}",
                [WEATHER[0], ToolCallArguments(0, "{}")],
            )
            for end in ("<|call|>", "<|end|>", "<|start|>", "<|channel|>")
        ],
        ("<|channel|>commentary to=functions.weather<|message|>", WEATHER[:1]),
        # Markers that do not make a header longer, and a name that does.
        ("<|channel|>" * 99 + "x" * 256, [ContentPiece("x" * 11)]),
        ("<|channel|>final<|constrain|><|constrain|>x<|message|>B", [ContentPiece("B")]),
        (
            "<|channel|>final A<|channel|>analysis<|message|>B",
            [ContentPiece("A"), ReasoningPiece("B")],
        ),
    ],
)
def test_parts_become_events(text: str, events: list[MessageEvent]) -> None:
    assert parse([text])[0] == parse(list(text))[0] == events


@given(st.lists(st.sampled_from([*MARKERS, "assistant", "final", "to=functions.f", "{}", "<"])))
def test_the_events_do_not_depend_on_how_text_is_split(parts: list[str]) -> None:
    assert parse(parts)[0] == parse(list("".join(parts)))[0] == parse(["".join(parts)])[0]


def test_nothing_is_read_after_a_complete_message() -> None:
    for text in (FINAL, CALL + "<|call|>"):
        events, parser = parse([text, CALL])
        assert parser.is_finished
        assert events == parse([text])[0]


def test_calls_follow_each_other_where_they_may() -> None:
    two = CALL + "<|end|>" + CALL.replace("Paris", "Rome") + "<|call|>"
    second = [ToolCallStart(1, "id", "weather"), ToolCallArguments(1, '{"city": "Rome"}')]
    events, parser = parse([two])
    assert events == [*WEATHER, *second]
    assert parser.has_calls is True
    assert parse([two.replace('Rome"}', "Ro")])[1].has_calls is False
    events, parser = parse([two], is_parallel=False)
    assert events == WEATHER
    assert parser.is_finished
    assert parser.has_calls is True


def test_a_call_may_hold_any_number() -> None:
    arguments = '{"n": ' + "9" * 5000 + "}"
    events, parser = parse([CALL.replace('{"city": "Paris"}', arguments)])
    assert events == [WEATHER[0], ToolCallArguments(0, arguments)]
    assert parser.has_calls is True


def test_without_tools_a_recipient_means_nothing() -> None:
    events, parser = parse([ANALYSIS + CALL], has_tools=False)
    assert events == [THOUGHT, ContentPiece('{"city": "Paris"}')]
    assert not parser.has_calls
