"""JSON that a model or a client wrote."""

import json
from typing import Any, NoReturn


def load_json(text: str) -> Any:
    """Return the value of a JSON text; JSON has no NaN.

    Raises:
        ValueError: it is none.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
