"""A speaker that takes images: its processor is a fake, which sees real pixels, and all above it is real."""

import re
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from PIL import Image

from app.media import model_images
from batching import ImageInput, UnfitImage, VisionModel
from batching.inputs.images import TowerArray
from batching.steps.sequences import SequenceState
from batching.steps.token_output import TokenLogprobs
from tests.support.fakes import read_by_model
from tests.support.images import encoded
from tests.support.speaker import VOCAB_SIZE, ByteTokenizer, Served, Speaker, served

BEGIN, IMAGE, FINISH = range(VOCAB_SIZE, VOCAB_SIZE + 3)
WRITTEN: Final = "<begin><image><finish>"
VISION: Final = VisionModel(Path("a-model"), "fake", IMAGE)

_SPECIAL: Final = {"<begin>": BEGIN, "<image>": IMAGE, "<finish>": FINISH}
_PATTERN: Final = re.compile("|".join(_SPECIAL))


class SeeingTokenizer(ByteTokenizer):
    """One token for each byte and for each text of an image; its template takes lists of parts."""

    num_tokens = VOCAB_SIZE + len(_SPECIAL)

    def get_added_vocab(self) -> dict[str, int]:
        return dict(_SPECIAL)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        done = 0
        for match in _PATTERN.finditer(text):
            ids += [*text[done : match.start()].encode(), _SPECIAL[match[0]]]
            done = match.end()
        return [*ids, *text[done:].encode()]

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        turns = [{**turn, "content": self.content(turn["content"])} for turn in conversation]
        return super().apply_chat_template(turns, **options)

    def content(self, content: Any) -> str:
        """Return what the template writes for the content of a turn."""
        if isinstance(content, str):
            return content
        return "".join(part.get("text", WRITTEN) for part in content)


class FakeProcessor:
    """Makes an image of as many tokens as it has columns; it reads what the decoder really makes.

    made: what each picture became, in all processors.
    """

    made: list[ImageInput]
    closed: int

    def __init__(self, vision: VisionModel, image_text: str, num_processes: int) -> None:
        assert (vision, image_text) == (VISION, WRITTEN)
        assert num_processes > 0

    def process(self, pixels: npt.NDArray[np.uint8]) -> ImageInput:
        height, width, depth = pixels.shape
        assert pixels.dtype == np.uint8
        assert depth == 3
        if height == 1:
            raise UnfitImage("is too flat")
        ids = (BEGIN, *[IMAGE] * width, FINISH)
        seen = TowerArray("pixel_values", pixels.dtype.str, pixels.shape, pixels.tobytes())
        image = ImageInput(ids, tuple(range(1, width + 1)), (seen,))
        type(self).made.append(image)
        return image

    def close(self) -> None:
        type(self).closed += 1


class Seeing(Speaker):
    """Keeps the prompts that it has read, as `shown` writes them; images are where the engine was told."""

    prompts: list[str]

    def _choose(self, sequence: SequenceState, prefix: list[int]) -> int:
        if len(prefix) == sequence.num_prompt_tokens:
            prompt, images = sequence.spec.prompt, sequence.spec.images
            assert prefix == read_by_model(sequence.spec)
            for placed in images:
                assert prompt[placed.start : placed.stop] == placed.image.token_ids
            assert prompt.count(BEGIN) == len(images)
            type(self).prompts.append(shown(prompt))
        return super()._choose(sequence, prefix)

    def _named(self, sequence: SequenceState, prefix: list[int]) -> TokenLogprobs:
        """Return equal log probabilities of the tokens that are named; others are of bytes alone."""
        if not (named := sequence.sampling.logprob_token_ids):
            return super()._named(sequence, prefix)
        return TokenLogprobs(-1.0, tuple((token_id, -1.0) for token_id in named))


@contextmanager
def fake_processors() -> Iterator[type[FakeProcessor]]:
    """Put the fake in the place of the processes; yield it."""
    FakeProcessor.made, FakeProcessor.closed = [], 0
    with patch.object(model_images, "ImageProcessor", FakeProcessor):
        yield FakeProcessor


@asynccontextmanager
async def seeing(answer: bytes = b"A cat.", **options: Any) -> AsyncIterator[Served]:
    """Serve a speaker that takes images."""
    options.setdefault("tokenizer", SeeingTokenizer())
    Seeing.prompts = []
    with fake_processors():
        async with served(answer, runner=Seeing, vision=VISION, **options) as server:
            yield server


def picture(width: int, height: int = 2, colour: str = "red", form: str = "PNG") -> bytes:
    """Return the file of a picture, which becomes `width` rows."""
    return encoded(Image.new("RGB", (width, height), colour), form)


def base64_of(data: bytes) -> str:
    return b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64_of(data)}"


def shown(token_ids: Sequence[int]) -> str:
    """Return a prompt as text, in which `(n)` is an image of n rows."""
    names = {BEGIN: "(", FINISH: ")", IMAGE: "\0"}
    text = "".join(names.get(i) or chr(i) for i in token_ids)
    return re.sub("\0+", lambda rows: str(len(rows[0])), text)
