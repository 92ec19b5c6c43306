"""Tiny vision models with random weights, one of each family, as directories that both libraries load."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from transformers import PreTrainedTokenizerFast

from batching.backend.vision.mlx_vlm_models import model_file
from batching.backend.vision.tower import whole_model
from batching.inputs.images import ImageInput, PlacedImage, TowerArray
from batching.model_files.seeing_ahead import SeeingAhead, seeing_ahead_of
from tests.support.byte_tokenizers import byte_vocabulary

SPECIAL: Final = ("<s>", "</s>", "<image>", "<video>", "<begin>", "<end>")
_NUM_BYTES: Final = 256
BOS, EOS, IMAGE, VIDEO, BEGIN, END = range(_NUM_BYTES, _NUM_BYTES + len(SPECIAL))
VOCAB_SIZE: Final = 272

Config = dict[str, Any]

_TEXT: Final[Config] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_TOKENS: Final[Config] = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "vocab_size": VOCAB_SIZE,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
_VISION: Final[Config] = {"hidden_size": 32, "intermediate_size": 48}
_MROPE: Final[Config] = {"type": "mrope", "mrope_section": [2, 3, 3]}


@dataclass(frozen=True)
class Family:
    """A family of vision models.

    config: that of its tiny model.
    image: makes an image from a seed.
    axis: along which the inputs of several images are joined.
    """

    config: Config
    image: Callable[[int], ImageInput]
    axis: int = 0

    def deep(self, num_layers: int) -> Config:
        """Return the config of a model whose tower has so many layers."""
        of_tower = self.config["vision_config"]
        name = "depth" if "depth" in of_tower else "num_hidden_layers"
        return self.config | {"vision_config": of_tower | {name: num_layers}}

    @property
    def seeing_ahead(self) -> SeeingAhead | None:
        return seeing_ahead_of(self.config)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _array(name: str, values: Any) -> TowerArray:
    return TowerArray(name, values.dtype.str, values.shape, values.tobytes())


def _with_grid(patch: int) -> Callable[[int], ImageInput]:
    """Return what makes images of patches in a grid, of two shapes, of which four become a row."""

    def make(seed: int) -> ImageInput:
        height, width = ((8, 12), (6, 4))[seed % 2]
        pixels = _rng(seed).standard_normal((height * width, 3 * 2 * patch**2))
        num_rows = height * width // 4
        return ImageInput(
            (BEGIN, *(IMAGE,) * num_rows, END),
            tuple(range(1, num_rows + 1)),
            (
                _array("pixel_values", pixels.astype(np.float32)),
                _array("image_grid_thw", np.array([[1, height, width]])),
            ),
        )

    return make


def _of_rows(
    num_rows: int, sees_ahead: bool = False, **arrays: Callable[[np.random.Generator], Any]
) -> Callable[[int], ImageInput]:
    def make(seed: int) -> ImageInput:
        rng = _rng(seed)
        return ImageInput(
            (IMAGE,) * num_rows,
            tuple(range(num_rows)),
            tuple(_array(name, np.asarray(of(rng))) for name, of in arrays.items()),
            sees_ahead,
        )

    return make


def _pixels(*shape: int) -> Callable[[np.random.Generator], Any]:
    return lambda rng: rng.standard_normal(shape).astype(np.float32)


_FAMILIES: Final[Mapping[str, Family]] = {
    "qwen2_5_vl": Family(
        {
            **_TOKENS,
            "model_type": "qwen2_5_vl",
            "text_config": _TEXT | {"model_type": "qwen2_5_vl_text", "rope_scaling": _MROPE},
            "vision_config": {
                **_VISION,
                "model_type": "qwen2_5_vl",
                "depth": 2,
                "out_hidden_size": 64,
                "num_heads": 2,
                "patch_size": 14,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            },
        },
        _with_grid(14),
    ),
    "qwen3_vl": Family(
        {
            **_TOKENS,
            "model_type": "qwen3_vl",
            "text_config": _TEXT | {"model_type": "qwen3_vl_text", "rope_scaling": _MROPE},
            "vision_config": {
                **_VISION,
                "model_type": "qwen3_vl",
                "depth": 3,
                "out_hidden_size": 64,
                "num_heads": 2,
                "patch_size": 16,
                "num_position_embeddings": 144,
                "deepstack_visual_indexes": [0, 1],
            },
        },
        _with_grid(16),
    ),
    "qwen3_5": Family(
        {
            **_TOKENS,
            "model_type": "qwen3_5",
            "text_config": {
                **_TEXT,
                "model_type": "qwen3_5_text",
                "head_dim": 32,
                "num_hidden_layers": 4,
                "full_attention_interval": 2,
                "rope_parameters": {
                    "type": "default",
                    "mrope_section": [3, 3, 2],
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.5,
                    "mrope_interleaved": True,
                },
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "linear_conv_kernel_dim": 4,
            },
            "vision_config": {
                **_VISION,
                "model_type": "qwen3_5",
                "depth": 2,
                "out_hidden_size": 64,
                "num_heads": 2,
                "patch_size": 16,
                "num_position_embeddings": 144,
            },
        },
        _with_grid(16),
    ),
    "mistral3": Family(
        {
            **_TOKENS,
            "model_type": "mistral3",
            "image_token_index": IMAGE,
            "spatial_merge_size": 2,
            "text_config": {
                **_TEXT,
                "model_type": "mistral",
                "layer_types": ["full_attention"] * 3,
                "use_qk_norm": False,
            },
            "vision_config": {
                **_VISION,
                "model_type": "pixtral",
                "num_hidden_layers": 2,
                "head_dim": 16,
                "num_attention_heads": 2,
                "image_size": 112,
                "patch_size": 14,
                "num_channels": 3,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
            },
        },
        _of_rows(16, pixel_values=_pixels(1, 3, 112, 112), image_sizes=lambda _: [[112, 112]]),
    ),
    "llava": Family(
        {
            **_TOKENS,
            "model_type": "llava",
            "image_token_index": IMAGE,
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": {
                **_VISION,
                "model_type": "clip_vision_model",
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 14,
                "projection_dim": 32,
            },
        },
        _of_rows(16, pixel_values=_pixels(1, 3, 56, 56)),
    ),
    "idefics3": Family(
        {
            **_TOKENS,
            "model_type": "idefics3",
            "scale_factor": 2,
            "text_config": _TEXT | {"model_type": "llama"},
            "vision_config": {
                **_VISION,
                "model_type": "idefics3",
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 112,
                "patch_size": 14,
            },
        },
        _of_rows(16, pixel_values=_pixels(1, 1, 3, 112, 112)),
        axis=1,
    ),
    "lfm2_vl": Family(
        {
            **_TOKENS,
            "model_type": "lfm2_vl",
            "image_token_index": IMAGE,
            "downsample_factor": 2,
            "projector_hidden_size": 32,
            "text_config": {
                "model_type": "lfm2",
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": VOCAB_SIZE,
                "norm_eps": 1e-5,
                "conv_bias": False,
                "conv_L_cache": 3,
                "block_dim": 64,
                "block_ff_dim": 96,
                "block_multiple_of": 8,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": False,
                "full_attn_idxs": [1, 3],
                "layer_types": ["conv", "full_attention"] * 2,
                "max_position_embeddings": 4096,
                "rope_theta": 10000.0,
            },
            "vision_config": {
                **_VISION,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_patches": 64,
                "patch_size": 16,
            },
        },
        _of_rows(
            16,
            pixel_values=_pixels(1, 64, 768),
            spatial_shapes=lambda _: [[8, 8]],
            pixel_attention_mask=lambda _: np.ones((1, 64), np.int32),
        ),
    ),
}


_GEMMA4: Final[Config] = {
    **_TOKENS,
    "model_type": "gemma4",
    "audio_config": None,
    "boi_token_id": BEGIN,
    "eoi_token_id": END,
    "vision_soft_tokens_per_image": 16,
    "hidden_size": 64,
    "text_config": {
        **_TEXT,
        "model_type": "gemma4_text",
        "tie_word_embeddings": True,
        "num_hidden_layers": 5,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "sliding_window": 20,
        "layer_types": [
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
        "use_double_wide_mlp": False,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1000000.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "vision_config": {
        **_VISION,
        "model_type": "gemma4_vision",
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "default_output_length": 16,
        "position_embedding_size": 64,
        "patch_size": 4,
        "pooling_kernel_size": 2,
    },
}
_SEEING: Final[Config] = _GEMMA4 | {
    "text_config": _GEMMA4["text_config"] | {"use_bidirectional_attention": "vision"}
}
# 16 rows of four patches each.
_GEMMA4_PIXELS: Final = _pixels(1, 3, 32, 32)
_GEMMAS: Final[Mapping[str, Family]] = {
    "gemma3": Family(
        {
            **_TOKENS,
            "model_type": "gemma3",
            "image_token_index": IMAGE,
            "pad_token_id": END,
            "hidden_size": 64,
            "mm_tokens_per_image": 16,
            "text_config": {
                **_TEXT,
                "model_type": "gemma3_text",
                "query_pre_attn_scalar": 16,
                "rope_theta": 1000000.0,
                "sliding_window": 20,
                "sliding_window_pattern": 3,
                "mm_tokens_per_image": 16,
            },
            "vision_config": {
                **_VISION,
                "model_type": "siglip_vision_model",
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 56,
                "patch_size": 7,
            },
        },
        _of_rows(16, True, pixel_values=_pixels(1, 3, 56, 56)),
    ),
    "gemma4": Family(_SEEING, _of_rows(16, True, pixel_values=_GEMMA4_PIXELS)),
    "gemma4-causal": Family(_GEMMA4, _of_rows(16, pixel_values=_GEMMA4_PIXELS)),
}


# Their text models are mlx-vlm's.
_GLM_VISION: Final[Config] = {
    **_VISION,
    "depth": 2,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 14,
    "image_size": 112,
}
_GLM_TEXT: Final[Config] = {
    **_TEXT,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
}
_GLMS: Final[Mapping[str, Family]] = {
    "glm4v": Family(
        {
            **_TOKENS,
            "model_type": "glm4v",
            "text_config": _GLM_TEXT | {"model_type": "glm4v_text"},
            "vision_config": _GLM_VISION | {"model_type": "glm4v"},
        },
        _with_grid(14),
    ),
    "glm4v_moe": Family(
        {
            **_TOKENS,
            "model_type": "glm4v_moe",
            "text_config": {
                **_GLM_TEXT,
                "model_type": "glm4v_moe_text",
                "moe_intermediate_size": 24,
                "norm_topk_prob": True,
                "n_group": 1,
                "topk_group": 1,
                "n_shared_experts": 1,
                "n_routed_experts": 4,
                "routed_scaling_factor": 1.0,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "use_qk_norm": False,
            },
            "vision_config": _GLM_VISION | {"model_type": "glm4v_moe"},
        },
        _with_grid(14),
    ),
}


def _variant(family: Family, model_type: str, *of_parts: str, **of_text: Any) -> Family:
    """Return a family that differs from another one in its types, of text and tower too, and its text model."""
    config = family.config
    text_type, vision_type = of_parts
    text = config["text_config"] | {"model_type": text_type, **of_text}
    vision = config["vision_config"] | {"model_type": vision_type}
    changed = {"model_type": model_type, "text_config": text, "vision_config": vision}
    return Family(config | changed, family.image, family.axis)


_EXPERTS: Final[Config] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
FAMILIES: Final[Mapping[str, Family]] = {
    **_FAMILIES,
    **_GEMMAS,
    **_GLMS,
    "qwen2_vl": Family(
        {
            **_TOKENS,
            "model_type": "qwen2_vl",
            "text_config": _TEXT | {"model_type": "qwen2_vl_text", "rope_scaling": _MROPE},
            "vision_config": {
                "model_type": "qwen2_vl",
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 64,
                "num_heads": 2,
                "patch_size": 14,
                "mlp_ratio": 2,
            },
        },
        _with_grid(14),
    ),
    "qwen3_vl_moe": _variant(
        _FAMILIES["qwen3_vl"], "qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3_vl_moe", **_EXPERTS
    ),
    "qwen3_5_moe": _variant(
        _FAMILIES["qwen3_5"],
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_moe",
        **_EXPERTS,
        shared_expert_intermediate_size=24,
    ),
    "smolvlm": _variant(_FAMILIES["idefics3"], "smolvlm", "llama", "smolvlm_vision"),
}


def make_vision_model(name: str, folder: Path, seed: int = 1) -> nn.Module:
    """Write a tiny model of a family; return mlx-vlm's model of it."""
    return write_vision_model(FAMILIES[name].config, folder, seed)


