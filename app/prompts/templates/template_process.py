"""Renders chat templates, as a worker of `batching.sandbox`: it must not import anything of the project.

Should a template escape Jinja's sandbox, it can open no file and no connection.

Templates see what transformers gives them: the same options, filters, functions and variables.
"""

import json
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MAX_CHARACTERS: Final = 4 << 20
# A long conversation makes a long text: so many characters for each of the request's.
_MAX_GROWTH: Final = 4
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
# Marks where the last turn ends; the blank shows whether a template strips its text.
_END_OF_TURN: Final = "\ue000\ue001"

# Values of JSON, as clients sent it.
Turn = dict[str, Any]


class _Generation(Extension):
    """Blocks that mark what a model generates are rendered like any other text."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads it so

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict(...)`, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Turn:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> Turn:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(...)`, whose attributes cannot hide behind an underscore."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError("a name in a namespace begins with an underscore")
        super().__setitem__(name, value)


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment in which chat templates are compiled."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is; Jinja's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def render(template: str, turns: list[Turn], variables: dict[str, Any]) -> str:
    """Return the prompt of a conversation.

    Raises:
        Exception: whatever the template raises.
    """
    continues = variables.pop("continue_final_message", False)
    turns = [_with_thinking(turn) for turn in turns]
    if continues:
        turns[-1]["content"] += f"{_END_OF_TURN} "
    text = _compiled(template).render(
        messages=turns, **{"tools": None, "documents": None} | variables
    )
    return _cut(text) if continues else text


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    return environment().from_string(template)


def _with_thinking(turn: Turn) -> Turn:
    """Return a turn with the reasoning under either name that templates have for it."""
    reasoning = next((turn[name] for name in _REASONING if turn.get(name) is not None), None)
    if reasoning is None:
        return dict(turn)
    return {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _cut(text: str) -> str:
    end = text.rfind(_END_OF_TURN)
    if end < 0:
        raise TemplateError("the last turn, which is to be continued, is not in the prompt")
    is_stripped = text[end:].removeprefix(_END_OF_TURN)[:1] != " "
    return text[:end].rstrip() if is_stripped else text[:end]


def answer(line: bytes) -> bytes:
    """Return the text that a line asks for, or why there is none, as JSON."""
    template, turns, variables = json.loads(line)
    try:
        text = render(template, turns, variables)
        text.encode()
    except Exception as error:
        message = str(error) if isinstance(error, TemplateError) else ""
        return json.dumps({"error": type(error).__name__, "message": message}).encode()
    if len(text) > _MAX_CHARACTERS + _MAX_GROWTH * len(line):
        return json.dumps({"error": "its text is too long", "message": ""}).encode()
    return json.dumps({"text": text}).encode()


def prepare() -> None:
    """Import what Jinja and Python import at the first use only; later, no file can be opened."""
    uses = "{{ [1] | tojson }}{{ 1 | pprint }}{{ strftime_now('%Y') }}{{ raise_exception('') }}"
    with suppress(TemplateError):
        render(uses, [], {})
