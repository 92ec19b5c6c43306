"""The settings of an engine reach few functions: what these decide goes on as values."""

import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import pytest

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig

MOST_FUNCTIONS: Final = 25
MOST_LINES: Final = 50


def functions_with(config: EngineConfig) -> set[CodeType]:
    """Return the functions, other than the settings' own, that get them while an engine is built."""
    found: set[CodeType] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and "/batching/" in code.co_filename:
            arguments = [frame.f_locals[name] for name in code.co_varnames[: code.co_argcount]]
            if any(isinstance(each, EngineConfig) for each in arguments):
                found.add(code)

    sys.setprofile(profile)
    try:
        loaded = build_engine(config)
    finally:
        sys.setprofile(None)
    loaded.close()
    return {code for code in found if not code.co_qualname.startswith("EngineConfig.")}


@pytest.mark.parametrize("native", ["auto", "off"])
def test_settings_reach_few_functions_and_short_ones(directory: Path, native: Any) -> None:
    config = EngineConfig(model=str(directory), model_id="tiny", num_blocks=8, native=native)
    functions = functions_with(config)
    assert len(functions) <= MOST_FUNCTIONS, sorted(code.co_qualname for code in functions)
    lines = {code.co_qualname: len(inspect.getsourcelines(code)[0]) for code in functions}
    assert max(lines.values()) <= MOST_LINES, lines
