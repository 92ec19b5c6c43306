"""Writes what the code says into the documents.

The settings go into the README's table and into `.env.example`, the states of a request into
ARCHITECTURE.md's diagram.

python -m scripts.generated_docs            write what is out of date
python -m scripts.generated_docs --check    exit with 1 if something is
"""

import argparse
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from app.settings import Settings, env_name
from batching.request import TRANSITIONS

ROOT: Final = Path(__file__).parent.parent

# A field's part of the JSON schema; its values are of any type by nature.
Schema = dict[str, Any]

BOUNDS: Final = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}
TYPES: Final = {"string": "text", "integer": "integer", "number": "number"}


def fields() -> list[tuple[str, Schema]]:
    """Return the variables with what the schema says of each, in the order of the class."""
    properties: dict[str, Schema] = Settings.model_json_schema()["properties"]
    return [(env_name(field), schema) for field, schema in properties.items()]


def values(schema: Schema) -> str:
    """Say which values a field takes: `integer, at least 1, or auto`."""
    if "anyOf" in schema:
        return ", or ".join(map(values, schema["anyOf"]))
    if schema["type"] == "null":
        return "empty"
    if schema["type"] == "boolean":
        return "true or false"
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(schema["enum"])
    limits = [f"{words} {schema[key]:g}" for key, words in BOUNDS.items() if key in schema]
    return ", ".join([TYPES[schema["type"]], *limits])


def default(schema: Schema) -> str:
    """Write a field's default as the environment would."""
    value = schema["default"]
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def table() -> str:
    """Return the README's table."""
    rows = ["| variable | default | values | meaning |", "| --- | --- | --- | --- |"]
    for name, schema in fields():
        cell = f"`{default(schema)}`" if default(schema) else "empty"
        rows.append(f"| `{name}` | {cell} | {values(schema)} | {schema['description']} |")
    return "\n".join(rows)


def env_example() -> str:
    """Return a `.env` file that sets each variable to its default."""
    head = "# The settings with their defaults. Copy to .env; the environment outranks that file.\n"
    parts = [head]
    for name, schema in fields():
        comment = wrap(f"{schema['description']} Values: {values(schema)}.".replace("`", ""), 96)
        parts.append("".join(f"# {line}\n" for line in comment) + f"{name}={default(schema)}\n")
    return "\n".join(parts)


def state_diagram() -> str:
    """Return the states of a request and their transitions, in Mermaid."""
    arrows = [
        f"    {old.upper()} --> {new.upper()}"
        for old, reached in TRANSITIONS.items()
        for new in sorted(reached)
    ]
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> WAITING", *arrows]
    lines += [
        f"    {state.upper()} --> [*]" for state, reached in TRANSITIONS.items() if not reached
    ]
    return "\n".join([*lines, "```"])


def filled(text: str, marker: str, content: str) -> str:
    """Return a document with fresh content between `<!-- marker -->` and `<!-- /marker -->`."""
    begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"there is no {begin} ... {end} to fill")
    return f"{before}{begin}\n{content}\n{end}{after}"


def stale_files(root: Path) -> dict[Path, str]:
    """Return the files that are out of date, with what they should hold."""
    readme, architecture = root / "README.md", root / "ARCHITECTURE.md"
    fresh = {
        readme: filled(readme.read_text(encoding="utf-8"), "settings", table()),
        architecture: filled(architecture.read_text(encoding="utf-8"), "states", state_diagram()),
        root / ".env.example": env_example(),
    }
    return {
        path: text
        for path, text in fresh.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing, only tell")
    check = parser.parse_args(arguments).check
    stale = stale_files(root)
    for path, text in stale.items():
        print(f"{path.name} {'is out of date' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
