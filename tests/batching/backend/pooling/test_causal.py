"""Models whose tokens see those after them are refused by name."""

from pathlib import Path
from typing import Any

import pytest

from batching.backend.pooling.causal import why_not_causal
from tests.support.model_files import edit_config, rejection


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "qwen3", "is_causal": True, "use_bidirectional_attention": None},
        {"model_type": "gemma3_text", "use_bidirectional_attention": False},
        {"model_type": "gemma3", "text_config": {"use_bidirectional_attention": False}},
    ],
)
def test_decoders_are_causal(config: dict[str, Any]) -> None:
    assert why_not_causal(config) is None


@pytest.mark.parametrize("kind", ["distilbert", "deberta", "t5", "mpnet"])
def test_encoders_are_refused_by_name(directory: Path, kind: str) -> None:
    edit_config(directory, model_type=kind)
    line = rejection(directory)
    assert f"{kind} is an encoder" in line
    assert "of these bert, modernbert, roberta, xlm-roberta are served" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bidirectional_attention": True},
        {"use_bidirectional_attention": "all"},
        {"is_causal": False},
        {"text_config": {"use_bidirectional_attention": True}},
    ],
)
def test_decoders_that_look_ahead_are_refused(directory: Path, changes: dict[str, Any]) -> None:
    edit_config(directory, **changes)
    assert "its attention is bidirectional" in rejection(directory)
