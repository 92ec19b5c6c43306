"""The image processor of a model, in a process of its own: Qwen3-VL's, on an untrained model's files."""

import os
import signal
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest

from batching.inputs.images import ImageInput
from batching.media.image_processor import ImageProcessor, ProcessorFailed, UnfitImage
from batching.model_info.vision import VisionModel
from batching.sandbox.sandbox import SandboxExceeded
from tests.support.seeing.folder import (
    FAMILY,
    IMAGE,
    VISION_END,
    VISION_START,
    make_config,
    make_model,
    make_tokenizer,
    write_folder,
)

TEXT = f"{VISION_START}{IMAGE}{VISION_END}"


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageProcessor]:
    folder: Path = tmp_path_factory.mktemp("seeing")
    tokenizer = make_tokenizer()
    config = make_config(tokenizer)
    write_folder(folder, make_model(config), tokenizer, config)
    # A relative name, as an operator may set it, looks like that of a repository.
    with chdir(folder.parent.parent):
        relative = folder.relative_to(folder.parent.parent)
        made = ImageProcessor(VisionModel(relative, FAMILY, config["image_token_id"]), TEXT, 1)
        made.process(np.zeros((64, 48, 3), np.uint8))
    yield made
    made.close()


def grid_of(image: ImageInput) -> list[int]:
    (grid,) = (array for array in image.arrays if array.name == "image_grid_thw")
    return [int(number) for number in np.frombuffer(grid.data, grid.dtype)]


def test_a_picture_becomes_the_tokens_and_the_inputs_of_the_model(
    processor: ImageProcessor,
) -> None:
    image = processor.process(np.zeros((64, 48, 3), np.uint8))
    frames, height, width = grid_of(image)
    assert (frames, image.num_rows) == (1, height * width // 4)
    assert height > width
    # What the family writes around the rows is there, too.
    assert image.rows == tuple(range(1, image.num_rows + 1))
    assert len(image.token_ids) == image.num_rows + 2
    (pixels,) = (array for array in image.arrays if array.name == "pixel_values")
    assert pixels.shape[0] == height * width
    other = processor.process(np.full((64, 48, 3), 255, np.uint8))
    assert other.token_ids == image.token_ids
    assert other.digest != image.digest


def test_a_picture_that_the_model_does_not_take_is_told(processor: ImageProcessor) -> None:
    with pytest.raises(UnfitImage, match="a ratio of its sides that the model does not take"):
        processor.process(np.zeros((1, 900, 3), np.uint8))
    assert processor.process(np.zeros((32, 32, 3), np.uint8)).num_rows > 0


def test_a_process_that_is_killed_is_replaced(processor: ImageProcessor) -> None:
    first = processor.process(np.zeros((32, 32, 3), np.uint8))
    (running,) = [each for each in processor._sandbox._processes if each.is_running]
    assert running._process is not None
    os.kill(running._process.pid, signal.SIGKILL)
    running._process.wait()
    assert processor.process(np.zeros((32, 32, 3), np.uint8)) == first


def test_a_processor_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    made = ImageProcessor(VisionModel(tmp_path, FAMILY, 1), TEXT, 1)
    with pytest.raises(ProcessorFailed, match="Error"):
        made.process(np.zeros((32, 32, 3), np.uint8))
    made.close()


def test_what_takes_too_much_is_told(
    processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exceed(_: bytes) -> bytes:
        raise SandboxExceeded

    monkeypatch.setattr(processor._sandbox, "ask", exceed)
    with pytest.raises(UnfitImage, match="takes too much time or memory"):
        processor.process(np.zeros((32, 32, 3), np.uint8))
