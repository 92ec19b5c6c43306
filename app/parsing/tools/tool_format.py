"""The format in which a model writes tool calls: markers, parser, and the grammar that enforces them.

mlx-lm knows the format of models whose templates take tools.  All other models, and models with a format
that is unknown here, use the general format, which the system message describes to them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from app.parsing.grammars.marker_tokens import tokens_of
from app.parsing.grammars.tool_grammar import CallSyntax, literal, tool_grammar
from app.parsing.tool_call_reader import CallReader, CallText
from app.parsing.tool_spec import AllowedTools, ToolChoice, ToolSpec, callable_tools, must_call
from app.parsing.tools.tool_call_headed import NUM_MISTRAL_ID_CHARACTERS, MistralSyntax
from app.parsing.tools.tool_call_json import JsonSyntax
from app.parsing.tools.tool_formats import INNER_MARKERS, SYNTAXES
from app.parsing.tools.tool_parser import ToolCallParser, new_call_id
from batching import GrammarText, ModelInfo

_START: Final = "<tool_call>"
_END: Final = "</tool_call>"

# Older Mistral models write a list, which has no end marker either.
_MISTRAL_LIST: Final = JsonSyntax("", "", "[", "]", ", ", NUM_MISTRAL_ID_CHARACTERS)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls between two markers.

    is_native: the chat template takes tools and renders calls and results itself.
    tokens: the markers that are single tokens of the model, by text.
    num_id_characters: the length of call ids in the template, if that is fixed.
    """

    syntax: CallSyntax
    start: str
    end: str
    is_native: bool = True
    tokens: Mapping[str, int] = field(default_factory=dict)
    num_id_characters: int | None = None

    @property
    def markers(self) -> Sequence[str]:
        """The markers that the parser must see, even if they are special tokens."""
        return (*filter(None, (self.start, self.end)), *self.tokens)

    def grammar(
        self, tools: Sequence[ToolSpec], choice: ToolChoice, *, is_parallel: bool
    ) -> GrammarText | None:
        """Return the grammar of a completion; None if the completion is free.

        A tool choice that requires a call is enforced.  Under `auto`, the arguments of strict tools and the
        text of freeform tools are enforced.

        Raises:
            InvalidRequest: this cannot be enforced in this format.
        """
        tools = callable_tools(tools, choice)
        is_forced = must_call(choice)
        is_bound = any(tool.strict or tool.freeform is not None for tool in tools)
        if not (is_forced or isinstance(choice, AllowedTools) or (choice == "auto" and is_bound)):
            return None
        return tool_grammar(
            self.syntax,
            self.start,
            self.end,
            tools,
            tokens=self.tokens,
            is_forced=is_forced,
            is_parallel=is_parallel,
        )

    def parsers(
        self,
        tools: Sequence[ToolSpec],
        *,
        is_parallel: bool = True,
        new_id: Callable[[], str] = new_call_id,
    ) -> Callable[[], ToolCallParser]:
        """Return what makes a parser for each choice.

        This looks through the tools' schemas, so not on the event loop; making a parser does not.
        """
        read = self.syntax.reader(tools, self.start, self.end)

        def new_reader() -> CallReader:
            text = CallText(self.start, self.end)
            return CallReader(text, read(text))

        return lambda: ToolCallParser(
            self.start, new_reader, is_parallel=is_parallel, new_id=new_id
        )


def call_text(name: str, arguments: str) -> str:
    """Return a call in the general form; `arguments` is the text of a JSON object."""
    return f'{_START}\n{{"name": {literal(name)}, "arguments": {arguments}}}\n{_END}'


def tool_format(model: ModelInfo) -> ToolFormat:
    """Return the model's own format if its template takes tools, else the general form."""
    tokenizer = model.tokenizer
    # A template that is no text is a function, and mlx-lm knows its parameters.
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    name = _parser_name(tokenizer.tool_parser)
    has_tools = template is None or "tools" in template
    if start is None or end is None or name not in SYNTAXES or not has_tools:
        return ToolFormat(JsonSyntax(), _START, _END, False, tokens_of(tokenizer, (_START, _END)))
    syntax, num_id_characters = SYNTAXES[name], None
    if name == "mistral":
        syntax, num_id_characters = _mistral_syntax(template or ""), NUM_MISTRAL_ID_CHARACTERS
    return ToolFormat(
        syntax,
        start,
        end,
        True,
        tokens_of(tokenizer, filter(None, (start, end, *INNER_MARKERS))),
        num_id_characters,
    )


def _parser_name(parser: object) -> str:
    """Return mlx-lm's name of a format: it has a module with a function for each."""
    return str(getattr(parser, "__module__", "")).rpartition(".")[2]


def _mistral_syntax(template: str) -> CallSyntax:
    if "[ARGS]" not in template:
        return _MISTRAL_LIST
    return MistralSyntax(has_ids="[CALL_ID]" in template)
