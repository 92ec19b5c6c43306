"""The formats of tool calls for which mlx-lm has a parser, by the name of its module."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from app.parsing.grammars.tool_grammar import CallSyntax
from app.parsing.tools.tool_call_headed import KimiSyntax, MistralSyntax
from app.parsing.tools.tool_call_json import JsonSyntax
from app.parsing.tools.tool_call_literals import LiteralSyntax
from app.parsing.tools.tool_call_tags import TagSyntax

_GLM: Final = TagSyntax(
    call="{}",
    key="<arg_key>{}</arg_key>",
    key_tag="<arg_key>",
    value_tag="<arg_value>",
    value_end="</arg_value>",
    gap="\n",
    is_gap_optional=True,
)

_GEMMA: Final = LiteralSyntax(
    head="call:",
    bracket="{",
    assign=":",
    comma=",",
    quote="<escape>",
    opening="",
    closing="",
    separator=None,
)

SYNTAXES: Final[Mapping[str, CallSyntax]] = {
    "function_gemma": _GEMMA,
    "gemma4": replace(_GEMMA, quote='<|"|>'),
    "glm47": _GLM,
    "json_tools": JsonSyntax(),
    "kimi_k2": KimiSyntax(),
    "kimi_k3": TagSyntax(
        call='<|open|>call tool="{}" index="#"<|sep|>',
        call_tag="<|open|>call",
        call_name="tool",
        call_end="<|close|>call<|sep|>",
        key='<|open|>argument key="{}" type="#"<|sep|>',
        key_tag="<|open|>argument",
        key_name="key",
        json_tag="<|open|>json",
        json_end="<|close|>json<|sep|>",
        value_end="<|close|>argument<|sep|>",
        tag_end="<|sep|>",
        separator="",
    ),
    "laguna": _GLM,
    "longcat": TagSyntax(
        call="{}",
        key="<longcat_arg_key>{}</longcat_arg_key>",
        key_tag="<longcat_arg_key>",
        value_tag="<longcat_arg_value>",
        value_end="</longcat_arg_value>",
        gap="\n",
        is_gap_optional=True,
    ),
    "minicpm5": TagSyntax(
        call='"{}">',
        key='<param name="{}">',
        key_tag="<param",
        key_name="name",
        value_end="</param>",
        has_cdata=True,
        has_python_words=True,
    ),
    "minimax_m2": TagSyntax(
        call='<invoke name="{}">',
        call_tag="<invoke",
        call_name="name",
        call_end="</invoke>",
        key='<parameter name="{}">',
        key_tag="<parameter",
        key_name="name",
        value_end="</parameter>",
        gap="\n",
        opening="\n",
        separator="",
    ),
    "mistral": MistralSyntax(),
    "muse_spark": TagSyntax(
        call='<atem:invoke name="{}">',
        call_tag="<atem:invoke",
        call_name="name",
        call_end="</atem:invoke>",
        key='<atem:parameter name="{}">',
        key_tag="<atem:parameter",
        key_name="name",
        value_end="</atem:parameter>",
        gap="\n",
        opening="\n",
    ),
    "pythonic": LiteralSyntax(),
    "qwen3_coder": TagSyntax(
        call="<function={}>",
        call_tag="<function=",
        call_end="</function>",
        key="<parameter={}>",
        key_tag="<parameter=",
        value_end="</parameter>",
        padding="\n",
        gap="\n",
        has_python_words=True,
        opening="\n",
    ),
}

# Markers that are tokens of their own in some models: grammars name them by number, as they are hidden
# from the text otherwise.
INNER_MARKERS: Final = (
    *("<escape>", '<|"|>', "[ARGS]", "[CALL_ID]"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<longcat_arg_key>", "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *("<|open|>", "<|close|>", "<|sep|>"),
    *("</function>", "</param>", "</parameter>", "</invoke>"),
    *("</atem:invoke>", "</atem:parameter>"),
)
