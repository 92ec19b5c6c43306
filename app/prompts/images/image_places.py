"""The places of images in a prompt: what the template writes there, and the tokens that take them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from app.prompts.images.image_marks import MARK
from app.prompts.templates.model_template import render_turns
from app.prompts.templates.template_sandbox import RendererLost, TemplateTooMuch
from batching import ImageInput, InvalidRequest, ModelInfo, PlacedImage

_BEFORE: Final = "probe-0"
_AFTER: Final = "probe-1"


@dataclass(frozen=True, slots=True)
class ImageText:
    """What a chat template writes for an image.

    is_first: it writes images before the text of their turn, wherever they are in it.
    """

    text: str
    is_first: bool


@lru_cache(maxsize=8)
def image_text(model: ModelInfo) -> ImageText:
    """Return what the template of a model writes for an image.

    Raises:
        InvalidRequest: it writes nothing, or takes no images.
        TemplateTooMuch: it took too much time or memory.
        RendererLost: the process that renders was killed, or had no time.
    """
    texts = [{"type": "text", "text": text} for text in (_BEFORE, _AFTER)]
    without = _rendered(model, texts)
    with_one = _rendered(model, [texts[0], {"type": "image"}, texts[1]])
    start, stop = _added(without, with_one)
    added = with_one[start:stop]
    if not added:
        raise _no_images(model)
    return ImageText(added, is_first=start <= with_one.find(_BEFORE))


def _rendered(model: ModelInfo, parts: Sequence[Mapping[str, Any]]) -> str:
    try:
        return render_turns(model, [{"role": "user", "content": parts}], add_generation_prompt=True)
    except (RendererLost, TemplateTooMuch):
        raise
    except Exception:  # a template may raise anything
        raise _no_images(model) from None


def _no_images(model: ModelInfo) -> InvalidRequest:
    return InvalidRequest(
        "messages", f"the chat template of the model '{model.model_id}' writes nothing for an image"
    )


def _added(without: str, with_one: str) -> tuple[int, int]:
    """Return where a text has what another one lacks; both are equal before and behind it."""
    start = 0
    while start < len(without) and without[start] == with_one[start]:
        start += 1
    stop = len(with_one)
    while (
        stop - len(with_one) + len(without) > start
        and without[stop - len(with_one) - 1] == with_one[stop - 1]
    ):
        stop -= 1
    return start, stop


def placed(
    model: ModelInfo, text: str, images: Mapping[str, ImageInput]
) -> tuple[list[int], tuple[PlacedImage, ...]]:
    """Tokenize a prompt with marks.

    What a user writes like a token of an image is text.

    images: by their marks; other marks are text.
    """
    ids: list[int] = []
    found: list[PlacedImage] = []
    added = _added_texts(model)
    special = _special_texts(added, images)
    # What is not tokenized yet, and the token before it.
    begun, last = "", None
    done = 0
    for match in MARK.finditer(text):
        if (image := images.get(match[0])) is None:
            continue
        piece = f"{begun}{text[done : match.start()]}{image.before}"
        ids += _encoded(model, piece, special, added.get(last))
        found.append(PlacedImage(len(ids), image))
        ids += image.token_ids
        begun, last = image.after, image.token_ids[-1]
        done = match.end()
    ids += _encoded(model, f"{begun}{text[done:]}", special, added.get(last))
    return ids, tuple(found)


def _added_texts(model: ModelInfo) -> dict[int | None, str]:
    """Return the texts of tokens that are not made of others."""
    added: Mapping[str, int] = getattr(model.tokenizer, "get_added_vocab", dict)()
    return {token_id: text for text, token_id in added.items()}


def _special_texts(
    added: Mapping[int | None, str], images: Mapping[str, ImageInput]
) -> re.Pattern[str] | None:
    """Return what finds the texts of tokens that only images have."""
    ids = {token_id for image in images.values() for token_id in image.token_ids}
    texts = sorted((text for token_id, text in added.items() if token_id in ids), key=len)
    return re.compile("|".join(map(re.escape, reversed(texts)))) if texts else None


def _encoded(
    model: ModelInfo, text: str, special: re.Pattern[str] | None, behind: str | None
) -> list[int]:
    """Tokenize a text without those tokens.

    behind: the text of the token before it: some tokenizers put a space where a prompt begins.
    """
    ids: list[int] = []
    done = 0
    for match in special.finditer(text) if special else ():
        # Neither half is the token.
        middle = match.start() + len(match[0]) // 2
        for part in (text[done:middle], text[middle : match.end()]):
            ids += _continued(model, part, behind)
            behind = None
        done = match.end()
    return ids + _continued(model, text[done:], behind)


def _continued(model: ModelInfo, text: str, behind: str | None) -> list[int]:
    if not text:
        return []
    encode = partial(model.tokenizer.encode, add_special_tokens=False)
    if behind is None:
        return encode(text)
    return encode(behind + text)[1:]
