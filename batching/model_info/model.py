"""The description of a loaded model that the layers above the engine use; no tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast

from batching.adapters.adapter import NO_ADAPTERS, AdaptableLayers, NoAdapters
from batching.model_info.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from batching.model_info.vision import TEXT_ONLY, NoVision, VisionModel
from batching.pooling import NO_EMBEDDINGS, CrossEncoder, Embeddings, NoEmbeddings, Reranker

T = TypeVar("T")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that serving text needs.

    mlx-lm's TokenizerWrapper is one.  `Any` stands where templates take what clients send.
    """

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def chat_template(self) -> Any:
        """The template's text; some models have a function or nothing instead."""
        ...

    @property
    def all_special_ids(self) -> Sequence[int]: ...

    @property
    def think_start(self) -> str | None: ...

    @property
    def think_end(self) -> str | None: ...

    @property
    def tool_call_start(self) -> str | None: ...

    @property
    def tool_call_end(self) -> str | None: ...

    @property
    def tool_parser(self) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        """Return the prompt's token ids, or its text with `tokenize=False`."""
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A loaded model; it and the same one with an adapter are equal, so that caches have them once.

    max_model_len: the most tokens of a request, prompt and output together.
    has_jinja_template: True if `get_chat_template` of the tokenizer returns a Jinja template; otherwise
        a function of mlx-lm or of the tokenizer renders conversations.
    vision: whether and how the model takes images.
    reranker: how the model scores documents; None if it is not a reranker.
    mode, mode_reason: the part of the model that runs for all rows of a step at once, in the words of the
        self-check, and why it is not all of it; empty if it is.
    generates: False for an encoder, which writes no text.
    adapters: the layers to which adapters can add something, or why there are none.
    base: the model that this is with an adapter; None if it is one by itself.
    """

    model_id: str = field(compare=False)
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    has_jinja_template: bool = False
    embeddings: Embeddings | NoEmbeddings = NO_EMBEDDINGS
    reranker: Reranker | CrossEncoder | None = None
    vision: VisionModel | NoVision = TEXT_ONLY
    mode: str = "ragged"
    mode_reason: str = ""
    generates: bool = True
    adapters: AdaptableLayers | NoAdapters = field(default=NO_ADAPTERS, compare=False)
    base: "ModelInfo | None" = field(default=None, repr=False, compare=False)
    _derived: dict[object, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def derived(self, derive: Callable[["ModelInfo"], T]) -> T:
        """Return what a function derives from the model: it is called once, and the model keeps the result.

        A model that is made of this one, by `replace`, derives it again; one with an adapter has its base's.
        """
        if self.base is not None:
            return self.base.derived(derive)
        if derive not in self._derived:
            self._derived[derive] = derive(self)
        return cast(T, self._derived[derive])

    def adapted(self, name: str) -> "ModelInfo":
        """Return the model with an adapter, by the name of that."""
        return replace(self, model_id=name, base=self)
