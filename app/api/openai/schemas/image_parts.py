"""Images as parts of content."""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from app.api.schemas.fields import field_error
from app.prompts.image_marks import ImageSource

# OpenAI's; `low` is 512 by 512 pixels at most, and the others are as many as the server allows.
Detail = Literal["auto", "low", "high", "original"]
_DETAILS: Final = get_args(Detail)


def read_image(part: Mapping[str, Any]) -> ImageSource:
    """Return the image of a part `{"image_url": {"url": ..., "detail": ...}}`, or with the URL itself."""
    image = part.get("image_url")
    fields = image if isinstance(image, dict) else {"url": image}
    url, detail = fields.get("url"), fields.get("detail") or "auto"
    if not isinstance(url, str):
        raise field_error("a part of type 'image_url' must have an image_url with a url")
    if detail not in _DETAILS:
        raise field_error(f"the detail of an image must be one of {', '.join(_DETAILS)}")
    return ImageSource(url, detail=detail)
