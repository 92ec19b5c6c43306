"""Renders chat templates, in a process that may die of it: one for a request, or one that is kept.

A template is a program: it may loop for ever or fill the memory, and a thread cannot be stopped.  So it
runs in a process with limits, by running this file: it must not import anything of the project, which
would take seconds.  Should a template escape Jinja's sandbox, it can open no file and no connection.

Templates see what transformers gives them: the same options, filters, functions and variables.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from time import process_time
from typing import IO, Any, Final, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# The argument for a process that is kept, for a template of the model; its seconds of a core for each line follow.
KEPT: Final = "kept"

_CPU_SECONDS: Final = 2
_MEMORY_BYTES: Final = 512 << 20
_MAX_CHARACTERS: Final = 4 << 20
# A long conversation makes a long text: so many characters for each of the request's.
_MAX_GROWTH: Final = 4
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
# Marks where the last turn ends; the blank shows whether a template strips its text.
_END_OF_TURN: Final = "\ue000\ue001"

# Of JSON, as clients sent it.
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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
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


def answer(encoded: bytes, max_characters: int = _MAX_CHARACTERS) -> bytes:
    """Return the text that a request to this process asks for, or why there is none, as JSON."""
    template, turns, variables = json.loads(encoded)
    try:
        text = render(template, turns, variables)
        text.encode()
    except Exception as error:
        message = str(error) if isinstance(error, TemplateError) else ""
        return json.dumps({"error": type(error).__name__, "message": message}).encode()
    if len(text) > max_characters:
        return json.dumps({"error": "its text is too long", "message": ""}).encode()
    return json.dumps({"text": text}).encode()


def import_all() -> None:
    """Import what Jinja and Python import at the first use only; later, no file can be opened."""
    uses = "{{ [1] | tojson }}{{ 1 | pprint }}{{ strftime_now('%Y') }}{{ raise_exception('') }}"
    with suppress(TemplateError):
        render(uses, [], {})


def answer_lines(lines: IO[bytes], answers: IO[bytes], limit_cpu: Callable[[], None]) -> None:
    """Answer each line with a line, until there are no more."""
    for line in lines:
        limit_cpu()
        answers.write(answer(line, _MAX_CHARACTERS + _MAX_GROWTH * len(line)) + b"\n")
        answers.flush()


def limit_cpu(
    seconds: int, set_limit: Callable[[int, tuple[int, int]], None] = resource.setrlimit
) -> None:
    """Limit the seconds of a core from now on.

    At the soft limit the process ends by a signal of its own, which tells it from one that was killed; it may be
    raised again.
    """
    with suppress(ValueError, OSError):
        all_seconds = int(process_time()) + 1 + seconds
        set_limit(resource.RLIMIT_CPU, (all_seconds, resource.RLIM_INFINITY))


def limit_process(
    set_limit: Callable[[int, tuple[int, int]], None] = resource.setrlimit,
) -> None:
    """Limit this process, where the system knows such a limit; else the wall clock remains."""
    limits = {
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,
        # What is open stays so.  No other file, and no connection, can be opened, even in place of what is closed.
        resource.RLIMIT_NOFILE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for kind, amount in limits.items():
        with suppress(ValueError, OSError):
            set_limit(kind, (amount, amount))


if __name__ == "__main__":
    import_all()
    match sys.argv[1:]:
        case [kind, seconds] if kind == KEPT:
            # A terminal and a supervisor signal all processes, and the server has requests to finish.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            limit_process()
            answer_lines(sys.stdin.buffer, sys.stdout.buffer, partial(limit_cpu, int(seconds)))
        case _:
            request = sys.stdin.buffer.read()
            limit_process()
            limit_cpu(_CPU_SECONDS)
            sys.stdout.buffer.write(answer(request))
