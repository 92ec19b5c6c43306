"""Image processors of all families, on folders as they are published: what they make is what the towers take."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from transformers import AutoTokenizer

from batching.backend.hooks.changes import Changes
from batching.backend.vision.opening import open_vision
from batching.backend.vision.tower import Tower, load_tower
from batching.engine.load_slices import ONE_SLICE
from batching.inputs.images import ImageInput
from batching.media.image_processor import ImageProcessor, ProcessorFailed
from batching.model_files.model_types import VISION_TYPES
from batching.model_files.vision import declared_vision
from batching.model_info.vision import NoVision, VisionModel
from tests.support.image_processors import picture, processor_of, save_processor
from tests.support.published_models import PUBLISHED, SPELLINGS, Spelling
from tests.support.vision_models import FAMILIES, write_vision_model
from tests.support.weekly import weekly, weekly_pairs

# mlx-vlm's Gemma 4 makes a processor of sounds, too.
pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")

# Of pictures, `(height, width)`: wide, tall, small, and larger than a tile.
SIZES: Final = ((40, 200), (200, 40), (20, 30), (300, 260))


def arrays_of(image: ImageInput) -> dict[str, Any]:
    return {
        name: np.frombuffer(data, dtype).reshape(shape) for name, dtype, shape, data in image.arrays
    }


@pytest.mark.parametrize(("model_type", "spelling"), weekly_pairs(PUBLISHED, SPELLINGS))
def test_what_a_processor_makes_is_what_the_tower_takes(
    model_type: str, spelling: Spelling, tmp_path: Path
) -> None:
    published = PUBLISHED[model_type]
    config = published.write(tmp_path, spelling, partial(save_processor, model_type))
    vision = declared_vision(config, tmp_path)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert isinstance(vision, VisionModel)
    assert vision.image_token_id == tokenizer.convert_tokens_to_ids(published.image_token)
    tower = load_tower(tmp_path, config, None, Changes())
    taken = {array.name for array in FAMILIES[published.family].image(0).arrays}
    with processor_of(vision, published.text) as processor:
        for height, width in SIZES:
            image, other = (processor.process(picture(height, width, seed)) for seed in (1, 2))
            assert taken <= arrays_of(image).keys() <= taken | {"pixel_attention_mask"}
            assert image.num_rows == published.num_rows(arrays_of(image))
            read = image.before + tokenizer.decode(image.token_ids) + image.after
            assert re.fullmatch(
                published.layout, re.sub(f"({re.escape(published.image_token)})+", "*", read)
            )
            check_rows(tower, image, other)


def check_rows(tower: Tower, image: ImageInput, other: ImageInput) -> None:
    assert other.token_ids == image.token_ids
    rows, others = (np.array(tower.encode(each)[0].embeddings) for each in (image, other))
    assert rows.shape == (image.num_rows, tower.hidden_size)
    assert np.isfinite(rows).all()
    # Each row is of this picture.
    assert np.abs(rows - others).max(axis=1).min() > 0
    if tower.pair_axes is not None:
        assert tower.positions(image).shape == (3, len(image.token_ids))


def test_there_is_a_published_model_of_each_type() -> None:
    assert PUBLISHED.keys() == set(VISION_TYPES)


@pytest.mark.parametrize("model_type", weekly(PUBLISHED, 1))
def test_a_process_without_files_makes_the_same(model_type: str, tmp_path: Path) -> None:
    published = PUBLISHED[model_type]
    config = published.write(tmp_path, "original", partial(save_processor, model_type))
    vision = declared_vision(config, tmp_path)
    assert isinstance(vision, VisionModel)
    process = ImageProcessor(vision, published.text, 1)
    try:
        with processor_of(vision, published.text) as processor:
            for size in SIZES:
                assert process.process(picture(*size)) == processor.process(picture(*size))
    finally:
        process.close()


def open_folder(folder: Path) -> Any:
    return open_vision(str(folder), nn.Module(), None, Changes(), ONE_SLICE, 64)


def test_what_cannot_be_used_is_said_at_load(tmp_path: Path) -> None:
    config = FAMILIES["llava"].config
    vision = config["vision_config"] | {"model_type": "pixtral"}
    write_vision_model(config, tmp_path / "model")
    cases: list[tuple[dict[str, Any], str, str]] = [
        # As Pixtral's first conversion for transformers.
        (
            {"vision_config": vision},
            "config.json",
            "mlx-vlm's llava does not take its config (Unsupported model type: pixtral)",
        ),
        # As mlx-lm converts models.
        ({}, "model.safetensors", "its files have no weights of a vision tower"),
        ({}, "preprocessor_config.json", "its directory has no preprocessor_config.json"),
    ]
    for changes, lost, reason in cases:
        folder = tmp_path / lost
        shutil.copytree(tmp_path / "model", folder)
        (folder / lost).unlink()
        if lost == "model.safetensors":
            text = mx.load(str(tmp_path / "model" / lost))
            assert isinstance(text, dict)
            kept = {name: each for name, each in text.items() if name.startswith("language_model")}
            mx.save_safetensors(str(folder / lost), kept)
        (folder / "config.json").write_text(json.dumps(config | changes))
        found = open_folder(folder)
        assert found == NoVision(f"is served without its vision part: {reason}"), found


def test_a_processor_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    # As old conversions of LLaVA: the file says nothing of patches.
    write_vision_model(FAMILIES["llava"].config, tmp_path)
    vision = VisionModel(tmp_path, "llava", 0)
    with (
        processor_of(vision, "<image>") as processor,
        pytest.raises(ProcessorFailed, match="TypeError: "),
    ):
        processor.process(picture(20, 20))
