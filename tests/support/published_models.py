"""Folders of vision models as they are published, in small: the files of their processors and of their tokenizers.

What is here are facts of configs on the Hugging Face hub: names of classes, of fields and of tokens.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import CONFIG_MAPPING, AutoConfig

from tests.support.byte_tokenizers import byte_vocabulary
from tests.support.vision_models import FAMILIES, Config, write_vision_model

# As its authors publish it; as mlx-vlm saves a conversion; as transformers 5 saves a model that was trained further.
Spelling = Literal["original", "mlx-vlm", "transformers"]
SPELLINGS: Final[tuple[Spelling, ...]] = ("original", "mlx-vlm", "transformers")

_HALF: Final = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CLIP: Final = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SCALED: Final = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "rescale_factor": 1 / 255,
}
# What transformers' faster processors save beside what is set.
_NULLS: Final[Config] = dict.fromkeys(
    ("crop_size", "device", "do_center_crop", "input_data_format", "pad_size", "return_tensors")
)

Shapes = Mapping[str, Any]


@dataclass(frozen=True)
class Published:
    """A model as it is published.

    family: whose tiny model has the sizes that the config does not set.
    config: what differs from that, by part; None where the published one has no such field.
    special: its special tokens, behind those of bytes.
    begins: those that its tokenizer puts before a prompt.
    files: what its processor reads, by the names of files.
    text: what its chat template writes for an image.
    layout: what the tokens of an image read as, with `*` for rows side by side.
    num_rows: how many rows the tower makes of the processor's arrays.
    """

    family: str
    config: Config
    special: Sequence[str]
    image_token: str
    tokenizer: Config
    files: Mapping[str, Config]
    text: str
    layout: str
    num_rows: Callable[[Shapes], int]
    begins: str = ""
    vocabulary: Literal["bytes", "pieces", "pieces after a space"] = "bytes"

    def write(self, folder: Path, spelling: Spelling, save: Callable[[Path], None]) -> Config:
        """Write the folder of a model with random weights; return its config.

        save: saves the processor of a folder in its place, as mlx-vlm does.
        """
        backend = self._backend()
        size = {"vocab_size": backend.get_vocab_size()}
        changes = {**size, "text_config": size, **self._with_ids(self.config, backend)}
        config = _merged(FAMILIES[self.family].config, changes)
        write_vision_model(config, folder)
        backend.save(str(folder / "tokenizer.json"))
        _write(folder / "tokenizer_config.json", {"model_max_length": 4096, **self.tokenizer})
        (folder / "preprocessor_config.json").unlink()
        for name, content in self.files.items():
            content = _NULLS | content if spelling == "transformers" else content
            _write(folder / f"{name}.json", content)
        if spelling == "mlx-vlm":
            save(folder)
            (folder / "preprocessor_config.json").unlink(missing_ok=True)
        if spelling == "transformers" and config["model_type"] in CONFIG_MAPPING:
            AutoConfig.from_pretrained(folder).save_pretrained(folder)
        written: Config = json.loads((folder / "config.json").read_text())
        return written

    def _backend(self) -> Tokenizer:
        kinds = {"bytes": byte_vocabulary, "pieces": _pieces, "pieces after a space": _spaced}
        backend = kinds[self.vocabulary](self.special)
        if self.begins:
            ids = [(self.begins, backend.token_to_id(self.begins))]
            backend.post_processor = TemplateProcessing(f"{self.begins} $A", None, ids)
        return backend

    def _with_ids(self, config: Config, backend: Tokenizer) -> Config:
        """Return a config with the ids of tokens in place of their texts."""
        return {
            name: backend.token_to_id(value) if value in self.special else value
            for name, value in config.items()
        }


def _pieces(special: Sequence[str]) -> Tokenizer:
    """Return a vocabulary like SentencePiece's, where two newlines are a token."""
    texts = [*special, *(f"<0x{i:02X}>" for i in range(256)), "▁", "\n", "\n\n"]
    vocabulary = {text: i for i, text in enumerate(texts)}
    backend = Tokenizer(
        models.BPE(vocabulary, [("\n", "\n")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return backend


def _spaced(special: Sequence[str]) -> Tokenizer:
    """Return one that puts a space where a text begins, as Llama's."""
    backend = _pieces(special)
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return backend


def _write(file: Path, content: Config) -> None:
    file.write_text(json.dumps(content, indent=2))


def _merged(config: Config, changes: Config) -> Config:
    """Return a config with changes in its parts; None removes a field."""
    parts = {k: _merged(config[k], v) for k, v in changes.items() if isinstance(v, dict)}
    merged = config | changes | parts
    return {k: v for k, v in merged.items() if v is not None or k not in changes}


def _of_grid(arrays: Shapes) -> int:
    return int(arrays["image_grid_thw"].prod()) // 4


def _of_pixels(side: int) -> Callable[[Shapes], int]:
    """Return what counts the rows of pixels `[.., height, width]`, each of which is a square."""
    return lambda arrays: math.prod(arrays["pixel_values"].shape[-2:]) // side**2


def _of_tiles(arrays: Shapes) -> int:
    return 16 * int(arrays["pixel_values"].shape[1])


def _of_shapes(arrays: Shapes) -> int:
    return sum(-(-int(h) // 2) * -(-int(w) // 2) for h, w in arrays["spatial_shapes"])


def _named(tokens: Mapping[str, str]) -> Config:
    """Return a tokenizer's names of tokens, at both of their places."""
    return {**tokens, "extra_special_tokens": dict(tokens)}


_QWEN_SPECIAL: Final = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]


def _qwen(family: str, processor: str, **config: Any) -> Published:
    patch = 14 if family.startswith("qwen2") else 16
    factor = (2 * patch) ** 2
    size = {"shortest_edge": 4 * factor, "longest_edge": 64 * factor}
    is_old = patch == 14
    files = {
        **({"min_pixels": 4 * factor, "max_pixels": 64 * factor} if is_old else {"size": size}),
        **(_CLIP if is_old else _HALF),
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_processor_type": f"Qwen2VLImageProcessor{'' if is_old else 'Fast'}",
        "processor_class": processor,
    }
    return Published(
        family,
        {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
            **config,
        },
        _QWEN_SPECIAL,
        "<|image_pad|>",
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"preprocessor_config": files},
        "<|vision_start|><|image_pad|><|vision_end|>",
        r"<\|vision_start\|>\*<\|vision_end\|>",
        _of_grid,
    )


def _glm(family: str, number: str) -> Published:
    files = {
        "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 64},
        "do_rescale": True,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **_CLIP,
        "image_processor_type": f"Glm{number}ImageProcessor",
        "processor_class": f"Glm{number}Processor",
    }
    special = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|begin_of_image|>"]
    special += ["<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"]
    return Published(
        family,
        {
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "vision_start_token_id": None,
            "vision_end_token_id": None,
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
        },
        [*special, "<|image|>", "<|video|>"],
        "<|image|>",
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"preprocessor_config": files},
        "<|begin_of_image|><|image|><|end_of_image|>",
        r"<\|begin_of_image\|>\*<\|end_of_image\|>",
        _of_grid,
        begins="[gMASK]",
    )


_AROUND: Final = "<fake_token_around_image>"


def _idefics(family: str, kind: str, tokenizer: Config) -> Published:
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    return Published(
        family,
        {
            "image_token_id": "<image>",
            "video_token_id": None,
            "vision_start_token_id": None,
            "vision_end_token_id": None,
            "vision_config": {"model_type": f"{family}_vision"},
        },
        ["<|endoftext|>", "<end_of_utterance>", "<global-img>", *places, _AROUND, "<image>"],
        "<image>",
        {"tokenizer_class": "GPT2Tokenizer", **tokenizer},
        {
            "preprocessor_config": {
                **_SCALED,
                **_HALF,
                "do_image_splitting": True,
                "do_pad": True,
                "image_processor_type": f"{kind}ImageProcessor",
                "max_image_size": {"longest_edge": 112},
                "processor_class": f"{kind}Processor",
                "resample": 1,
                "size": {"longest_edge": 336},
            },
            "processor_config": {"image_seq_len": 16, "processor_class": f"{kind}Processor"},
        },
        "<image>",
        rf"((({_AROUND}<row_\d_col_\d>\*)+\n)+\n)?{_AROUND}<global-img>\*{_AROUND}",
        _of_tiles,
    )


_LFM_TOKENS: Final = {
    "image_token": "<image>",
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail": "<|img_thumbnail|>",
}


def _lfm(**config: Any) -> Published:
    places = [f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)]
    return Published(
        "lfm2_vl",
        {
            "video_token_id": None,
            "vision_start_token_id": None,
            "vision_end_token_id": None,
            **config,
        },
        ["<|pad|>", "<|startoftext|>", "<|im_end|>", *_LFM_TOKENS.values(), *places],
        "<image>",
        {"tokenizer_class": "PreTrainedTokenizerFast", **_named(_LFM_TOKENS)},
        {
            "preprocessor_config": {
                **_SCALED,
                **_HALF,
                "do_image_splitting": True,
                "do_pad": True,
                # The class resizes all the same.
                "do_resize": False,
                "downsample_factor": 2,
                "encoder_patch_size": 16,
                "image_processor_type": "Lfm2VlImageProcessorFast",
                "max_image_tokens": 16,
                "max_num_patches": 64,
                "max_pixels_tolerance": 2.0,
                "max_tiles": 4,
                "min_image_tokens": 4,
                "min_tiles": 2,
                "processor_class": "Lfm2VlProcessor",
                "resample": 3,
                "return_row_col_info": True,
                "size": {"height": 128, "width": 128},
                "tile_size": 128,
                "use_thumbnail": True,
            },
            "processor_config": {
                "processor_class": "Lfm2VlProcessor",
                "use_image_special_tokens": True,
            },
        },
        "<image>",
        r"<\|image_start\|>(\*|(<\|img_row_\d_col_\d\|>\*)+<\|img_thumbnail\|>\*)<\|image_end\|>",
        _of_shapes,
        begins="<|startoftext|>",
    )


_GEMMA3_TOKENS: Final = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_GEMMA3: Final = Published(
    "gemma3",
    {
        "image_token_id": None,
        "video_token_id": None,
        "vision_start_token_id": None,
        "vision_end_token_id": None,
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
        "image_token_index": "<image_soft_token>",
        "pad_token_id": "<pad>",
    },
    ["<pad>", "<eos>", "<bos>", "<unk>", *_GEMMA3_TOKENS.values()],
    "<image_soft_token>",
    {"tokenizer_class": "GemmaTokenizer", **_named(_GEMMA3_TOKENS)},
    {
        "preprocessor_config": {
            **_SCALED,
            **_HALF,
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 16,
            "pan_and_scan_max_num_crops": None,
            "pan_and_scan_min_crop_size": None,
            "pan_and_scan_min_ratio_to_activate": None,
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "size": {"height": 56, "width": 56},
        },
        "processor_config": {"image_seq_length": 16, "processor_class": "Gemma3Processor"},
    },
    "<start_of_image>",
    r"\n\n<start_of_image>\*<end_of_image>\n\n",
    _of_pixels(14),
    begins="<bos>",
    vocabulary="pieces",
)

_GEMMA4_TOKENS: Final = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
_GEMMA4: Final = Published(
    "gemma4",
    {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "audio_token_id": "<|audio|>",
        "vision_start_token_id": None,
        "vision_end_token_id": None,
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
    },
    ["<pad>", "<eos>", "<bos>", "<unk>", *_GEMMA4_TOKENS.values(), "<|video|>"],
    "<|image|>",
    {
        "tokenizer_class": "GemmaTokenizer",
        **_GEMMA4_TOKENS,
        "extra_special_tokens": ["<|video|>"],
    },
    {
        "processor_config": {
            "audio_ms_per_token": 40,
            "audio_seq_length": 750,
            "image_processor": {
                **_SCALED,
                "do_normalize": False,
                "image_mean": [0.0] * 3,
                "image_std": [1.0] * 3,
                "image_processor_type": "Gemma4ImageProcessor",
                "image_seq_length": 16,
                "max_soft_tokens": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "resample": 3,
            },
            "image_seq_length": 16,
            "processor_class": "Gemma4Processor",
            "video_processor": {
                "max_soft_tokens": 70,
                "num_frames": 32,
                "video_processor_type": "Gemma4VideoProcessor",
            },
        }
    },
    "<|image|>",
    r"<\|image>\*<image\|>",
    _of_pixels(8),
    begins="<bos>",
    vocabulary="pieces",
)

_LLAVA: Final = Published(
    "llava",
    {
        "image_token_id": None,
        "video_token_id": None,
        "vision_start_token_id": None,
        "vision_end_token_id": None,
        "image_token_index": "<image>",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    ["<unk>", "<s>", "</s>", "<image>", "<pad>"],
    "<image>",
    {"tokenizer_class": "LlamaTokenizer", **_named({"image_token": "<image>"})},
    {
        "preprocessor_config": {
            **_SCALED,
            **_CLIP,
            "crop_size": {"height": 56, "width": 56},
            "do_center_crop": True,
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "resample": 3,
            "size": {"shortest_edge": 56},
        },
        "processor_config": {
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "patch_size": 14,
            "processor_class": "LlavaProcessor",
            "vision_feature_select_strategy": "default",
        },
    },
    "<image>\n",
    r"\*\n",
    _of_pixels(14),
    begins="<s>",
    vocabulary="pieces after a space",
)

_MISTRAL_TOKENS: Final = {
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
_MISTRAL: Final = Published(
    "mistral3",
    {
        "image_token_id": None,
        "video_token_id": None,
        "vision_start_token_id": None,
        "vision_end_token_id": None,
        "image_token_index": "[IMG]",
        "vision_feature_layer": -1,
    },
    ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *_MISTRAL_TOKENS.values()],
    "[IMG]",
    {"tokenizer_class": "LlamaTokenizerFast", **_named(_MISTRAL_TOKENS)},
    {
        "preprocessor_config": {
            **_SCALED,
            **_CLIP,
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": {"height": 14, "width": 14},
            "processor_class": "PixtralProcessor",
            "resample": 3,
            "size": {"longest_edge": 112},
        },
        "processor_config": {
            **_MISTRAL_TOKENS,
            "patch_size": 14,
            "processor_class": "PixtralProcessor",
            "spatial_merge_size": 2,
        },
    },
    "[IMG]",
    r"(\*\[IMG_BREAK\])*\*\[IMG_END\]",
    _of_pixels(28),
    begins="<s>",
)

_SMOL_TOKENS: Final = {
    "image_token": "<image>",
    "fake_image_token": _AROUND,
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}
PUBLISHED: Final[Mapping[str, Published]] = {
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "glm4v": _glm("glm4v", "4v"),
    "glm4v_moe": _glm("glm4v_moe", "46V"),
    "idefics3": _idefics("idefics3", "Idefics3", {}),
    "lfm2_vl": _lfm(
        image_token_id="<image>",
        image_token_index=None,
        vision_config={"model_type": "siglip2_vision_model"},
    ),
    # Some conversions for MLX.
    "lfm2-vl": _lfm(
        model_type="lfm2-vl",
        image_token_id=None,
        image_token_index="<image>",
        vision_config={"model_type": "lfm2_vl"},
    ),
    "llava": _LLAVA,
    "mistral3": _MISTRAL,
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VLProcessor"),
    "qwen3_5": _qwen("qwen3_5", "Qwen3VLProcessor"),
    "qwen3_5_moe": _qwen("qwen3_5_moe", "Qwen3VLProcessor"),
    "qwen3_vl": _qwen("qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", "Qwen3VLProcessor"),
    "smolvlm": _idefics("smolvlm", "SmolVLM", _named(_SMOL_TOKENS)),
}