def write_vision_model(config: Config, folder: Path, seed: int = 1) -> nn.Module:
    """Write a model of a config with random weights; return mlx-vlm's model of it."""
    model = whole_model(model_file(config["model_type"]), config)
    mx.random.seed(seed)
    model.update(tree_map_with_path(_random, model.parameters()))
    mx.eval(model.parameters())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text("{}")
    weights: dict[str, mx.array] = {}
    tree_flatten(model.parameters(), destination=weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    _tokenizer().save_pretrained(folder)
    return model


def _random(path: str, array: mx.array) -> mx.array:
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    values = mx.random.normal(array.shape)
    if "norm" in path and array.ndim == 1:
        # Gemma 4 does not scale its scores: steep ones would make much of little.
        return (0.3 if "q_norm" in path else 1.0) + 0.1 * values
    return values * (0.9 / max(1, array.shape[-1]) ** 0.5 if array.ndim > 1 else 0.2)


def _tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=byte_vocabulary(SPECIAL), bos_token="<s>", eos_token="</s>"
    )


@dataclass(frozen=True)
class Prompt:
    """A prompt with images in it."""

    token_ids: tuple[int, ...]
    images: tuple[PlacedImage, ...]

    @classmethod
    def of(cls, *parts: Sequence[int] | ImageInput) -> "Prompt":
        ids: list[int] = []
        images: list[PlacedImage] = []
        for part in parts:
            if isinstance(part, ImageInput):
                images.append(PlacedImage(len(ids), part))
                ids += part.token_ids
            else:
                ids += part
        return cls(tuple(ids), tuple(images))


