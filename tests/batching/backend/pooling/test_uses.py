"""What a model is used for, as its files and the settings say."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper, load as load_tokenizer

from batching.backend.pooling.description import NO_DESCRIPTION, Description, Pipeline
from batching.backend.pooling.head import NO_HEAD, DenseLayer, PoolingHead
from batching.backend.pooling.uses import embeddings_of, may_embed, reranker_of
from batching.config import EngineConfig
from batching.errors import ModelLoadError
from batching.inputs.rerank_templates import RERANK_TEMPLATES
from batching.pooling import Embeddings, NoEmbeddings, PoolingType, Reranker
from tests.support.embedding_models import WORDS
from tests.support.embedding_server import write_reranker

DENSE = PoolingHead((DenseLayer(np.ones((3, 8), np.float32)),))
MEAN = Description(Pipeline(pooling=PoolingType.MEAN, head=DENSE, is_normalized=False))
SIZE = len(WORDS)
YES, NO = WORDS["yes"], WORDS["no"]


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(**{"model": "tiny", "model_id": "tiny", **changes})


def refusal(found: tuple[Embeddings | NoEmbeddings, PoolingHead]) -> str:
    embeddings, head = found
    assert isinstance(embeddings, NoEmbeddings)
    assert head is NO_HEAD
    return embeddings.reason


def test_a_model_embeds_as_its_files_say() -> None:
    found = embeddings_of(config(), MEAN, 8)
    assert found == (Embeddings(pooling=PoolingType.MEAN, size=3, is_normalized=False), DENSE)


def test_a_setting_outranks_the_files() -> None:
    embeddings, head = embeddings_of(config(pooling="cls"), MEAN, 8)
    assert isinstance(embeddings, Embeddings)
    assert (embeddings.pooling, head) == (PoolingType.CLS, DENSE)
    assert "pooling is off" in refusal(embeddings_of(config(pooling="off"), MEAN, 8))


@pytest.mark.parametrize(
    ("pooling", "described", "plain"),
    [("auto", True, False), ("last", True, True), ("off", False, False)],
)
def test_a_models_files_and_the_setting_say_whether_it_may_embed(
    pooling: str, described: bool, plain: bool
) -> None:
    assert may_embed(config(pooling=pooling), MEAN) is described
    assert may_embed(config(pooling=pooling), NO_DESCRIPTION) is plain


def test_a_model_that_says_nothing_embeds_if_it_is_set() -> None:
    assert "not described" in refusal(embeddings_of(config(), NO_DESCRIPTION, 8))
    found = embeddings_of(config(pooling="last"), NO_DESCRIPTION, 8)
    assert found == (Embeddings(pooling=PoolingType.LAST, size=8), NO_HEAD)


def test_a_model_without_hidden_states_embeds_nothing() -> None:
    assert "cannot be seen" in refusal(embeddings_of(config(pooling="last"), MEAN, None))


def test_layers_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ModelLoadError, match="a dense layer takes 8 numbers, and gets 9"):
        embeddings_of(config(), MEAN, 9)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[[str | None], TokenizerWrapper]:
    write_reranker(tmp_path)

    def with_template(template: str | None) -> TokenizerWrapper:
        return load_tokenizer(tmp_path, {"chat_template": template} if template else {})

    return with_template


Tokenizers = Callable[[str | None], TokenizerWrapper]
OWN = "{{ messages | selectattr('role', 'in', ['query', 'document']) | list }}"
IDS = NO_DESCRIPTION._replace(rerank_ids=(7, 8))


@pytest.mark.parametrize(
    ("changes", "description", "template", "reranker"),
    [
        ({}, NO_DESCRIPTION, None, None),
        ({}, NO_DESCRIPTION, OWN, None),
        ({}, IDS, OWN, Reranker(relevant_id=7, irrelevant_id=8)),
        (
            {"rerank_template": "T"},
            IDS,
            OWN,
            Reranker(relevant_id=7, irrelevant_id=8, template="T"),
        ),
        (
            {"rerank_template": "T"},
            NO_DESCRIPTION,
            None,
            Reranker(relevant_id=YES, irrelevant_id=NO, template="T"),
        ),
        (
            {"rerank_template": "T", "rerank_tokens": "0, 1"},
            IDS,
            None,
            Reranker(relevant_id=WORDS["1"], irrelevant_id=WORDS["0"], template="T"),
        ),
        (
            {"rerank_tokens": "0,1"},
            NO_DESCRIPTION,
            OWN,
            Reranker(relevant_id=WORDS["1"], irrelevant_id=WORDS["0"]),
        ),
        (
            {"model": "org/Qwen3-Reranker-0.6B"},
            NO_DESCRIPTION,
            None,
            Reranker(relevant_id=YES, irrelevant_id=NO, template=RERANK_TEMPLATES["qwen3"]),
        ),
    ],
)
def test_a_model_reranks_as_its_files_its_name_and_the_settings_say(
    tokenizer: Tokenizers,
    changes: dict[str, Any],
    description: Description,
    template: str | None,
    reranker: Reranker | None,
) -> None:
    assert reranker_of(config(**changes), description, tokenizer(template), SIZE) == reranker


def test_tokens_without_a_template_are_reported(
    tokenizer: Tokenizers, caplog: pytest.LogCaptureFixture
) -> None:
    assert reranker_of(config(), IDS, tokenizer("{{ messages }}"), SIZE) is None
    assert "tiny reranks nothing: its chat template takes no query and document" in caplog.text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("yes", "'yes' are not two words with a comma between them"),
        ("a,b,c", "are not two words"),
        ("no,yes yes", "the rerank token 'yes yes' is 2 tokens of this model"),
    ],
)
def test_tokens_that_are_none_are_an_error(tokenizer: Tokenizers, words: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        reranker_of(config(rerank_tokens=words, rerank_template="T"), IDS, tokenizer(None), SIZE)


def test_tokens_outside_of_the_vocabulary_are_an_error(tokenizer: Tokenizers) -> None:
    with pytest.raises(
        ModelLoadError, match=r"its rerank tokens \(7, 8\) are not in the vocabulary"
    ):
        reranker_of(config(), IDS, tokenizer(OWN), 8)
