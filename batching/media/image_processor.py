"""Makes of pictures what a model's vision tower reads, in a process of its own."""

import json
import math
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from batching.inputs.images import ImageInput, TowerArray
from batching.model_info.vision import VisionModel
from batching.sandbox.sandbox import Sandbox, SandboxExceeded, SandboxLimits

# The files of the process; this one imports neither MLX nor mlx-vlm.
_FOLDER: Final = Path(__file__).parents[1] / "backend" / "vision"
_WORKER: Final = _FOLDER / "processor_process.py"
_MODELS: Final = _FOLDER / "mlx_vlm_models.py"
# Of one image; a 4K one takes four.
_CPU_SECONDS: Final = 30
# MLX reserves addresses that it does not use.
_MEMORY_BYTES: Final = 32 << 30


class UnfitImage(Exception):
    """A picture that the model's processor does not take, as one that is too narrow."""


class ProcessorFailed(Exception):
    """The model's processor cannot be loaded, or takes no picture at all; the message says why."""


class ImageProcessor:
    """The image processor of a model; any thread may ask, one picture at a time each process.

    image_text: what the chat template writes for an image.
    """

    def __init__(self, model: VisionModel, image_text: str, num_processes: int) -> None:
        self._image_token_id = model.image_token_id
        self._sees_ahead = model.max_span > 0
        self._text = image_text
        self._sandbox = Sandbox(
            str(_WORKER),
            SandboxLimits(_CPU_SECONDS, _MEMORY_BYTES),
            # A process has a working directory of its own.
            arguments=[str(_MODELS), str(model.folder.resolve()), model.model_type, image_text],
            num_processes=num_processes,
        )

    def process(self, pixels: npt.NDArray[np.uint8]) -> ImageInput:
        """Return the tokens and the inputs of a picture, RGB `[height, width, 3]`; blocking.

        Raises:
            UnfitImage: the processor does not take it.
            ProcessorFailed: there is none that works.
            SandboxLost: the process was killed, or had no answer in time: no fault of the image.
            Interrupted: the caller has given up.
        """
        height, width, _ = pixels.shape
        head = json.dumps({"height": height, "width": width, "text": self._text})
        try:
            answer = self._sandbox.ask(head.encode() + b"\n" + pixels.tobytes())
        except SandboxExceeded:
            raise UnfitImage("takes too much time or memory") from None
        return self._input(answer)

    def close(self) -> None:
        """End the processes; they start again when they are needed."""
        self._sandbox.close()

    def _input(self, answer: bytes) -> ImageInput:
        at = answer.index(b"\n") + 1
        found = json.loads(answer[:at])
        if "failure" in found:
            raise ProcessorFailed(found["failure"])
        if "error" in found:
            raise UnfitImage("has a size or a ratio of its sides that the model does not take")
        arrays: list[TowerArray] = []
        for name, dtype, shape in found["arrays"]:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            arrays.append(TowerArray(name, dtype, tuple(shape), answer[at : at + size]))
            at += size
        token_ids = tuple(found["token_ids"])
        rows = tuple(i for i, each in enumerate(token_ids) if each == self._image_token_id)
        around = found["before"], found["after"]
        return ImageInput(token_ids, rows, tuple(arrays), self._sees_ahead, *around)
