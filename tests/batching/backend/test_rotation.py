"""Rotations as transformers 5 writes them."""

from typing import Any, Final

import mlx.nn as nn
import pytest
from mlx_lm.utils import _get_classes
from transformers import AutoConfig

from batching.backend.rotation import rotation_of

SIZES: Final = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
}
# As they were published: with what transformers 4 wrote.
GEMMA_3: Final = SIZES | {
    "model_type": "gemma3_text",
    "rope_theta": 2e6,
    "rope_local_base_freq": 3e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
MISTRAL: Final = SIZES | {"model_type": "mistral", "rope_theta": 1e9}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("config", "lacks"),
    [
        ({}, {}),
        ({"rope_theta": 1.0}, {}),
        ({"rope_parameters": None}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {"rope_theta": 500.0}),
        ({"rope_theta": 1.0, "rope_parameters": {"rope_theta": 500.0}}, {}),
        (
            {"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}},
            {"rope_theta": 5.0, "partial_rotary_factor": 0.5},
        ),
        ({"rope_parameters": YARN}, {"rope_theta": 500.0, "rope_scaling": YARN}),
        ({"rope_parameters": YARN, "rope_scaling": {"factor": 2.0}}, {"rope_theta": 500.0}),
        (
            {"text_config": {"head_dim": 8, "rope_parameters": {"rope_theta": 5.0}}},
            {
                "text_config": {
                    "head_dim": 8,
                    "rope_parameters": {"rope_theta": 5.0},
                    "rope_theta": 5.0,
                }
            },
        ),
        ({"text_config": {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 5.0}}}, {}),
        ({"text_config": None, "rope_parameters": {"rope_theta": 5.0}}, {"rope_theta": 5.0}),
    ],
)
def test_what_a_config_lacks_is_found(config: dict[str, Any], lacks: dict[str, Any]) -> None:
    assert rotation_of(config) == lacks


def saved_by_transformers(published: dict[str, Any]) -> dict[str, Any]:
    """Return the config that transformers writes of a published one."""
    rest = {name: value for name, value in published.items() if name != "model_type"}
    saved: dict[str, Any] = AutoConfig.for_model(published["model_type"], **rest).to_diff_dict()
    return saved


def rotations(config: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the base and the scale of each layer of mlx-lm's model."""
    model_class, arguments = _get_classes(config)
    model: nn.Module = model_class(arguments.from_dict(config))
    return [(m.base, m.scale) for _, m in model.named_modules() if isinstance(m, nn.RoPE)]


@pytest.mark.parametrize(
    ("published", "expected"),
    [
        (MISTRAL, {(1e9, 1.0)}),
        ({"model_type": "mistral3", "text_config": MISTRAL}, {(1e9, 1.0)}),
        (GEMMA_3, {(2e6, 0.125), (3e4, 1.0)}),
        ({"model_type": "gemma3", "text_config": GEMMA_3}, {(2e6, 0.125), (3e4, 1.0)}),
    ],
)
def test_a_model_saved_again_rotates_as_the_published_one(
    published: dict[str, Any], expected: set[tuple[float, float]]
) -> None:
    saved = saved_by_transformers(published)
    assert "rope_theta" not in {**saved, **saved.get("text_config", {})}
    assert set(rotations(published)) == expected
    assert rotations(saved | rotation_of(saved)) == rotations(published)


BY_LAYER: Final = {
    "full_attention": {"rope_type": "default", "rope_theta": 5.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7.0},
}
SCALED_WINDOWS: Final = BY_LAYER | {"sliding_attention": YARN}


@pytest.mark.parametrize(
    "config",
    [
        # Its model reads them itself, or that of its `text_config`, or code of its own.
        {"model_type": "laguna"},
        {"model_type": "gemma4_unified", "text_config": {"rope_parameters": BY_LAYER}},
        {"model_type": "olmo3", "model_file": "model.py"},
        # As transformers 4 has written it, too.
        {"model_type": "olmo3", "rope_theta": 5.0},
    ],
)
def test_rotations_by_layer_that_the_model_has_otherwise_are_left_to_it(
    config: dict[str, Any],
) -> None:
    by_layer = {} if "text_config" in config else {"rope_parameters": BY_LAYER}
    assert rotation_of(config | by_layer) == {}


@pytest.mark.parametrize(
    ("model_type", "by_layer"),
    [("olmo3", BY_LAYER), ("gemma3_text", SCALED_WINDOWS), ("gemma3_text", {"x": YARN})],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_rotations_by_layer_that_the_model_would_not_read_are_refused(
    model_type: str, by_layer: dict[str, Any], is_nested: bool
) -> None:
    part: dict[str, Any] = {"rope_parameters": by_layer}
    config = {"text_config": part} if is_nested else part
    with pytest.raises(ValueError, match=f"differs from layer to layer .* mlx-lm's {model_type}"):
        rotation_of({"model_type": model_type, **config})
