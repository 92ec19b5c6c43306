"""Parses JSON that a model or a client wrote."""

import json
from typing import Any, NoReturn


def load_json(text: str) -> Any:
    """Return the value of a JSON text, in which NaN and Infinity are not allowed.

    Raises:
        ValueError: the text is not JSON, or is nested too deep.
    """
    try:
        return json.loads(text, parse_constant=refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def refuse_constant(constant: str) -> NoReturn:
    """Reject NaN and the infinities, which `json` reads by default; its `parse_constant`."""
    raise ValueError(f"{constant} is not JSON")
