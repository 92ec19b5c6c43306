"""Describes a model by its files, before anything of it is loaded."""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from batching.errors import ModelLoadError, printable
from batching.model_files.context_length import declared_context
from batching.model_files.gguf_config import outline_config
from batching.model_files.gguf_header import read_header
from batching.model_files.safetensors_header import read_tensors
from batching.model_files.snapshot import CONFIG, WEIGHTS
from batching.model_files.tensor import StoredTensor
from batching.model_files.vision import declared_vision, expected_vision
from batching.model_info.vision import NoVision, VisionModel

# What reads images; it is loaded for the types whose images are served.
_TOWER: Final = re.compile(
    r"(^|\.)(vision_tower|vision_model|vision_encoder|visual|multi_modal_projector|mm_projector|"
    r"embed_vision|connector)\."
)
# Parts for sound, parts of a GGUF file, and layers that predict further tokens, are not loaded.
_NOT_LOADED: Final = re.compile(r"(^|\.)(audio_tower|embed_audio|mtp|v|mm)\.")
_ROPE: Final = re.compile(r"rotary_emb\.inv_freq$|^rope_(freqs|factors_(long|short))\.weight$")
_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|blk|h)\.(\d+)\.")
_FLOATS: Final = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_TORCH_TYPES: Final = {"float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2)}
_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class ModelDescription:
    """What the files of a model say.

    path: the file or directory; None if it is not on this machine.
    config: that of mlx-lm; of a GGUF file only sizes.
    tensors: those of the text model that are loaded.
    tower: those of the vision part, if it is loaded.
    size: bytes of the files.
    chat_template: None if it has none.
    file_type: the mixture of types that a GGUF file says it is.
    """

    path: Path | None
    config: dict[str, Any]
    tensors: tuple[StoredTensor, ...]
    size: int
    chat_template: str | None = None
    is_gguf: bool = False
    file_type: str | None = None
    tower: tuple[StoredTensor, ...] = ()

    @property
    def model_type(self) -> str | None:
        found = self.config.get("model_type")
        return str(found) if found is not None else None

    @property
    def text_type(self) -> str | None:
        """The type of the text part: mlx-lm reads a model by it that has a type which mlx-lm lacks."""
        found = _text_config(self.config).get("model_type")
        return str(found) if found is not None else None

    @property
    def vision(self) -> VisionModel | NoVision:
        """What a load is expected to find of the vision part."""
        return expected_vision(self.config, self.path or Path())

    @property
    def context(self) -> int | None:
        """The declared context in tokens."""
        return declared_context(self.config)

    @property
    def num_layers(self) -> int | None:
        count = {**self.config, **_text_config(self.config)}.get("num_hidden_layers")
        return count if isinstance(count, int) else None

    @property
    def has_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return "tools" in (self.chat_template or "")

    @cached_property
    def quantization(self) -> str:
        """How most of the weights are stored: `4-bit`, `Q4_K`, `bf16`."""
        if self.file_type is not None:
            return self.file_type
        declared = self.config.get("quantization") or self.config.get("quantization_config")
        if isinstance(declared, dict):
            return _declared(declared)
        sizes: Counter[str] = Counter()
        for tensor in self.tensors:
            sizes[tensor.type_name] += tensor.num_bytes
        most = max(sizes, key=sizes.__getitem__, default="")
        return _FLOATS.get(most, most)


def _declared(quantization: dict[str, Any]) -> str:
    """Return bits, and what else than groups with scale and bias they are."""
    bits, method = quantization.get("bits"), quantization.get("quant_method")
    mode = quantization.get("mode", "affine")
    if mode != "affine":
        return str(mode)
    return " ".join(str(part) for part in (f"{bits}-bit" if bits else None, method) if part)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, dict) else {}


def describe(path: Path) -> ModelDescription:
    """Describe a `.gguf` file, or a directory with a `config.json`.

    Raises:
        ModelLoadError: a file cannot be read or is damaged.
    """
    return _describe_directory(path) if path.is_dir() else _describe_file(path)


