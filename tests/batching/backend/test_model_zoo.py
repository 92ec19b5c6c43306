"""The zoo has a tiny model of each type of mlx-lm, and each shows a wrong state in its logits."""

from collections.abc import Sequence
from itertools import product
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.model_zoo import (
    CONFIGS,
    INCONSISTENT,
    LEAPING,
    MODEL_TYPES,
    UNAVAILABLE,
    UNQUANTIZABLE,
    ZOO,
    make_tiny,
)
from tests.support.weekly import weekly
from tests.support.zoo.recurrent import RECURRENT

PROMPT: Final[list[int]] = np.random.default_rng(0).integers(1, VOCAB_SIZE, 40).tolist()
HEAD: Final = 30
STATEFUL: Final = (*RECURRENT, "longcat_flash_ngram")
QUANTIZABLE: Final = [model_type for model_type in ZOO if model_type not in UNQUANTIZABLE]
MODES: Final = ((4, "affine"), (8, "affine"), (4, "mxfp4"))
QUANTIZED: Final = (nn.QuantizedLinear, nn.QuantizedEmbedding)


def logits(model: nn.Module, token_ids: list[int], cache: list[Any]) -> mx.array:
    """Return the logits of the tokens that every model has."""
    rows: mx.array = model(mx.array([token_ids]), cache=cache)[0, :, :VOCAB_SIZE]
    mx.eval(rows, [c.state for c in cache])
    return rows


def in_pieces(model: nn.Module) -> mx.array:
    cache = make_prompt_cache(model)
    pieces = [PROMPT[:HEAD], *([token_id] for token_id in PROMPT[HEAD:])]
    return mx.concatenate([logits(model, piece, cache) for piece in pieces])


def difference(a: mx.array, b: mx.array) -> float:
    """Return the largest difference, relative to the largest logit; NaN if there is one."""
    return float(mx.abs(a - b).max() / mx.abs(a).max())


def states(caches: Sequence[Any]) -> list[ArraysCache]:
    nested = (states(c.caches) if isinstance(c, CacheList) else [c] for c in caches)
    return [c for group in nested for c in group if isinstance(c, ArraysCache)]


def next_logits(model: nn.Module, zeroed: tuple[int, int] | None = None) -> mx.array:
    """Continue the prompt, perhaps with one entry of one layer's state set to zeros."""
    cache = make_prompt_cache(model)
    logits(model, PROMPT[:HEAD], cache)
    if zeroed is not None:
        layer, entry = zeroed
        state = states(cache)[layer]
        state[entry] = mx.zeros_like(state[entry])
    return logits(model, PROMPT[HEAD : HEAD + 1], cache)


def test_each_model_type_has_an_entry() -> None:
    assert {*CONFIGS, *UNAVAILABLE} == set(MODEL_TYPES)
    assert not {*ZOO} & {*UNAVAILABLE}
    assert {*INCONSISTENT, *UNQUANTIZABLE} <= {*CONFIGS}


@pytest.fixture(scope="module", params=weekly(ZOO, 12))
def tiny(request: pytest.FixtureRequest) -> tuple[str, nn.Module, mx.array]:
    """Return a model type, its model, and the logits of the prompt."""
    model = make_tiny(request.param)
    return request.param, model, logits(model, PROMPT, make_prompt_cache(model))


def test_a_prompt_in_pieces_gives_the_logits_of_the_whole(
    tiny: tuple[str, nn.Module, mx.array],
) -> None:
    model_type, model, whole = tiny
    assert bool(mx.isfinite(whole).all())
    if model_type not in LEAPING:
        assert (difference(whole, in_pieces(model)) < 1e-3) == (model_type not in INCONSISTENT)


def test_the_last_logits_depend_on_the_first_token(tiny: tuple[str, nn.Module, mx.array]) -> None:
    _, model, whole = tiny
    other = logits(model, [PROMPT[0] ^ 1, *PROMPT[1:]], make_prompt_cache(model))
    assert difference(whole[-1], other[-1]) > 1e-3


def test_no_parameter_is_constant(tiny: tuple[str, nn.Module, mx.array]) -> None:
    parameters: list[tuple[str, Any]] = [*tree_flatten(tiny[1].parameters())]
    varies = {path: p.max() != p.min() for path, p in parameters if p.size > 1}
    mx.eval(varies)
    assert [path for path, differs in varies.items() if not differs] == []


@pytest.mark.parametrize("model_type", weekly(STATEFUL, 4))
def test_each_recurrent_state_changes_the_next_logits(model_type: str) -> None:
    model = make_tiny(model_type)
    expected = next_logits(model)
    filled = make_prompt_cache(model)
    logits(model, PROMPT[:HEAD], filled)
    entries = [(n, i) for n, s in enumerate(states(filled)) for i in range(len(s.cache))]
    assert len(entries) > 1 or model_type == "longcat_flash_ngram"
    for entry in entries:
        assert difference(expected, next_logits(model, zeroed=entry)) > 1e-4, entry


@pytest.mark.parametrize(("quantization", "model_type"), weekly(product(MODES, QUANTIZABLE), 8))
def test_a_quantized_model_gives_finite_logits(
    model_type: str, quantization: tuple[int, str]
) -> None:
    bits, mode = quantization
    model = make_tiny(model_type, bits=bits, mode=mode)
    assert any(isinstance(module, QUANTIZED) for module in model.modules())
    assert bool(mx.isfinite(logits(model, PROMPT[:10], make_prompt_cache(model))).all())


@pytest.mark.parametrize("model_type", UNQUANTIZABLE)
def test_mlx_lm_cannot_quantize_it(model_type: str) -> None:
    with pytest.raises(TypeError):
        make_tiny(model_type, bits=4)
