"""Chat templates, which are programs of a model's maker."""

from typing import Any, Final

from app.prompts.templates.template_sandbox import SANDBOX, TemplateFailed, rendered
from tests.fuzz.mutations import bytes_mutation
from tests.fuzz.target import Target

_TURNS: Final[list[dict[str, Any]]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "a\n{{ b }}"},
    {"role": "assistant", "content": "", "reasoning_content": "c", "tool_calls": [{"name": "f"}]},
]
_VARIABLES: Final = {"add_generation_prompt": True, "tools": [{"type": "function"}]}
# What only Python's own objects say of themselves.
_LEAKS: Final = ("<class '", "<function ", "<module '", "<built-in ", " object at 0x", "root:x:")
_WORDS: Final = (
    *(b"{{ ", b" }}", b"{% ", b" %}", b"{%- ", b"{# ", b" #}", b"for m in messages", b"endfor"),
    *(b"if ", b"endif", b"set x = ", b"endset", b"macro f(a)", b"endmacro", b"call(a) f(1)"),
    *(b"endcall", b"messages", b"namespace(a=1)", b"dict(a=1)", b"range(9)", b"cycler(1)"),
    *(b"joiner()", b"lipsum", b"self", b"loop", b"tools", b"caller()", b"varargs", b"kwargs"),
    *(b"f", b"x", b"'a'", b"[1]", b"|tojson", b"|attr('a')", b"|map(attribute='a')", b"|list"),
    *(b"|join", b"|format(1)", b"|safe", b"|groupby('role')", b"|pprint", b"|xmlattr", b"|sort"),
    *(b"|batch(2)", b"|dictsort", b"|string", b".format(x)", b".format_map(x)"),
    *(b"'{0.__class__}'", b".__class__", b".__globals__", b"_x", b"raise_exception('a')"),
    *(b"strftime_now('%Y')", b"**", b" * ", b"9999999", b"~", b"is mapping", b"{% include 'a' %}"),
    *(b"{% import 'os' as o %}", b"generation", b"endgeneration", b"break"),
)

SANDBOX.warm_up()


def run(data: bytes) -> None:
    """It renders, or fails as its request does, and shows nothing of the process."""
    template = data.decode(errors="replace")
    try:
        text = rendered(SANDBOX, template, _TURNS, _VARIABLES)
    except TemplateFailed:
        return
    leaks = [leak for leak in _LEAKS if leak in text and leak not in template]
    assert not leaks, text[:1000]


TARGET: Final = Target(run=run, mutate=bytes_mutation(*_WORDS), max_bytes=1 << 12)
