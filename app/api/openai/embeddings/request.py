"""`/v1/embeddings`: the request."""

from functools import partial
from typing import Annotated, Final, Literal

from pydantic import Field, PlainValidator

from app.api.openai.schemas.pooled import PooledRequest
from app.api.openai.schemas.prompts import Prompts, prompts_type, read_prompts
from app.api.schemas.base import Defaults
from app.api.schemas.fields import INT32_MAX, Text

_MAX_INPUTS: Final = 2048  # OpenAI's

_Inputs = Annotated[
    Prompts,
    PlainValidator(
        partial(read_prompts, max_prompts=_MAX_INPUTS),
        json_schema_input_type=prompts_type(_MAX_INPUTS),
    ),
]

# vLLM takes these besides.
UNSUPPORTED: Final[Defaults] = {
    "messages": (),
    "chat_template": (),
    "chat_template_kwargs": (),
    "mm_processor_kwargs": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "use_activation": (True,),
}


class EmbeddingRequest(PooledRequest):
    defaults = UNSUPPORTED

    input: _Inputs
    dimensions: int | None = Field(
        default=None, ge=1, le=INT32_MAX, description="The first numbers only (Matryoshka)."
    )
    encoding_format: Literal["float", "base64"] = Field(
        default="float", description="`base64` is of 32-bit floats, little-endian."
    )
    normalize: bool | None = Field(
        default=None, description="Vectors of length 1; as the model says if left out. vLLM's."
    )
    prompt_name: Text | None = Field(
        default=None, description="A prompt of the model that is put before each text; TEI's."
    )
    truncation_side: Literal["left", "right"] = Field(
        default="right", description="The one that is cut; vLLM's."
    )
    add_special_tokens: bool = True
