"""What a model writes, read as calls: the name of a format in the first line, then the text."""

from typing import Final

from app.parsing.events import ContentPiece, MessageEvent, join_pieces
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.tool_format import ToolFormat
from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.target import Target, pieces_of
from tests.support.tool_formats import FORMATS

_TYPES: Final = ("string", "number", "boolean", "null", "object", "array")
_TOOLS: Final = [
    ToolSpec(
        "f",
        {
            "type": "object",
            "properties": {name[0]: {"type": name} for name in _TYPES} | {"x": {}},
        },
    )
]
_WORDS: Final = (
    *(f"{format_.start}{format_.end}".encode() for format_ in FORMATS.values()),
    *(marker.encode() for format_ in FORMATS.values() for marker in format_.markers),
    *(b'{"name": "f", "arguments": {', b"f(s='a', n=1)", b"<parameter=s>", b"</parameter>"),
    *(b"<function=f>", b"</function>", b'<invoke name="f">', b"call:f{", b"functions.f:0", b"{}"),
    *(b'"', b"'", b"\\", b"\\u", b"\n", b"True", b"None", b"null", b"1e9", b"[", b"]", b"}", b","),
)


def run(data: bytes) -> None:
    """How it is split decides nothing, and nothing is added to what it says."""
    name, _, text = data.decode(errors="replace").partition("\n")
    if (format_ := FORMATS.get(name)) is None:
        return
    whole = _read(format_, [text])
    split = _read(format_, pieces_of(text))
    assert split == whole, (split, whole)
    content = "".join(event.text for event in whole if isinstance(event, ContentPiece))
    assert len(content) <= len(text)


def _read(format_: ToolFormat, pieces: list[str]) -> list[MessageEvent]:
    parser = format_.parsers(_TOOLS, new_id=lambda: "id")()
    events = [event for piece in pieces for event in parser.add(piece)]
    return join_pieces([*events, *parser.flush()])


TARGET: Final = Target(run=run, mutate=bytes_mutation(*_WORDS))
