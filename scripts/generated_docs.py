"""Writes what the code says into the documents.

The settings go into docs/settings.md and into `.env.example`, the states of a request into the
diagram of docs/architecture/index.md, and the imports between folders into its picture.

python -m scripts.generated_docs            write what is out of date
python -m scripts.generated_docs --check    exit with 1 if something is
"""

import argparse
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any, Final

from app.flags import HEADINGS
from app.settings import Settings, env_name
from batching.request import TRANSITIONS
from scripts.house.picture import HOUSE, picture

ROOT: Final = Path(__file__).parent.parent
SETTINGS: Final = Path("docs", "settings.md")
ARCHITECTURE: Final = Path("docs", "architecture", "index.md")

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
    """Return the fields with what the schema says of each, in the order of the class."""
    properties: dict[str, Schema] = Settings.model_json_schema()["properties"]
    return list(properties.items())


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


def tables() -> str:
    """Return the tables of docs/settings.md, a heading above each."""
    lines: list[str] = []
    for field, schema in fields():
        if field in HEADINGS:
            lines += ["", f"## {HEADINGS[field]}", ""]
            lines += ["| variable | default | values | meaning |"]
            lines += ["| --- | --- | --- | --- |"]
        cell = f"`{default(schema)}`" if default(schema) else "empty"
        lines.append(
            f"| `{env_name(field)}` | {cell} | {values(schema)} | {schema['description']} |"
        )
    return "\n".join(lines)


def env_example() -> str:
    """Return a `.env` file with each variable's default, commented out: a copy sets nothing."""
    head = (
        "# Every setting with its default. Copy to .env and uncomment what you change.\n"
        "# Command-line flags outrank environment variables, which outrank that file.\n"
    )
    parts = [head]
    for field, schema in fields():
        comment = wrap(f"{schema['description']} Values: {values(schema)}.".replace("`", ""), 96)
        assignment = f"#{env_name(field)}={default(schema)}\n"
        parts.append("".join(f"# {line}\n" for line in comment) + assignment)
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
    settings, architecture = root / SETTINGS, root / ARCHITECTURE
    fresh = {
        settings: filled(settings.read_text(encoding="utf-8"), "settings", tables()),
        architecture: filled(architecture.read_text(encoding="utf-8"), "states", state_diagram()),
        root / ".env.example": env_example(),
        root / HOUSE: picture(),
    }
    return {
        path: text
        for path, text in fresh.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description="Write the generated parts of the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing, only report")
    check = parser.parse_args(arguments).check
    stale = stale_files(root)
    for path, text in stale.items():
        print(f"{path.relative_to(root)} {'is out of date' if check else 'written'}")
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
