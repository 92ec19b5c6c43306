"""The model's folder: what a Qwen3-VL on the Hugging Face hub has, in small."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from batching.backend.vision.mlx_vlm_models import model_file
from batching.backend.vision.tower import whole_model
from tests.support.byte_tokenizers import alphabet
from tests.support.seeing.pictures import FACTOR
from tests.support.seeing.talks import vocabulary

FAMILY: Final = "qwen3_vl"
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
SPECIAL: Final = (PAD, START, END, VISION_START, VISION_END, IMAGE, VIDEO)
MERGE: Final = 2
_PATCH: Final = FACTOR // MERGE
_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PROCESSOR: Final[dict[str, Any]] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 80 * 80},
    "patch_size": _PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
_HIDDEN: Final = 96
_TEXT: Final = {
    "model_type": "qwen3_vl_text",
    "hidden_size": _HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_VISION: Final = {
    "model_type": FAMILY,
    "depth": 3,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": _PATCH,
    "temporal_patch_size": 2,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 64,
    "out_hidden_size": _HIDDEN,
    "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [0, 1],
}


def make_tokenizer() -> Any:
    """Return one with a token for each byte and each word that is said."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1 << 16, initial_alphabet=alphabet(), show_progress=False
    )
    backend.train_from_iterator(vocabulary(), trainer)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    tokenizer = make(tokenizer_object=backend, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def make_config(tokenizer: Any) -> dict[str, Any]:
    ids = dict(zip(SPECIAL, tokenizer.convert_tokens_to_ids(list(SPECIAL)), strict=True))
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": FAMILY,
        "image_token_id": ids[IMAGE],
        "video_token_id": ids[VIDEO],
        "vision_start_token_id": ids[VISION_START],
        "vision_end_token_id": ids[VISION_END],
        "tie_word_embeddings": False,
        "text_config": {
            **_TEXT,
            "vocab_size": len(tokenizer),
            "bos_token_id": ids[PAD],
            "eos_token_id": ids[END],
        },
        "vision_config": _VISION,
    }


def make_model(config: Mapping[str, Any]) -> Any:
    """Return mlx-vlm's model with random weights."""
    return whole_model(model_file(FAMILY), config)


def make_processor() -> Any:
    """Return the library's, as `preprocessor_config.json` sets it."""
    module: Any = model_file(f"{FAMILY}.processing_{FAMILY}")
    limits = _PROCESSOR["size"]
    options = {
        name: _PROCESSOR[name] for name in ("patch_size", "merge_size", "temporal_patch_size")
    }
    return module.Qwen3VLImageProcessor(
        min_pixels=limits["shortest_edge"], max_pixels=limits["longest_edge"], **options
    )


def hub_names(model: nn.Module) -> dict[str, mx.array]:
    """Return the weights by the names that they have on the hub, in PyTorch's order of axes."""
    parameters: Any = tree_flatten(model.parameters())
    weights = {}
    for name, weight in parameters:
        name = name.replace("language_model.model.", "model.language_model.", 1)
        name = name.replace("language_model.lm_head", "lm_head").replace(
            "vision_tower", "model.visual"
        )
        is_patches = name.endswith("patch_embed.proj.weight")
        weights[name] = weight.transpose(0, 4, 1, 2, 3) if is_patches else weight
    return weights


def write_folder(folder: Path, model: nn.Module, tokenizer: Any, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), hub_names(model), {"format": "pt"})
    tokenizer.save_pretrained(folder)
    end = config["text_config"]["eos_token_id"]
    generation = {"do_sample": False, "eos_token_id": end, "pad_token_id": tokenizer.pad_token_id}
    for name, content in (
        ("config", config),
        ("preprocessor_config", _PROCESSOR),
        ("generation_config", generation),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
