"""`/v1/systemone`: the request, with TypeSafe's fields; Ollama and vLLM take the same."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from app.api.openai.schemas.queue_options import QueueOptions
from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.by_type import by_type
from app.api.schemas.fields import CacheSalt, Text, check_encodable, check_length, json_text
from app.prompts.conversation import ChatMessage
from app.prompts.scoring.questions import MAX_LEVELS, MAX_OPTIONS, Option, Question

_MAX_QUESTIONS: Final = 400
_MAX_DEPTH: Final = 32
_MAX_CHARACTERS: Final = 1 << 22

# Others take these besides.
_UNSUPPORTED: Final[Defaults] = {"images": ([],), "assets": ({},)}


def _as_text(value: Any) -> Any:
    """Return a text as it is, and an object or an array as JSON."""
    if not isinstance(value, dict | list):
        return value
    return json_text(value, max_depth=_MAX_DEPTH, max_characters=_MAX_CHARACTERS)


Content = Annotated[
    Text,
    BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any] | list[Any]),
]
_Name = Annotated[str, AfterValidator(check_encodable)]


class _Question(RequestModel):
    instructions: Content


class NoulCriteria(RequestModel):
    true: Content = ""
    false: Content = ""


class NoulQuestion(_Question):
    """A question of yes or no; the answer is the probability of yes."""

    type: Literal["noul"]
    criteria: NoulCriteria = NoulCriteria()

    def to_question(self, param: str) -> Question:
        options = (Option("", self.criteria.true), Option("", self.criteria.false))
        return Question(param=param, kind="truth", instructions=self.instructions, options=options)


class ChoiceQuestion(_Question):
    """`criteria` has a description of each option, or null."""

    type: Literal["choice"]
    criteria: Annotated[dict[_Name, Content | None], Field(min_length=1, max_length=MAX_OPTIONS)]

    def to_question(self, param: str) -> Question:
        options = [Option(name, text or "") for name, text in self.criteria.items()]
        return Question(
            param=param, kind="options", instructions=self.instructions, options=options
        )


class ScoreQuestion(_Question):
    """`criteria` has the levels, the lowest one first."""

    type: Literal["score"]
    criteria: Annotated[list[Content], Field(min_length=1, max_length=MAX_LEVELS)]

    def to_question(self, param: str) -> Question:
        options = [Option(level) for level in self.criteria]
        return Question(param=param, kind="levels", instructions=self.instructions, options=options)


AnyQuestion = NoulQuestion | ChoiceQuestion | ScoreQuestion
_parse: Final = by_type(
    {
        "noul": NoulQuestion.model_validate,
        "choice": ChoiceQuestion.model_validate,
        "score": ScoreQuestion.model_validate,
    }
)


def _checked(value: Any) -> Any:
    if isinstance(value, dict):
        check_length(value, _MAX_QUESTIONS)
    return value


class SystemOneRequest(QueueOptions):
    defaults = _UNSUPPORTED

    model: Text | None = Field(default=None, description="The default model if left out.")
    state: Content
    questions: Annotated[
        dict[_Name, Annotated[AnyQuestion, BeforeValidator(_parse)]],
        Field(min_length=1, max_length=_MAX_QUESTIONS),
        BeforeValidator(_checked),
    ]
    cache_salt: CacheSalt | None = None

    def messages(self) -> Sequence[ChatMessage]:
        return [ChatMessage(role="user", content=self.state)]

    def to_questions(self) -> list[Question]:
        asked: Mapping[str, AnyQuestion] = self.questions
        return [each.to_question(f"questions.{name[:64]}") for name, each in asked.items()]
