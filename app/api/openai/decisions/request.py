"""`/v1/decisions`: the request."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from app.api.openai.responses.conversation import attachments, to_messages
from app.api.openai.responses.items.input_items import (
    CallOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    MessageItem,
    as_items,
)
from app.api.openai.schemas.parts.text_parts import join_parts
from app.api.openai.schemas.prompt_cache import PromptCacheFields
from app.api.openai.schemas.queue_options import QueueOptions
from app.api.schemas.base import RequestModel
from app.api.schemas.by_type import by_type
from app.api.schemas.fields import (
    MAX_MESSAGES,
    CacheSalt,
    Text,
    check_encodable,
    check_size,
    field_error,
    json_text,
)
from app.prompts.conversation import ChatMessage
from app.prompts.images.image_marks import Attachment
from app.prompts.scoring.questions import MAX_LEVELS, MAX_OPTIONS, Option, Question

MAX_QUESTIONS: Final = 400  # OpenAI's
# Of JSON in the input; OpenAI's.
_MAX_DEPTH: Final = 32
_MAX_VALUES: Final = 10_000
_MAX_JSON: Final = 256 << 10


def read_json(part: Mapping[str, Any]) -> str:
    """Return the JSON of a part `{"data": ...}` as text."""
    data = part.get("data")
    if not isinstance(data, dict) and not _are_objects(data):
        raise field_error("the data of a part must be an object, or an array of objects")
    check_size(data, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES)
    return json_text(data, max_depth=_MAX_DEPTH, max_characters=_MAX_JSON)


def _are_objects(data: Any) -> bool:
    return isinstance(data, list) and all(isinstance(each, dict) for each in data)


class DecisionMessage(MessageItem):
    """A message; a user's may have JSON."""

    @field_validator("content", mode="before")
    @classmethod
    def _read_json(cls, content: Any, info: ValidationInfo) -> Any:
        is_read = info.data.get("role") == "user" and isinstance(content, list)
        return [*map(_as_text, content)] if is_read else content


def _as_text(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") == "input_json":
        return {"type": "input_text", "text": read_json(part)}
    return part


Item = DecisionMessage | FunctionCallItem | CustomToolCallItem | CallOutputItem

_KINDS: Final[dict[str, Callable[[Any], Item]]] = {
    "message": DecisionMessage.model_validate,
    "function_call": FunctionCallItem.model_validate,
    "custom_tool_call": CustomToolCallItem.model_validate,
    "function_call_output": CallOutputItem.model_validate,
    "custom_tool_call_output": CallOutputItem.model_validate,
}
_parse: Final = by_type(_KINDS)


def _item(data: Any) -> Item:
    is_message = isinstance(data, dict) and data.get("type") is None
    return _parse(data | {"type": "message"} if is_message else data)


_Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
_Input = Annotated[
    list[Annotated[Item, BeforeValidator(_item)]],
    Field(min_length=1),
    FailFast(),
    BeforeValidator(as_items, json_schema_input_type=str | _Items),
]

_Instructions = Annotated[
    Text,
    BeforeValidator(
        partial(join_parts, fields={"input_text": "text"}, others={"input_json": read_json}),
        json_schema_input_type=str | list[dict[str, Any]],
    ),
]


class _Question(RequestModel):
    name: Text | None = None
    instructions: _Instructions


class PredicateQuestion(_Question):
    type: Literal["predicate"]

    def to_question(self, param: str) -> Question:
        return Question(
            param=param,
            kind="truth",
            instructions=self.instructions,
            options=(Option(""), Option("")),
        )


def _text_or_boolean(value: Any) -> Any:
    if not isinstance(value, str | bool):
        raise field_error("it must be a string or a boolean")
    return check_encodable(value) if isinstance(value, str) else value


class Choice(RequestModel):
    value: Annotated[str | bool, BeforeValidator(_text_or_boolean)]
    description: Text = ""

    @property
    def shown(self) -> str:
        return self.value if isinstance(self.value, str) else str(self.value).lower()


class ChoiceQuestion(_Question):
    type: Literal["choice"]
    choices: list[Choice] = Field(min_length=2, max_length=MAX_OPTIONS)

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        if len({(type(each.value), each.value) for each in self.choices}) < len(self.choices):
            raise field_error("each choice must be unique", "choices")
        return self

    def to_question(self, param: str) -> Question:
        options = [Option(each.shown, each.description) for each in self.choices]
        return Question(
            param=param, kind="options", instructions=self.instructions, options=options
        )


class Level(RequestModel):
    label: Text
    description: Text = ""


class ScoreQuestion(_Question):
    type: Literal["score"]
    levels: list[Level] = Field(min_length=2, max_length=MAX_LEVELS)

    def to_question(self, param: str) -> Question:
        options = [Option(each.label, each.description) for each in self.levels]
        return Question(param=param, kind="levels", instructions=self.instructions, options=options)


AnyQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion
_parse_question: Final = by_type(
    {
        "predicate": PredicateQuestion.model_validate,
        "choice": ChoiceQuestion.model_validate,
        "score": ScoreQuestion.model_validate,
    }
)


class DecisionRequest(PromptCacheFields, QueueOptions):
    """Fields are OpenAI's, and the server's own for the queue."""

    model: Text | None = Field(default=None, description="The default model if left out.")
    input: _Input
    questions: Annotated[
        list[Annotated[AnyQuestion, BeforeValidator(_parse_question)]],
        Field(min_length=1, max_length=MAX_QUESTIONS),
        FailFast(),
    ]
    cache_salt: CacheSalt | None = None

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        known: set[str] = set()
        for index, item in enumerate(self.input):
            if isinstance(item, FunctionCallItem | CustomToolCallItem):
                known.add(item.call_id)
            elif isinstance(item, CallOutputItem) and item.call_id not in known:
                raise field_error("no call before it has this id", f"input.{index}.call_id")
        return self

    def messages(self) -> Sequence[ChatMessage]:
        return list(to_messages(self.input))

    def attachments(self) -> Mapping[str, Attachment]:
        """Return the images and files of the input, by their marks."""
        return attachments(self.input)

    def to_questions(self) -> list[Question]:
        return [each.to_question(f"questions.{i}") for i, each in enumerate(self.questions)]
