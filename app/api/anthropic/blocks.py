"""The content blocks of a conversation that a client sends."""

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, model_validator

from app.api.anthropic.cache_control import CacheableBlock
from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.fields import GivenName, Text, field_error, json_text
from app.prompts.file_text import document
from app.prompts.images.image_marks import FileSource, ImageSource, Source

# Templates walk through arguments recursively.
_MAX_DEPTH: Final = 64
# Agents write whole files with one call.
_MAX_CHARACTERS: Final = 4 << 20


def _check_input(value: dict[str, Any]) -> dict[str, Any]:
    json_text(value, max_depth=_MAX_DEPTH, max_characters=_MAX_CHARACTERS)
    return value


def _as_blocks(content: Any) -> Any:
    """Return a list of blocks, also of a text."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class TextParam(CacheableBlock):
    type: Literal["text"]
    text: Text

    @property
    def parts(self) -> list[str | Source]:
        """What it has in the prompt."""
        return [self.text]


class Base64Image(RequestModel):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Text

    def to_image(self) -> ImageSource:
        return ImageSource(self.data, "base64")


class UrlImage(RequestModel):
    type: Literal["url"]
    url: Text

    def to_image(self) -> ImageSource:
        return ImageSource(self.url)


class UploadedFile(RequestModel):
    """A file of `/v1/files`: an image, or a text or a PDF as a document."""

    type: Literal["file"]
    file_id: GivenName

    def to_image(self) -> ImageSource:
        return ImageSource(self.file_id, "file")

    def parts(self, title: str | None) -> list[str | Source]:
        return [FileSource(self.file_id, name=title)]


class ImageParam(CacheableBlock):
    type: Literal["image"]
    source: Annotated[Base64Image | UrlImage | UploadedFile, Field(discriminator="type")]

    @model_validator(mode="after")
    def _hash(self) -> Self:
        # Here, as a thread validates what is large.
        _ = self.image.mark
        return self

    @cached_property
    def image(self) -> ImageSource:
        return self.source.to_image()

    @property
    def parts(self) -> list[str | Source]:
        """What it has in the prompt."""
        return [self.image]


class TextSource(RequestModel):
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text

    def parts(self, title: str | None) -> list[str | Source]:
        return document([self.data], title)


class Base64Pdf(RequestModel):
    type: Literal["base64"]
    media_type: Literal["application/pdf"]
    data: Text

    def parts(self, title: str | None) -> list[str | Source]:
        return [FileSource(self.data, "base64", title)]


_SourceBlock = Annotated[TextParam | ImageParam, Field(discriminator="type")]


class BlocksSource(RequestModel):
    type: Literal["content"]
    content: Annotated[
        list[_SourceBlock],
        FailFast(),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_SourceBlock]),
    ]

    def parts(self, title: str | None) -> list[str | Source]:
        return document(parts_of(self.content), title)


def _check_source(source: Any) -> Any:
    if isinstance(source, dict) and source.get("type") == "url":
        raise field_error("a file by URL cannot be read here: send its data or a file_id")
    return source


class DocumentParam(CacheableBlock):
    defaults: ClassVar[Defaults] = {"citations": ({}, {"enabled": False})}

    type: Literal["document"]
    source: Annotated[
        Annotated[
            TextSource | BlocksSource | UploadedFile | Base64Pdf, Field(discriminator="type")
        ],
        BeforeValidator(_check_source),
    ]
    title: Text | None = None
    context: Text | None = None

    @model_validator(mode="after")
    def _hash(self) -> Self:
        # Here, as a thread validates what is large.
        _ = [part.mark for part in self.parts if not isinstance(part, str)]
        return self

    @cached_property
    def parts(self) -> list[str | Source]:
        """What it has in the prompt."""
        return [*filter(None, [self.context]), *self.source.parts(self.title)]


class ThinkingParam(RequestModel):
    """`signature` seals the text, which is empty if the client did not get it."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text


class RedactedThinkingParam(RequestModel):
    type: Literal["redacted_thinking"]
    data: Text


class ToolUseParam(CacheableBlock):
    type: Literal["tool_use"]
    id: GivenName
    name: GivenName
    input: Annotated[dict[str, Any], AfterValidator(_check_input)]


class ToolReferenceParam(RequestModel):
    """Here the model gets the description of a tool with `defer_loading`."""

    type: Literal["tool_reference"]
    tool_name: GivenName


def _readable(block: Any) -> Any:
    match block:
        case {"type": str(kind)} if kind not in _KINDS:
            message = f"a block of type {kind[:40]!r} cannot be read here"
            # As Anthropic's API names it: by that, clients find the block that they have to leave out.
            raise field_error(message, kind[:40] if kind.isidentifier() else None)
        case {"type": str()}:
            return block
        case _:
            raise field_error("a block must be an object with a type")


_ResultBlock = Annotated[
    Annotated[
        TextParam | ImageParam | DocumentParam | ToolReferenceParam, Field(discriminator="type")
    ],
    BeforeValidator(_readable),
]


class ToolResultParam(CacheableBlock):
    type: Literal["tool_result"]
    tool_use_id: GivenName
    content: Annotated[
        list[_ResultBlock],
        FailFast(),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[_ResultBlock]),
    ] = Field(default_factory=list)
    is_error: bool = False


_Block = Annotated[
    Annotated[
        TextParam
        | ImageParam
        | DocumentParam
        | ThinkingParam
        | RedactedThinkingParam
        | ToolUseParam
        | ToolResultParam,
        Field(discriminator="type"),
    ],
    BeforeValidator(_readable),
]
# Only the first error is reported.
Content = Annotated[
    list[_Block], FailFast(), BeforeValidator(_as_blocks, json_schema_input_type=str | list[_Block])
]
SystemContent = Annotated[
    list[TextParam],
    FailFast(),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextParam]),
]


def parts_of(blocks: Iterable[object]) -> list[str | Source]:
    """Return what the prompt has of the texts, images and documents among blocks."""
    shown = (block for block in blocks if isinstance(block, TextParam | ImageParam | DocumentParam))
    return [part for block in shown for part in block.parts]


_KINDS: Final = frozenset(
    {
        "text",
        "image",
        "document",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "tool_reference",
    }
)
