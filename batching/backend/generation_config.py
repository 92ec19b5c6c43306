"""The sampling defaults that a model's files declare.

They are advice: a damaged file or a value that no request may have is ignored with a warning, and
the model loads without it.  `do_sample` has no effect, as in vLLM: a temperature counts without it.
"""

import json
import logging
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from batching.backend.exceptions import one_line
from batching.model_files.gguf_header import GgufHeader
from batching.model_info.sampling_defaults import SamplingDefaults

logger = logging.getLogger(__name__)

GENERATION_CONFIG: Final = "generation_config.json"
_INT32_MAX: Final = 2**31 - 1


class _Field(NamedTuple):
    """The numbers that a request accepts for a field: those in [low, high], whole ones if `is_integer`."""

    gguf_key: str
    low: float
    high: float
    is_integer: bool = False

    def accepts(self, value: Any) -> bool:
        kinds = int if self.is_integer else int | float
        if isinstance(value, bool) or not isinstance(value, kinds):
            return False
        # Not a number is in no range.
        return self.low <= value <= self.high


_FIELDS: Final = {
    "temperature": _Field("general.sampling.temp", 0, 2),
    "top_p": _Field("general.sampling.top_p", 0, 1),
    "top_k": _Field("general.sampling.top_k", -1, _INT32_MAX, is_integer=True),
    "min_p": _Field("general.sampling.min_p", 0, 1),
    "repetition_penalty": _Field("general.sampling.penalty_repeat", 0.01, 100),
}


def directory_defaults(directory: Path) -> SamplingDefaults:
    """Read a model directory's generation_config.json, which it need not have."""
    path = directory / GENERATION_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s is ignored: %s", path, one_line(error))
        return SamplingDefaults()
    if not isinstance(config, dict):
        logger.warning("%s is ignored: it is not an object", path)
        return SamplingDefaults()
    return _accepted(path, {name: (name, config.get(name)) for name in _FIELDS})


def gguf_defaults(header: GgufHeader) -> SamplingDefaults:
    """Return what llama.cpp's `general.sampling` keys of a file declare."""
    values = {
        name: (field.gguf_key, _shortest(header.metadata.get(field.gguf_key)))
        for name, field in _FIELDS.items()
    }
    return _accepted(header.path, values)


def _shortest(value: Any) -> Any:
    """Return the decimal number that a 32-bit float was made from: 0.95 and not 0.949999988."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _accepted(path: Path, values: Mapping[str, tuple[str, Any]]) -> SamplingDefaults:
    """Keep, of values by field with their keys in the file, what a request may say."""
    accepted: dict[str, Any] = {}
    for name, (key, value) in values.items():
        if value is None:
            continue
        if _FIELDS[name].accepts(value):
            accepted[name] = value
        else:
            logger.warning("%s: %s is ignored, it cannot be %s", path, key, reprlib.repr(value))
    return SamplingDefaults(**accepted)
