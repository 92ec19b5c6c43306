"""The command line's flags: one for each setting, made from its declaration."""

import argparse
import re
from collections.abc import Container, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final

from app import PROGRAM, __version__
from app.settings import ENV_PREFIX, FORMER_NAMES, Settings, SettingsError, env_name

SERVE: Final = "serve"
RUN_BATCH: Final = "run-batch"
# What it needs beside flags.
FILES: Final = ("in", "out")

# The headings above groups of settings, by the first one of each.
HEADINGS: Final = {
    "model": "Model",
    "adapters": "Adapters",
    "enable_batching": "Batching and the KV cache",
    "dtype": "Device and precision",
    "host": "Address",
    "max_queued_requests": "Limits",
    "api_keys": "Keys and access",
    "read_timeout": "Timeouts and shutdown",
    "data_dir": "Stored data",
    "max_file_mib": "Files and batches",
    "max_images": "Images",
    "kv_events": "KV events",
    "log_level": "Logging",
}
_SERVE: Final = "OpenAI-compatible inference server on MLX."
_RUN_BATCH: Final = (
    "Serve the requests of IN, one JSON object a line as in OpenAI's batches, and write their results "
    "to OUT. The same command goes on where one was stopped, with the results in OUT.part. The exit "
    "status is 0 if all requests were served, 1 if some have failed, 2 if it cannot run, and above 128 "
    "after a signal."
)
_FLAGS: Final = (
    "Each flag is also a variable, from the environment "
    "or a file .env; flags outrank the environment, and that outranks the file. A flag of true or "
    "false stands for true by itself, and with no- in front for false: --no-enable-batching."
)
_PROCESS_LIST: Final = (
    " Others on this machine see a flag in the list of processes; a file is safer."
)

# A field's part of the JSON schema; its values are of any type by nature.
_Schema = Mapping[str, Any]


def flag_name(field: str) -> str:
    """Return the flag that sets a field."""
    return f"--{field.replace('_', '-')}"


def parse_flags(arguments: Sequence[str], files: Sequence[str] = ()) -> dict[str, str]:
    """Return what a command line sets, by field; an empty value is no value.

    files: the names of arguments that the command needs beside flags; only `run-batch` has some.

    Raises:
        SettingsError: a flag is unknown, or has no value; or a file is not named.
        SystemExit: the help or the version was asked for, and is printed.
    """
    try:
        flags, unknown = _parser(files).parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise SettingsError(f"{PROGRAM}: {error.argument_name}: {error.message}") from None
    if unknown:
        raise SettingsError(f"{PROGRAM}: {_unknown(unknown[0])}")
    found = {field: value for field, value in vars(flags).items() if value}
    if missing := [name for name in files if name not in found]:
        raise SettingsError(f"{PROGRAM}: {RUN_BATCH} needs {missing[0].upper()}")
    return found


def serving_help(word: str) -> str:
    """Return the help of `serve`, or of `run-batch` with its files, whatever else is given."""
    return _parser(FILES if word == RUN_BATCH else ()).format_help()


def name_flags(text: str, fields: Container[str]) -> str:
    """Return a text in which flags stand for the variables of some fields."""

    def renamed(variable: re.Match[str]) -> str:
        field = variable[1].lower()
        return flag_name(field) if field in fields else variable[0]

    return re.sub(rf"{ENV_PREFIX}([A-Z_]+)", renamed, text)


def _unknown(argument: str) -> str:
    if not argument.startswith("-"):
        return f"unexpected argument {argument!r}"
    flag = argument.partition("=")[0]
    near = get_close_matches(flag, [*map(flag_name, Settings.model_fields), "--help"], n=1)
    return f"unknown flag {flag}" + "".join(f"; did you mean {known}?" for known in near)


def _parser(files: Sequence[str]) -> argparse.ArgumentParser:
    command = " ".join([PROGRAM, RUN_BATCH, *map(str.upper, files)])
    usage = f"{command} [flags]"
    parser = argparse.ArgumentParser(
        PROGRAM,
        usage=usage if files else f"{PROGRAM} [{SERVE}] [flags]",
        description=f"{_RUN_BATCH} {_FLAGS}" if files else f"{_SERVE} {_FLAGS}",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    for name in files:
        parser.add_argument(name, metavar=name.upper(), nargs="?", help=argparse.SUPPRESS)
    group: argparse._ActionsContainer = parser
    for field, schema in Settings.model_json_schema()["properties"].items():
        if field in HEADINGS:
            group = parser.add_argument_group(HEADINGS[field])
        _add(group, field, schema)
    for former, field in FORMER_NAMES.items():
        parser.add_argument(flag_name(former), dest=field, help=argparse.SUPPRESS)
    return parser


def _add(group: argparse._ActionsContainer, field: str, schema: _Schema) -> None:
    """Add a field's flag; what it takes is checked with the other settings."""
    flag, text = flag_name(field), _help(field, schema)
    if schema.get("type") != "boolean":
        group.add_argument(flag, metavar=_metavar(field, schema), help=text)
        return
    group.add_argument(flag, nargs="?", const="true", metavar="true|false", help=text)
    off = flag_name(f"no_{field}")
    group.add_argument(off, dest=field, action="store_const", const="false", help=argparse.SUPPRESS)


def _metavar(field: str, schema: _Schema) -> str:
    """Say what a flag takes: `N`, `auto|cpu|gpu`, or the last word of its name."""
    members = [member for member in schema.get("anyOf", [schema]) if member["type"] != "null"]
    return "|".join(_words(field, member) for member in members)


def _words(field: str, schema: _Schema) -> str:
    if "enum" in schema or "const" in schema:
        return "|".join(schema.get("enum", [schema.get("const")]))
    is_text = schema["type"] == "string"
    return field.rpartition("_")[2].upper() if is_text else "N"


def _help(field: str, schema: _Schema) -> str:
    value = schema["default"]
    default = str(value).lower() if isinstance(value, bool) else str(value or "empty")
    warning = _PROCESS_LIST if schema.get("format") == "password" else ""
    meaning = name_flags(f"{schema['description']}{warning}", Settings.model_fields)
    text = f"{meaning} (default: {default}; {env_name(field)})"
    return text.replace("`", "").replace("%", "%%")
