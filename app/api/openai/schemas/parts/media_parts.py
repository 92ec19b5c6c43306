"""Images and files as parts of content."""

from collections.abc import Mapping
from typing import Any, Final, Literal, get_args

from app.api.schemas.fields import check_encodable, field_error
from app.prompts.file_text import UnreadableFile, decoded, file_text, is_pdf
from app.prompts.images.image_marks import FileSource, ImageSource, MarkedText

# OpenAI's; `low` is 512 by 512 pixels at most, and the others are as many as the server allows.
Detail = Literal["auto", "low", "high", "original"]
_DETAILS: Final = get_args(Detail)


def read_image_url(part: Mapping[str, Any]) -> ImageSource:
    """Return the image of a part `{"image_url": {"url": ..., "detail": ...}}`, or with the URL itself."""
    image = part.get("image_url")
    fields = image if isinstance(image, dict) else {"url": image}
    if (url := _text(fields, "url")) is None:
        raise field_error("a part of type 'image_url' must have an image_url with a url")
    return ImageSource(url, detail=_detail(fields))


def read_input_image(part: Mapping[str, Any]) -> ImageSource:
    """Return the image of a part `{"image_url": ..., "detail": ...}`, or with a `file_id`."""
    url, file_id = _text(part, "image_url"), _text(part, "file_id")
    if (url is None) == (file_id is None):
        raise field_error("a part of type 'input_image' must have an image_url or a file_id")
    if url is None:
        return ImageSource(file_id or "", "file", _detail(part))
    return ImageSource(url, detail=_detail(part))


def read_chat_file(part: Mapping[str, Any]) -> str | FileSource:
    """Return the file of a part `{"file": {...}}`."""
    if not isinstance(file := part.get("file"), dict):
        raise field_error("a part of type 'file' must have a file")
    return read_file(file)


def read_file(fields: Mapping[str, Any]) -> str | FileSource:
    """Return the text of a file that a part has as base64, or the file if it is a PDF or has but an id."""
    data, file_id, name = (_text(fields, key) for key in ("file_data", "file_id", "filename"))
    if fields.get("file_url") is not None:
        raise field_error("a file by URL cannot be read here: send its file_data or a file_id")
    if (data is None) == (file_id is None):
        raise field_error("a file must have its file_data or a file_id")
    if data is None:
        return FileSource(file_id or "", name=name)
    try:
        found = decoded(data)
        return FileSource(data, "base64", name) if is_pdf(found) else file_text(found, name)
    except UnreadableFile as error:
        raise field_error(str(error)) from None


def check_no_media(content: str, role: str, param: str = "content") -> None:
    """Reject images and files in a turn of a role that has none."""
    if isinstance(content, MarkedText):
        raise field_error(f"a turn of the role {role!r} has no images or files", param)


def _detail(fields: Mapping[str, Any]) -> str:
    detail = fields.get("detail")
    if detail is not None and detail not in _DETAILS:
        raise field_error(f"the detail of an image must be one of {', '.join(_DETAILS)}")
    return detail or "auto"


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise field_error(f"the {name} of a part must be a string")
    return check_encodable(value)
