"""How a completion with tool calls ends."""

from collections.abc import Sequence

from app.generation.choice import Choice, Delta, TextOptions
from app.parsing.events import ContentPiece
from app.parsing.formats.message_parser import MessageParser
from app.parsing.tools.tool_format import call_text
from batching import FinishReason, TokenLogprobs, TokenOutput
from tests.support.rows import rows
from tests.support.speaker import ByteTokenizer
from tests.support.tool_formats import GENERAL

CALL = call_text("f", '{"city": "Paris"}')


def ended(text: str, reason: FinishReason, stops: Sequence[str] = ()) -> list[Delta]:
    parser = MessageParser(None, GENERAL.parsers([], new_id=lambda: "id")())
    choice = Choice(0, ByteTokenizer(), TextOptions(stops=stops), parser)
    tokens = tuple(text.encode())
    outputs = [TokenOutput(tokens[:-1], None, 0), TokenOutput(tokens[-1:], reason, 0)]
    deltas: list[Delta] = []
    while outputs and not (deltas and deltas[-1].finish_reason):
        deltas.append(choice.feed(outputs.pop(0)))
    return deltas


@rows(
    ("text", "stops", "reason", "finish_reason"),
    [
        (CALL, (), FinishReason.STOP, "tool_calls"),
        (f"{CALL}\n{CALL} Done.", ("Done",), FinishReason.STOP, "tool_calls"),
        (CALL, ("ris",), FinishReason.STOP, "stop"),
        (f"{CALL}\n{CALL[:-20]}", (), FinishReason.STOP, "stop"),
        (CALL[:-20], (), FinishReason.LENGTH, "length"),
        (CALL, (), FinishReason.LENGTH, "length"),
        ("Hi", (), FinishReason.STOP, "stop"),
    ],
)
def test_only_calls_that_are_complete_are_a_reason_to_finish(
    text: str, stops: Sequence[str], reason: FinishReason, finish_reason: str
) -> None:
    assert ended(text, reason, stops)[-1].finish_reason == finish_reason


def test_the_text_of_a_step_of_several_tokens_is_one_piece_with_all_log_probabilities() -> None:
    choice = Choice(0, ByteTokenizer(), TextOptions())
    logprobs = tuple(TokenLogprobs(-float(i), ()) for i in range(3))
    delta = choice.feed(TokenOutput(tuple(b"abc"), None, 0, logprobs))
    assert delta.events == [ContentPiece("abc")]
    assert [token.token_id for token in delta.tokens] == list(b"abc")


class PairTokenizer(ByteTokenizer):
    """Has a token of a letter and the first byte of another character."""

    PAIR = 300

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        data = b"".join(b"r\xc3" if t == self.PAIR else bytes([t]) for t in token_ids)
        return data.decode(errors="replace")


def test_a_stop_string_that_waits_for_the_rest_of_a_character_ends_the_text() -> None:
    choice = Choice(0, PairTokenizer(), TextOptions(stops=["r"]))
    delta = choice.feed(TokenOutput((*b"ab", PairTokenizer.PAIR), FinishReason.LENGTH, 0))
    assert delta.events == [ContentPiece("ab")]
    assert (delta.finish_reason, delta.stop) == (FinishReason.STOP, "r")