def _describe_file(path: Path) -> ModelDescription:
    header = read_header(path)
    config = outline_config(header)
    tensors = [
        StoredTensor(name, tensor.type_name, tensor.shape, tensor.num_bytes)
        for name, tensor in header.tensors.items()
    ]
    return ModelDescription(
        path,
        config,
        loaded_tensors(config, tensors),
        path.stat().st_size,
        header.text("tokenizer.chat_template"),
        is_gguf=True,
        file_type=header.file_type,
    )


def _describe_directory(path: Path) -> ModelDescription:
    config = read_config(path / CONFIG)
    files = sorted(path.glob(WEIGHTS))
    tensors = [tensor for file in files for tensor in read_tensors(file)]
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    has_tower = isinstance(declared_vision(config, path), VisionModel)
    return ModelDescription(
        path,
        config,
        loaded_tensors(config, tensors),
        size,
        _chat_template(path),
        tower=tuple(each for each in tensors if has_tower and _TOWER.search(each.name)),
    )


def outline(config: dict[str, Any], num_bytes: int, size: int) -> ModelDescription:
    """Describe a model of which only the config is here, and the bytes of its weights are known."""
    declared = config.get("quantization")
    tensors: tuple[StoredTensor, ...] = (_outlined_floats(config, num_bytes),)
    if isinstance(declared, dict) and isinstance(bits := declared.get("bits"), int):
        tensors = _outlined_groups(declared, bits, num_bytes)
    return ModelDescription(None, config, tensors, size)


def _outlined_floats(config: dict[str, Any], num_bytes: int) -> StoredTensor:
    flat = {**config, **_text_config(config)}
    if "quantization_config" in config:
        return StoredTensor("weights", "I32", (num_bytes // 4,), num_bytes)
    dtype = str(flat.get("torch_dtype") or flat.get("dtype") or "bfloat16")
    type_name, width = _TORCH_TYPES.get(dtype, ("BF16", 2))
    return StoredTensor("weights", type_name, (num_bytes // width,), num_bytes)


def _outlined_groups(
    declared: dict[str, Any], bits: int, num_bytes: int
) -> tuple[StoredTensor, ...]:
    """Divide bytes between weights, scales and biases."""
    size = declared.get("group_size")
    group = size if isinstance(size, int) and size > 0 else 64
    is_affine = declared.get("mode", "affine") == "affine"
    parameters = (2, 2) if is_affine else (1,)
    num_groups = num_bytes * 8 // (max(1, bits) * group + 8 * sum(parameters))
    weights = num_bytes - num_groups * sum(parameters)
    return (
        StoredTensor("all.weight", "U32", (weights // 4,), weights),
        *(
            StoredTensor(f"all.{name}", "BF16", (num_groups,), width * num_groups)
            for name, width in zip(("scales", "biases"), parameters, strict=False)
        ),
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return the contents of a `config.json`.

    Raises:
        ModelLoadError: it cannot be read, or is none.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise ModelLoadError(f"cannot read {path}: {printable(str(reason))}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"cannot read {path}: it is no config of a model")
    return config


def loaded_tensors(config: dict[str, Any], tensors: list[StoredTensor]) -> tuple[StoredTensor, ...]:
    """Leave out what mlx-lm does not load: other senses, and layers beyond the model's own."""
    flat = {**config, **_text_config(config)}
    count = flat.get("num_hidden_layers")

    def is_loaded(name: str) -> bool:
        if _TOWER.search(name) or _NOT_LOADED.search(name) or _ROPE.search(name):
            return False
        layer = _LAYER.search(name)
        return layer is None or not isinstance(count, int) or int(layer[1]) < count

    return tuple(tensor for tensor in tensors if is_loaded(tensor.name))


def _chat_template(path: Path) -> str | None:
    """Return the text of whatever file has a template."""
    for name in _TEMPLATES:
        if (path / name).is_file():
            return _text(path / name)
    try:
        template = json.loads(_text(path / "tokenizer_config.json"))["chat_template"]
    except (ValueError, LookupError, TypeError):
        return None
    return template if isinstance(template, str) else json.dumps(template)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
