"""How a model writes tool calls: the markers, the parser, and the grammar that enforces them.

mlx-lm knows the format of the models whose templates take tools.  Its JSON format is parsed here
as it arrives, and so is the general form, which is the same and is described to all other models
in the system message.  Any other format is parsed by mlx-lm's function, one whole call at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from app.parsing.tool_call_buffered import BufferedCallReader, ParseCalls
from app.parsing.tool_call_json import JsonCallReader
from app.parsing.tool_grammar import (
    CallSyntax,
    JsonSyntax,
    Marker,
    ParameterSyntax,
    literal,
    tool_grammar,
)
from app.parsing.tool_parser import ToolCallParser, new_call_id
from app.parsing.tool_spec import NamedTool, ToolChoice, ToolSpec
from batching import GrammarText, InvalidRequest, ModelInfo

_START: Final = "<tool_call>"
_END: Final = "</tool_call>"

_AFTER_NAME: Final = literal('", "arguments": ')
_JSON: Final = JsonSyntax('\n{"name": "', _AFTER_NAME, literal("}\n"))
_MISTRAL_LIST: Final = JsonSyntax(
    '{"name": "', _AFTER_NAME, literal("}"), literal("["), literal("]"), literal(", ")
)

# Mistral's templates reject ids of any other length.
_NUM_MISTRAL_ID_CHARACTERS: Final = 9


# Some models have special tokens for them, which are otherwise hidden from the text.
_INNER_MARKERS: Final[dict[str, tuple[str, ...]]] = {
    "function_gemma": ("<escape>",),
    "gemma4": ('<|"|>',),
    "glm47": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "kimi_k2": ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>"),
    "mistral": ("[ARGS]",),
}


class ToolFormat(Protocol):
    @property
    def is_native(self) -> bool:
        """True if the chat template takes tools, and writes calls and results itself."""
        ...

    @property
    def is_blocking(self) -> bool:
        """True if the parser may take up to two seconds where a call ends."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """All that the parser has to see, also where it is a special token."""
        ...

    @property
    def num_id_characters(self) -> int | None:
        """How long a call's id is in the template, if that is fixed."""
        ...

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, *, is_parallel: bool
    ) -> GrammarText | None:
        """Return the grammar of a completion; None if it is free.

        `required` and a named tool are enforced, and under `auto` the arguments of strict tools.

        Raises:
            InvalidRequest: that cannot be enforced in this format.
        """
        ...

    def parser(
        self,
        tools: Sequence[ToolSpec],
        *,
        is_parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> ToolCallParser: ...


@dataclass(frozen=True, slots=True)
class JsonToolFormat:
    """A JSON object of name and arguments between two markers; all of it can be enforced."""

    is_native: bool
    start: Marker
    end: Marker
    is_blocking = False
    num_id_characters = None

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.start.text, self.end.text)

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, *, is_parallel: bool
    ) -> GrammarText | None:
        return _grammar(_JSON, self.start, self.end, tools, choice, is_parallel)

    def parser(
        self,
        tools: Sequence[ToolSpec],
        *,
        is_parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> ToolCallParser:
        def new_reader() -> JsonCallReader:
            return JsonCallReader(self.start.text, self.end.text)

        return ToolCallParser(self.start.text, new_reader, is_parallel=is_parallel, new_id=new_id)


@dataclass(frozen=True, slots=True)
class ParsedToolFormat:
    """A format that mlx-lm parses; without `syntax`, nothing of it can be enforced."""

    start: Marker
    end: Marker
    parse: ParseCalls
    syntax: CallSyntax | None = None
    num_id_characters: int | None = None
    inner_markers: tuple[str, ...] = ()
    is_native = True
    is_blocking = True

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.start.text, self.end.text, *self.inner_markers)))

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, *, is_parallel: bool
    ) -> GrammarText | None:
        return _grammar(self.syntax, self.start, self.end, tools, choice, is_parallel)

    def parser(
        self,
        tools: Sequence[ToolSpec],
        *,
        is_parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> ToolCallParser:
        described = [tool.template_fields() for tool in tools]

        def new_reader() -> BufferedCallReader:
            return BufferedCallReader(self.start.text, self.end.text, self.parse, described)

        return ToolCallParser(self.start.text, new_reader, is_parallel=is_parallel, new_id=new_id)


def call_text(name: str, arguments: str) -> str:
    """Return a call in the general form; `arguments` is the text of a JSON object."""
    return f'{_START}\n{{"name": {literal(name)}, "arguments": {arguments}}}\n{_END}'


def tool_format(model: ModelInfo) -> ToolFormat:
    """Return the model's own format if its template takes tools, else the general form."""
    tokenizer = model.tokenizer
    # Without a text it is a function, and mlx-lm knows what that takes.
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    if start is None or end is None or (template is not None and "tools" not in template):
        return JsonToolFormat(False, _marker(model, _START), _marker(model, _END))
    return _native_format(model, _marker(model, start), _marker(model, end), template or "")


def _native_format(model: ModelInfo, start: Marker, end: Marker, template: str) -> ToolFormat:
    parse: ParseCalls = model.tokenizer.tool_parser
    # mlx-lm has a module for each format, with a function of the same name in each.
    name = parse.__module__.rpartition(".")[2]
    if name == "json_tools":
        return JsonToolFormat(True, start, end)
    return ParsedToolFormat(
        start,
        end,
        parse,
        _syntax(model, name, template),
        _NUM_MISTRAL_ID_CHARACTERS if name == "mistral" else None,
        _INNER_MARKERS.get(name, ()),
    )


def _syntax(model: ModelInfo, name: str, template: str) -> CallSyntax | None:
    match name:
        case "qwen3_coder":
            return ParameterSyntax()
        case "mistral":
            return _mistral_syntax(model, template)
        case _:
            return None


def _mistral_syntax(model: ModelInfo, template: str) -> JsonSyntax:
    """Newer models write `name[ARGS]{...}`, older ones a list of objects."""
    if "[ARGS]" not in template:
        return _MISTRAL_LIST
    return JsonSyntax("", _marker(model, "[ARGS]").symbol, "")


def _marker(model: ModelInfo, text: str) -> Marker:
    token_ids = model.tokenizer.encode(text, add_special_tokens=False) if text else []
    return Marker(text, token_ids[0] if len(token_ids) == 1 else None)


def _grammar(
    syntax: CallSyntax | None,
    start: Marker,
    end: Marker,
    tools: Sequence[ToolSpec],
    choice: ToolChoice,
    is_parallel: bool,
) -> GrammarText | None:
    is_forced = choice not in ("auto", "none")
    is_strict = choice == "auto" and any(tool.strict for tool in tools)
    if not (is_forced or is_strict):
        return None
    if syntax is None:
        param, field = ("tool_choice", "this") if is_forced else ("tools", "strict")
        raise InvalidRequest(param, f"{field} cannot be enforced in this model's format of calls")
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.name == choice.name]
    return tool_grammar(syntax, start, end, tools, is_forced=is_forced, is_parallel=is_parallel)


def thinking_markers(model: ModelInfo) -> tuple[Marker, Marker] | None:
    """Return what begins and ends the model's reasoning; None if it does not reason."""
    start, end = model.tokenizer.think_start, model.tokenizer.think_end
    if start is None or end is None:
        return None
    return _marker(model, start), _marker(model, end)
