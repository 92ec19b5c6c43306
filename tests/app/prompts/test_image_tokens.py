"""The tokens of prompts with images are those of the family's own processor, given the whole text and all pictures."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from app.prompts.images.image_marks import ImageSource
from app.prompts.images.image_places import placed
from batching import ModelInfo, VisionModel
from batching.model_files.vision import declared_vision
from tests.support.image_processors import (
    picture,
    plain_processor_of,
    processor_of,
    save_processor,
)
from tests.support.published_models import PUBLISHED
from tests.support.weekly import weekly

pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")


# Those that write text around an image, or whose tokenizer begins a prompt with a space.
@pytest.mark.parametrize("model_type", weekly(PUBLISHED, 2, always=("gemma3", "llava")))
def test_prompts_read_as_the_processor_writes_them(model_type: str, tmp_path: Path) -> None:
    published = PUBLISHED[model_type]
    config = published.write(tmp_path, "original", partial(save_processor, model_type))
    vision = declared_vision(config, tmp_path)
    assert isinstance(vision, VisionModel)
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    pictures = [picture(40, 60), picture(90, 30)]
    with processor_of(vision, published.text) as processor:
        images = [processor.process(each) for each in pictures]
    marks = [ImageSource(str(i)).mark for i in range(len(images))]
    turn = "a turn\n{}\n b{}{}c"
    described = ModelInfo("a-model", tokenizer, frozenset(), len(tokenizer), 4096, vision=vision)
    order = [0, 1, 0]
    text = turn.format(*(marks[i] for i in order))
    token_ids, found = placed(described, text, dict(zip(marks, images, strict=True)))
    with plain_processor_of(vision) as plain:
        whole = plain(
            text=[turn.format(*[published.text] * len(order))],
            images=[Image.fromarray(pictures[i]) for i in order],
            return_tensors="np",
        )
        assert token_ids == np.asarray(whole["input_ids"]).ravel().tolist()
    for each in found:
        assert tuple(token_ids[each.start : each.stop]) == each.image.token_ids
