"""`python -m tests.support.scripted_vision`: the scripted server, whose model takes images.

All before the model's own image processor is real, and so is all behind it but the model, which reads an image as
its size and the colour of its first pixel, `(40x30 #ff0000)`.  What it says has all of the prompt's in place of `{images}`.
"""

import sys
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from app.media import model_images
from batching import ImageInput, VisionModel
from batching.inputs.images import TowerArray
from batching.inputs.sequence_spec import SequenceSpec
from tests.support.scripted_server import ScriptedRunner, answer, main

# A token of the bundled model that no text of these tests has.
_TEXT: Final = "<empty_output>"
_TOKEN_ID: Final = 16
_CONTENT: Final = "message['content']"
_OF_PARTS: Final = (
    f"({_CONTENT} if {_CONTENT} is string "
    f"else {_CONTENT} | map(attribute='text', default='{_TEXT}') | join)"
)


class ColumnProcessor:
    """Makes an image of as many tokens as it has columns."""

    def __init__(self, vision: VisionModel, image_text: str, num_processes: int) -> None:
        assert image_text == _TEXT

    def process(self, pixels: npt.NDArray[np.uint8]) -> ImageInput:
        width = pixels.shape[1]
        seen = TowerArray("pixel_values", pixels.dtype.str, pixels.shape, pixels.tobytes())
        return ImageInput((_TOKEN_ID,) * width, tuple(range(width)), (seen,))

    def close(self) -> None:
        """Nothing is open."""


class SeeingRunner(ScriptedRunner):
    vision = VisionModel(Path("a-model"), "fake", _TOKEN_ID)

    @staticmethod
    def tokenizer() -> Any:
        tokenizer = ScriptedRunner.tokenizer()
        tokenizer.chat_template = tokenizer.chat_template.replace(_CONTENT, _OF_PARTS)
        return tokenizer

    def _answer(self, spec: SequenceSpec) -> str:
        read, done = "", 0
        for placed in spec.images:
            read += self._tokenizer.decode(spec.prompt[done : placed.start]) + shown(placed.image)
            done = placed.stop
        read += self._tokenizer.decode(spec.prompt[done:])
        return answer(read).replace("{images}", "".join(shown(each.image) for each in spec.images))


def shown(image: ImageInput) -> str:
    (array,) = image.arrays
    height, width, depth = array.shape
    return f"({width}x{height} #{array.data[:depth].hex()})"


if __name__ == "__main__":
    with patch.object(model_images, "ImageProcessor", ColumnProcessor):
        sys.exit(main(SeeingRunner))
