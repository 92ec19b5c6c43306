"""`/v1/score` and `/v1/rerank`: the requests, with vLLM's fields."""

from typing import Annotated, Final, Self

from pydantic import AliasChoices, BeforeValidator, Field, model_validator

from app.api.openai.schemas.pooled import PooledRequest
from app.api.schemas.base import Defaults, RequestModel
from app.api.schemas.fields import INT32_MAX, Text, as_list, field_error

_MAX_TEXTS: Final = 2048


_TextList = Annotated[list[Text], Field(min_length=1, max_length=_MAX_TEXTS)]
Texts = Annotated[_TextList, BeforeValidator(as_list, json_schema_input_type=Text | _TextList)]

_UNSUPPORTED: Final[Defaults] = {
    "mm_processor_kwargs": (),
    "use_activation": (True,),
    "activation": (True,),
    "softmax": (True,),
    "chat_template": (),
    "chat_template_kwargs": (),
}


class ScoringRequest(PooledRequest):
    """A request for the relevance of texts to other texts."""

    defaults = _UNSUPPORTED

    instruction: Text | None = Field(
        default=None, description="What makes a document relevant; the template's own if left out."
    )
    max_tokens_per_doc: int | None = Field(
        default=None, ge=1, le=INT32_MAX, description="A longer document loses its end."
    )


class ScoreRequest(ScoringRequest):
    """One text and several others, or as many pairs."""

    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "data_2"))

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise field_error("it must be one text, or as many as text_2 has", "text_1")
        return self

    def pairs(self) -> list[tuple[str, str]]:
        first = self.text_1 * len(self.text_2) if len(self.text_1) == 1 else self.text_1
        return list(zip(first, self.text_2, strict=True))


class Document(RequestModel):
    text: Text


class RerankRequest(ScoringRequest):
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=_MAX_TEXTS)]
    top_n: int = Field(default=0, ge=0, le=INT32_MAX, description="0 returns all documents.")
    return_documents: bool = True

    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]