def plain_logits(model: Any, prompt: Prompt, output: Sequence[int], family: Family) -> mx.array:
    """Return mlx-vlm's logits of a prompt and an output that is given, `[L, vocab_size]`, token by token behind the prompt."""
    ids = mx.array([prompt.token_ids])
    images = [placed.image.arrays for placed in prompt.images]
    inputs = {
        arrays[0].name: mx.array(np.concatenate([_values(array) for array in arrays], family.axis))
        for arrays in zip(*images, strict=True)
    }
    found = model.get_input_embeddings(
        ids, mask=mx.ones_like(ids), **{"pixel_values": None, **inputs}
    )
    text = model.language_model
    cache = text.make_cache() if hasattr(text, "make_cache") else _caches(model)
    others = {k: v for k, v in found.to_dict().items() if v is not None and k != "inputs_embeds"}
    with _masks_of(prompt, family.config["model_type"], family.seeing_ahead):
        logits = [text(ids, inputs_embeds=found.inputs_embeds, cache=cache, **others).logits]
    deltas = {} if found.rope_deltas is None else {"rope_deltas": found.rope_deltas}
    logits += [text(mx.array([[token]]), cache=cache, **deltas).logits for token in output]
    return mx.concatenate(logits, axis=1)[0]


@contextmanager
def _masks_of(prompt: Prompt, model_type: str, seeing: SeeingAhead | None) -> Iterator[None]:
    """Let rows of images see each other as transformers writes it, which mlx-vlm's files do not."""
    if seeing is None:
        yield
        return
    language: Any = import_module(f"mlx_vlm.models.{model_type}.language")
    causal = language.create_attention_mask
    at = np.arange(len(prompt.token_ids))
    groups = np.full(len(at), -1)
    for i, (start, stop) in enumerate(span for placed in prompt.images for span in placed.spans):
        groups[start:stop] = i
    same = (groups[:, None] == groups) & (groups >= 0)

    def mask(h: mx.array, cache: Any, window_size: int | None = None, **others: Any) -> Any:
        if window_size is None and seeing.only_windowed:
            return causal(h, cache, window_size=window_size, **others)
        seen = (at <= at[:, None]) | same
        if window_size is not None:
            seen &= at > at[:, None] - window_size
        return mx.array(seen)

    language.create_attention_mask = mask
    try:
        yield
    finally:
        language.create_attention_mask = causal


def _values(array: TowerArray) -> Any:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


def _caches(model: Any) -> list[Any]:
    from mlx_vlm.models.cache import KVCache

    return [KVCache() for _ in model.layers]  # type: ignore[no-untyped-call]
