"""Uses of a loaded model besides generation: embeddings, reranking."""

import logging
from typing import Final

from mlx_lm.tokenizer_utils import TokenizerWrapper

from batching.backend.pooling.description import Description, Pipeline
from batching.backend.pooling.head import NO_HEAD, PoolingHead
from batching.config import EngineConfig
from batching.errors import ModelLoadError
from batching.inputs.rerank_templates import known_template
from batching.pooling import Embeddings, NoEmbeddings, PoolingType, Reranker

logger = logging.getLogger(__name__)

# Roles of the turns that a reranker's template takes.
_ROLES: Final = ("query", "document")
# The tokens of an irrelevant and of a relevant document.
_TOKENS: Final = "no,yes"


def may_embed(config: EngineConfig, description: Description) -> bool:
    """True if a model embeds, unless its hidden states cannot be seen."""
    if config.pooling == "auto":
        return isinstance(description.pipeline, Pipeline)
    return config.pooling != "off"


def embeddings_of(
    config: EngineConfig, description: Description, hidden_size: int | None
) -> tuple[Embeddings | NoEmbeddings, PoolingHead]:
    """Return how a model embeds, as its files and the settings say.

    hidden_size: None if the model's hidden states cannot be seen.

    Raises:
        ModelLoadError: its dense layers do not fit.
    """
    pipeline = description.pipeline
    if config.pooling == "off":
        return NoEmbeddings("makes no embeddings here, since pooling is off"), NO_HEAD
    if isinstance(pipeline, NoEmbeddings):
        if config.pooling == "auto":
            return pipeline, NO_HEAD
        pipeline = Pipeline(pooling=PoolingType(config.pooling))
    if hidden_size is None:
        reason = "makes no embeddings, since its hidden states cannot be seen"
        return NoEmbeddings(reason), NO_HEAD
    pooling = pipeline.pooling if config.pooling == "auto" else PoolingType(config.pooling)
    embeddings = Embeddings(
        pooling=pooling,
        size=pipeline.head.size(hidden_size),
        is_normalized=pipeline.is_normalized,
        max_tokens=pipeline.max_tokens,
        prompts=pipeline.prompts or {},
        default_prompt=pipeline.default_prompt,
    )
    return embeddings, pipeline.head


def reranker_of(
    config: EngineConfig,
    description: Description,
    tokenizer: TokenizerWrapper,
    vocab_size: int,
) -> Reranker | None:
    """Return how a model reranks; None if nothing says that it does.

    Raises:
        ModelLoadError: what is set, or described, to be a token is none.
    """
    own = tokenizer.chat_template
    template = config.rerank_template
    has_roles = isinstance(own, str) and all(role in own for role in _ROLES)
    if template is None and not has_roles:
        template = known_template(config.model, config.model_id)
    ids = description.rerank_ids
    if config.rerank_tokens is not None or (template is not None and ids is None):
        ids = _token_ids(tokenizer, config.rerank_tokens or _TOKENS)
    if ids is None:
        return None
    if template is None and not has_roles:
        logger.warning(
            "%s reranks nothing: its chat template takes no query and document, and no other is set",
            config.model_id,
        )
        return None
    if not all(0 <= token_id < vocab_size for token_id in ids):
        raise ModelLoadError(f"its rerank tokens {ids} are not in the vocabulary")
    return Reranker(relevant_id=ids[0], irrelevant_id=ids[1], template=template)


def _token_ids(tokenizer: TokenizerWrapper, text: str) -> tuple[int, int]:
    """Return the tokens of a relevant and of an irrelevant document, which the text has in reverse."""
    words = [word.strip() for word in text.split(",")]
    if len(words) != 2:
        raise ModelLoadError(
            f"the rerank tokens {text!r} are not two words with a comma between them"
        )
    irrelevant, relevant = words
    return _token_id(tokenizer, relevant), _token_id(tokenizer, irrelevant)


def _token_id(tokenizer: TokenizerWrapper, word: str) -> int:
    token_ids: list[int] = tokenizer.encode(word, add_special_tokens=False)
    if len(token_ids) != 1:
        raise ModelLoadError(f"the rerank token {word!r} is {len(token_ids)} tokens of this model")
    return token_ids[0]
