"""Tool calls whose parameters stand between tags of their own."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from html import unescape
from typing import Any, Final

from app.parsing.grammars.schema_types import (
    ANY_TYPE,
    PYTHON_WORDS,
    TYPES,
    Schema,
    Schemas,
    is_any_text,
    keyword_budget,
    parameter_types,
)
from app.parsing.grammars.tool_grammar import Rules, check_key, check_strict_text, literal
from app.parsing.markers import MarkerSearch
from app.parsing.tool_call_reader import BLANKS, CallText, NotCallSyntax, Read, Steps, Write
from app.parsing.tool_spec import ToolSpec
from app.parsing.tools.json_text import escaped, pass_json
from app.parsing.tools.tool_call_json import JsonSyntax
from app.parsing.tools.tool_call_literals import json_of

_KEY: Final = re.compile(r"""[^\s<>"'](?:[^<>"'\n]*[^\s<>"'])?""")
_STRING: Final = frozenset({"string"})
_CDATA: Final = "<![CDATA["
_CDATA_END: Final = "]]>"
# Text that needs no such section.
_PLAIN: Final = r"[^<&\n]*"


@dataclass(frozen=True, slots=True)
class _CalledTool:
    """The facts about a tool that the reader needs.

    types: the types of its parameters, by name.
    ends: finds what ends a value; a copy for each.
    """

    types: Mapping[str, frozenset[str]]
    ends: MarkerSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class TagSyntax:
    """Tags around the call, each key and each value.

    Strings are plain text, so of a string's schema only `enum` and `const` can be enforced, and
    no string can hold the tag that ends it; other types are JSON.  The parameters come in the
    schema's order, and the arguments are always bound to the schema: the format of any other
    parameter is unknown.

    call, key: the tags, with `{}` for the name and `#` for a call's number or a value's type.
    call_tag, key_tag: how these begin, if the name is not all that differs.
    call_name, key_name: the attributes that hold the name; "" for tags that hold only that.
    json_tag, json_end: around a whole object of arguments in JSON.
    padding: belongs to the tags, on both sides of a value.
    gap: the text between tags; it may be left out if `is_gap_optional`.
    """

    call: str
    key: str
    value_end: str
    call_tag: str = ""
    key_tag: str
    call_end: str = ""
    call_name: str = ""
    key_name: str = ""
    tag_end: str = ">"
    value_tag: str = ""
    json_tag: str = ""
    json_end: str = ""
    padding: str = ""
    gap: str = ""
    is_gap_optional: bool = False
    has_python_words: bool = False
    has_cdata: bool = False
    opening: str = ""
    closing: str = ""
    separator: str | None = None

    @property
    def _is_typed(self) -> bool:
        return "#" in self.key

    # The grammar.

    def rules(self, rules: Rules, name: str, tool: ToolSpec, *, is_bound: bool) -> None:
        gap = self._gap(rules)
        before, number, after = self.call.replace("{}", tool.name).partition("#")
        index = "/[1-9][0-9]{0,3}/" if number else ""
        parts = [rules.spell(before), index, rules.spell(after), gap]
        schemas = rules.schemas(tool.parameters)
        for i, (key, schema, is_required) in enumerate(schemas.properties(tool.parameters)):
            check_key(key, _KEY)
            values = self._values(rules, f"{name}_{i}", key, schemas, schema, tool)
            part = rules.choice(f"{name}_{i}", (f"{value} {gap}" for value in values))
            parts.append(part if is_required else f"{part}?")
        if self.call_end:
            parts += [rules.spell(self.call_end), gap]
        rules.add(name, " ".join(parts))

    def _gap(self, rules: Rules) -> str:
        return f"{literal(self.gap)}?" if self.is_gap_optional else rules.spell(self.gap)

    def _values(
        self, rules: Rules, name: str, key: str, schemas: Schemas, schema: Any, tool: ToolSpec
    ) -> Iterator[str]:
        """Yield the tags and the value of one parameter, for each of its types."""
        if tool.freeform is not None:
            begin, end = self._begin(rules, key, "string"), self.padding + self.value_end
            if self.has_cdata:
                begin, end = f"{begin} {rules.spell(_CDATA)}", _CDATA_END + end
            yield f"{begin} {rules.freeform(f'{name}_text', tool.freeform, end)}"
            return
        schemas = schemas.inside(schema)
        found = schemas.variants(schema)
        texts = [variant for variant in found if is_any_text(variant)]
        if texts and tool.strict:
            check_strict_text(found)
        if self._is_typed:
            found = [typed for each in found for typed in _typed(each)]
        elif texts:
            found = texts[:1]
        for index, variant in enumerate(found):
            yield from self._value(rules, f"{name}_{index}", key, schemas, variant)

    def _value(
        self, rules: Rules, name: str, key: str, schemas: Schemas, variant: Schema
    ) -> Iterator[str]:
        kind = str(variant.get("type"))
        begin = self._begin(rules, key, "number" if kind == "integer" else kind)
        end = self.padding + self.value_end
        if kind != "string":
            value = rules.json(f"{name}_json", schemas.with_definitions(variant))
            yield f"{begin} {value} {rules.spell(end)}"
            if self.has_python_words and "enum" not in variant:
                words = PYTHON_WORDS.get(kind, ())
                yield from (f"{begin} {literal(word)} {rules.spell(end)}" for word in words)
        elif "enum" in variant:
            texts = " | ".join(rules.spell(text) for text in variant["enum"])
            yield f"{begin} ({texts}) {rules.spell(end)}"
        elif self.has_cdata:
            yield f"{begin} {rules.text(f'{name}_plain', end, _PLAIN)}"
            yield f"{begin} {rules.spell(_CDATA)} {rules.text(f'{name}_text', _CDATA_END + end)}"
        else:
            yield f"{begin} {rules.text(f'{name}_text', end)}"

    def _begin(self, rules: Rules, key: str, kind: str) -> str:
        """Return all that stands before a value."""
        name = key.replace("&", "&amp;") if self._is_typed else key
        tag = rules.spell(self.key.replace("#", kind).replace("{}", name))
        if not self.value_tag:
            return f"{tag} {rules.spell(self.padding)}"
        return f"{tag} {self._gap(rules)} {rules.spell(self.value_tag)}"

    # The reader.

    def reader(self, tools: Sequence[ToolSpec], start: str, end: str) -> Read:
        budget = keyword_budget()

        def known(parameters: Schema) -> _CalledTool:
            ends = self._value_ends(start, end, parameters.get("properties", ()))
            return _CalledTool(parameter_types(parameters, budget), MarkerSearch(*ends))

        by_name = {tool.name: known(tool.parameters) for tool in tools}
        unknown = known({})
        return partial(self._read, called=lambda name: by_name.get(name, unknown))

    def _read(self, text: CallText, called: Callable[[str], _CalledTool]) -> Steps[None]:
        if not self.call_tag and (yield from text.after(BLANKS)) == "{":
            yield from JsonSyntax().read(text)
            return
        markers = [*filter(None, [self.call_tag]), text.end]
        if not self.call_tag:
            yield from self._read_call(text, called)
        while (yield from text.one_of(*markers)) != text.end:
            yield from self._read_call(text, called)

    def _read_call(self, text: CallText, called: Callable[[str], _CalledTool]) -> Steps[None]:
        """Read one call; the marker of another one or of the section's end stays the next."""
        # Another section begins where the end of this one is missing.
        ends = [*filter(None, [self.call_end]), text.end, text.start]
        marker = ""
        if self.tag_end in self.call:
            head = yield from text.head(self.tag_end)
            name = _name(head, self.call_name)
        else:
            name = yield from text.word()
            marker = yield from text.one_of(self.key_tag, text.end)
        if not name:
            raise NotCallSyntax
        text.begin(name)
        end = yield from self._read_parameters(text, called(name), marker, ends)
        if end != self.call_end:
            text.put_back(end)
        text.finish()

    def _read_parameters(
        self, text: CallText, tool: _CalledTool, marker: str, ends: Sequence[str]
    ) -> Steps[str]:
        """Write the arguments, the first of which may have begun; return the end marker."""
        if not marker:
            tags = filter(None, [self.key_tag, self.json_tag])
            marker = yield from text.until(*tags, *ends, write=_ignore)
        before = "{"
        while marker not in ends:
            is_json = marker == self.json_tag
            head, marker = yield from self._read_key(text, ends)
            if marker in ends:
                break
            if is_json:
                return (yield from self._read_json(text, ends))
            key, kind = _name(head, self.key_name), _name(head, "type") if self._is_typed else ""
            text.write(f'{before}"{escaped(key)}": ')
            before = ", "
            types = frozenset({kind}) if kind else tool.types.get(key, ANY_TYPE)
            yield from self._read_value(text, tool.ends, types)
            # Text between parameters says nothing.
            marker = yield from text.until(self.key_tag, *ends, write=_ignore)
        text.write("{}" if before == "{" else "}")
        return marker

    def _read_json(self, text: CallText, ends: Sequence[str]) -> Steps[str]:
        """Write an object that is all of the arguments; return the end marker."""
        marker = yield from pass_json(text, text.write, [self.json_end, *ends])
        return marker if marker in ends else (yield from text.until(*ends, write=_ignore))

    def _read_key(self, text: CallText, ends: Sequence[str]) -> Steps[tuple[str, str]]:
        """Return what names a parameter, and an end marker if there is no value."""
        parts: list[str] = []
        key_end = self.key.partition("{}")[2] if self.value_tag else self.tag_end
        marker = yield from text.until(key_end, *ends, write=parts.append)
        if marker == key_end and self.value_tag:
            marker = yield from text.until(self.value_tag, *ends, write=_ignore)
        return "".join(parts), marker

    def _read_value(self, text: CallText, ends: MarkerSearch, types: frozenset[str]) -> Steps[None]:
        """Write one value; what follows in place of its own end stays the next."""
        parts: list[str] = []
        is_text = types == _STRING

        def write(part: str) -> None:
            if is_text:
                text.write(escaped(part))
            else:
                parts.append(part)

        if is_text:
            text.write('"')
        yield from self._pass_value(text, ends, write)
        if is_text:
            text.write('"')
        else:
            value = "".join(parts)
            text.write(json_of(value, types) or f'"{escaped(value)}"')

    def _pass_value(self, text: CallText, ends: MarkerSearch, write: Write) -> Steps[None]:
        padding = self.padding

        def write_padded(part: str) -> None:
            nonlocal padding
            if part:
                write(part.removeprefix(padding))
                padding = ""

        marker = yield from text.until_found(copy(ends), write_padded)
        if marker == _CDATA:
            yield from text.until(_CDATA_END, write=write)
        while marker == _CDATA:
            marker = yield from text.until_found(copy(ends), _ignore)
        if marker not in (self.value_end, self.padding + self.value_end):
            text.put_back(marker)

    def _value_ends(self, start: str, end: str, keys: Iterable[str]) -> Iterator[str]:
        """Yield what ends a value, also one whose own end is missing, or begins a section of it.

        A tag of another part alone is text: a value may be about such calls, or a page with tags of these names.
        """
        yield from (self.value_end, self.padding + self.value_end)
        if self.has_cdata:
            yield _CDATA
        after_call = self.call_end + self.gap if self.call_end else ""
        yield from (after_call + end, self.padding + after_call + end)
        if self.gap and self.call_end:
            yield self.gap + after_call + (self.call_tag or start)
        if self.gap and not self._is_typed:
            yield from (self.gap + self.key.replace("{}", key) for key in keys)


def _typed(variant: Schema) -> list[Schema]:
    return [variant] if "type" in variant else [{**variant, "type": name} for name in TYPES]


def _ignore(text: str) -> None:
    """Drop a text."""


def _name(head: str, attribute: str) -> str:
    """Return what a tag names: the value of an attribute, or all of the tag."""
    if not attribute:
        return head.strip().strip("\"'")
    pattern = rf"""\b{attribute}\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'<>]+))"""
    found = re.search(pattern, head)
    return unescape(next(filter(None, found.groups()), "")) if found else ""
