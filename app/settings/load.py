"""Loads the settings, and says in one line for each what is wrong with them."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from app.settings.names import ENV_PREFIX, FORMER_NAMES, KEY_VARIABLE, SettingsError, env_name
from app.settings.settings import Settings


def load_settings(flags: Mapping[str, str] | None = None) -> Settings:
    """Return the settings from `flags` (values by field name), the environment and `.env`, in this order.

    Raises:
        SettingsError: with one line for each invalid value, by the variable's name.
    """
    given: dict[str, Any] = dict(flags or {})
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("\n".join(_lines(error.errors()))) from None
    except (OSError, UnicodeError) as error:
        raise SettingsError(f".env cannot be read: {error}") from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each `MLX_SERVER_*` variable of the environment that is not a setting.

    pydantic-settings rejects such a line in `.env` but does not look for one in the environment.
    """
    known = {env_name(field) for field in (*Settings.model_fields, *FORMER_NAMES)} | {KEY_VARIABLE}
    ours = (name for name in sorted(environ) if name.upper().startswith(ENV_PREFIX))
    return [_unknown(name) for name in ours if name.upper() not in known]


def _unknown(name: str) -> str:
    near = get_close_matches(name.upper(), map(env_name, Settings.model_fields), n=1)
    return f"{name} is not a setting" + "".join(f"; did you mean {known}?" for known in near)


def _lines(errors: Iterable[ErrorDetails]) -> list[str]:
    """Return one line for each field at fault: a union reports each of its members."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for error in errors:
        by_field.setdefault(str(error["loc"][0]) if error["loc"] else "", []).append(error)
    return [_line(field, faults) for field, faults in by_field.items()]


def _line(field: str, faults: list[ErrorDetails]) -> str:
    if not field:
        # A rule over several fields names them itself.
        return "; ".join(str(fault["ctx"]["error"]) for fault in faults)
    if field not in Settings.model_fields:
        return f"{_unknown(field.upper())} (.env)"
    limits = " or ".join(_limit(fault) for fault in faults)
    return f"{env_name(field)} must be {limits}, not {faults[0]['input']!r}"


def _limit(fault: ErrorDetails) -> str:
    text = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return text.partition(", unable to")[0]
