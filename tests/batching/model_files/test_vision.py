"""Whether a model takes images is known by its config, before it is loaded."""

from pathlib import Path
from typing import Any, Final

import pytest

from batching.model_files import vision
from batching.model_files.vision import (
    HOW_TO_SEE,
    declared_vision,
    expected_vision,
    without_processor,
)
from batching.model_info.vision import TEXT_ONLY, NoVision, VisionModel
from tests.support.rows import rows

FOLDER: Final = Path("a-model")
CONFIG: Final[dict[str, Any]] = {"model_type": "qwen3_vl", "vision_config": {}, "image_token_id": 7}


def test_a_model_of_a_known_type_with_a_tower_takes_images() -> None:
    assert declared_vision(CONFIG, FOLDER) == VisionModel(FOLDER, "qwen3_vl", 7)
    named = {"model_type": "llava", "vision_config": {}, "image_token_index": 8}
    assert declared_vision(named, FOLDER) == VisionModel(FOLDER, "llava", 8)


@rows(
    ("changes", "max_span"),
    [
        ({"model_type": "gemma3", "mm_tokens_per_image": 16}, 16),
        ({"model_type": "gemma3"}, 256),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}}, 280),
        ({"model_type": "gemma4", "text_config": {"use_bidirectional_attention": None}}, 0),
    ],
)
def test_gemma_says_whether_rows_of_an_image_see_each_other(
    changes: dict[str, Any], max_span: int
) -> None:
    found = declared_vision(CONFIG | changes, FOLDER)
    assert isinstance(found, VisionModel)
    assert found.max_span == max_span


@rows(
    "changes",
    [
        {"vision_config": None},
        {"vision_config": "x"},
        {"image_token_id": None},
        {"image_token_id": "<image>"},
    ],
)
def test_without_a_tower_or_a_token_it_takes_text_only(changes: dict[str, Any]) -> None:
    assert declared_vision(CONFIG | changes, FOLDER) is TEXT_ONLY


def test_another_type_is_named() -> None:
    for model_type in ("paligemma", None):
        found = declared_vision(CONFIG | {"model_type": model_type}, FOLDER)
        assert isinstance(found, NoVision)
        assert (
            f"images of the type {model_type} are not supported; those of gemma3, " in found.reason
        )


def test_a_directory_without_the_files_of_a_processor_is_named(tmp_path: Path) -> None:
    without = without_processor(tmp_path)
    assert without is not None
    assert "its directory has no preprocessor_config.json" in without.reason
    (tmp_path / "processor_config.json").touch()
    assert without_processor(tmp_path) is None


def test_without_mlx_vlm_none_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "find_spec", lambda _: object())
    assert expected_vision(CONFIG, FOLDER) == declared_vision(CONFIG, FOLDER)
    monkeypatch.setattr(vision, "find_spec", lambda _: None)
    assert expected_vision(CONFIG, FOLDER) == NoVision(
        f"is served without its vision part: mlx-vlm is not installed; {HOW_TO_SEE} adds it"
    )
    assert expected_vision({}, FOLDER) is TEXT_ONLY
