"""What is computed of a model before it is loaded, compared with what it is once it is loaded."""

from contextlib import suppress
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from mlx_lm.utils import (
    DEFAULT_ALLOW_PATTERNS,
    MODEL_REMAPPING,
    quantize_model,
    save_config,
    save_model,
)
from transformers import PreTrainedTokenizerFast

from batching.backend import loader
from batching.backend.adapters.survey import survey
from batching.backend.gguf.architecture.known import ARCHITECTURES
from batching.backend.gguf.storage import num_bytes
from batching.backend.hooks.observe import Observation
from batching.backend.loader import load_model
from batching.errors import ModelLoadError
from batching.fit.caches import DEFAULTS, kept_of
from batching.fit.weights import Compute, num_adapted, weight_bytes
from batching.model_files.description import ModelDescription, describe
from batching.model_files.gguf_formats import KERNEL_FORMATS
from batching.model_files.gguf_header import read_header
from batching.model_files.model_types import OTHER_NAMES, SERVED
from batching.model_files.references import DENSE_WEIGHTS, HUB_FILES
from batching.model_files.tensor import StoredTensor
from scripts.generated_docs import ROOT
from scripts.make_model.tiny_configs import VOCAB_SIZE
from scripts.model_types import MODEL_TYPES_PAGE, rows_on
from tests.support.byte_tokenizers import byte_vocabulary
from tests.support.gguf_architectures import TINY
from tests.support.gguf_converter import (
    random_model as random_gguf_model,
    write_model as write_gguf_model,
)
from tests.support.gguf_models import blocks, load_gguf
from tests.support.gguf_writer import write_gguf
from tests.support.model_zoo import UNAVAILABLE, ZOO, make_tiny, tiny_config
from tests.support.rows import rows

_TOKENS: Final = [1 + index % (VOCAB_SIZE - 1) for index in range(40)]
# Types whose config is not read: what they keep is known once they are loaded.
UNKNOWN: Final = frozenset(
    [
        "afm7",
        "baichuan_m1",
        "bailing_hybrid",
        "bailing_moe_linear",
        "bailing_moe_v3",
        "dbrx",
        "deepseek_v41",
        "gear",
        "hunyuan",
        "iquestloopcoder",
        "longcat_flash_ngram",
        "minimax_m3_vl",
        "nanbeige",
        "nemotron-nas",
        "openelm",
        "phi3small",
        "plamo",
        "plamo2",
        "recurrent_gemma",
        "rwkv7",
        "step3p5",
    ]
)


@rows("name", sorted(set(ZOO) - set(UNAVAILABLE)))
def test_what_a_model_keeps_is_known_exactly_or_not_at_all(name: str) -> None:
    kept = kept_of({"model_type": name, **tiny_config(name)})
    assert (kept is None) == (name in UNKNOWN)
    if kept is None:
        return
    layout = Observation(make_tiny(name), _TOKENS).layout()
    assert kept.bytes_per_token(4) == layout.bytes_per_token
    assert kept.bytes_per_token(1, 4) == layout.with_dtype(mx.int8).bytes_per_token
    assert kept.window_bytes_per_token(4) == layout.window_bytes_per_token
    assert kept.window == layout.window
    assert kept.state_bytes == layout.state_bytes(len(_TOKENS))


@rows("name", sorted(TINY))
def test_a_gguf_file_tells_what_its_model_keeps(name: str, tmp_path: Path) -> None:
    model, config = random_gguf_model(TINY[name])
    path = write_gguf_model(tmp_path / f"{name}.gguf", TINY[name], model, config)
    described = describe(path)
    assert described.model_type == ARCHITECTURES[name].model_type == config["model_type"]
    kept = kept_of(described.config)
    layout = Observation(load_gguf(read_header(path), mx.float32)[0], _TOKENS).layout()
    assert kept is not None
    assert kept.bytes_per_token(4) == layout.bytes_per_token
    assert kept.window == layout.window
    assert kept.state_bytes == layout.state_bytes(len(_TOKENS))


@rows("name", KERNEL_FORMATS | {"F32": None, "F16": None, "BF16": None})
def test_weights_of_a_gguf_file_take_what_is_computed(name: str, tmp_path: Path) -> None:
    raw, _ = blocks(GGMLQuantizationType[name], (8, 256), 3)
    floats = np.ones((8, 256), np.float32)
    path = write_gguf(tmp_path / "t.gguf", {}, {"t.weight": raw, "norm.weight": floats})
    header, described = read_header(path), describe(path)
    for dtype, kind in (("auto", None), ("float16", mx.float16), ("float32", mx.float32)):
        stored = num_bytes(header, kind)
        assert weight_bytes(described, Compute.STORED, dtype) == stored
        kept = num_bytes(header, kind, has_kernels=True)
        assert weight_bytes(described, Compute.KERNELS, dtype) == kept
    assert weight_bytes(described, Compute.FLOATS) == num_bytes(header, mx.float32)


def write_zoo_model(path: Path, name: str, bits: int | None, mode: str) -> Path:
    """Write a tiny model as its publisher would: in bfloat16, or quantized by mlx-lm."""
    path.mkdir()
    config = {"model_type": name, **tiny_config(name)}
    model = make_tiny(name)
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        group_size = 16 if mode == "nvfp4" else 32
        model, config = quantize_model(model, config, group_size, bits, mode=mode)
    save_model(path, model)
    save_config(config, path / "config.json")
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=byte_vocabulary(()), eos_token="a").save_pretrained(path)
    return path


def loaded_bytes(path: Path, dtype: mx.Dtype | None, *, has_kernels: bool) -> int:
    """Return the bytes of a directory's weights, as the loader counts them before it checks the room."""
    counted: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "_check_room", lambda needed, *_: counted.append(needed))
        # transformers refuses some tiny configs, for their tokenizers.
        with suppress(ModelLoadError):
            load_model(str(path), dtype=dtype, has_kernels=has_kernels)
    return counted[0]


@rows(
    ("name", "bits", "mode"),
    [
        ("qwen3", None, "affine"),
        ("qwen3", 4, "affine"),
        ("qwen3", 6, "affine"),
        ("qwen3", 4, "mxfp4"),
        ("qwen3", 4, "nvfp4"),
        ("llama", 3, "affine"),
        ("qwen3_moe", 4, "affine"),
        ("qwen3_5", 4, "affine"),
        ("deepseek_v3", 4, "affine"),
        ("gemma3", 8, "affine"),
        ("lfm2", None, "affine"),
    ],
)
def test_weights_of_a_directory_take_what_is_computed(
    name: str, bits: int | None, mode: str, tmp_path: Path
) -> None:
    path = write_zoo_model(tmp_path / f"{name}-{bits}-{mode}", name, bits, mode)
    described = describe(path)
    for compute, kind, has_kernels in (
        (Compute.STORED, None, False),
        (Compute.KERNELS, None, True),
        (Compute.FLOATS, mx.float32, False),
    ):
        found = weight_bytes(described, compute)
        expected = loaded_bytes(path, kind, has_kernels=has_kernels)
        assert found == pytest.approx(expected, rel=0.02), compute


@rows(
    ("name", "bits"),
    [
        ("qwen3", None),
        ("qwen3", 4),
        ("qwen3_moe", 8),
        ("deepseek_v3", None),
        ("mamba2", None),
        ("dbrx", None),
    ],
)
def test_layers_that_take_adapters_are_known_by_their_sizes(
    name: str, bits: int | None, tmp_path: Path
) -> None:
    path = write_zoo_model(tmp_path / f"{name}-{bits}", name, bits, "affine")
    layers = survey(make_tiny(name)).layers.values()
    known = sum(each.inputs + each.outputs for each in layers)
    # Names do not say that DeepSeek's router is no linear layer.
    more = 2 * (128 + 4) if name == "deepseek_v3" else 0
    assert num_adapted(describe(path)) == known + more


def test_experts_of_a_file_each_are_not_among_them(tmp_path: Path) -> None:
    names = {"mlp.experts.0.up_proj": 0, "experts.1.w2": 0, "mlp.shared_expert.up_proj": 56}
    names |= {"self_attn.kv_b_proj": 0, "self_attn.q_proj": 56}
    for name, expected in names.items():
        tensor = StoredTensor(f"model.layers.3.{name}.weight", "BF16", (24, 32), 1536)
        assert num_adapted(ModelDescription(tmp_path, {}, (tensor,), 1536)) == expected
    head = StoredTensor("lm_head.weight", "BF16", (24, 32), 1536)
    assert num_adapted(ModelDescription(tmp_path, {}, (head,), 1536)) == 0


def test_the_files_of_the_hub_are_those_that_mlx_lm_reads() -> None:
    assert set(HUB_FILES) - {DENSE_WEIGHTS} == set(DEFAULT_ALLOW_PATTERNS)


@rows("name", DEFAULTS)
def test_the_defaults_are_those_of_mlx_lm(name: str) -> None:
    module = import_module(f"mlx_lm.models.{'gemma4_text' if name == 'gemma4' else name}")
    known = {field.name: field.default for field in fields(module.ModelArgs)}
    for key, value in DEFAULTS[name].items():
        # The rest is in functions.
        if isinstance(known.get(key), int) and name != "gemma3":
            assert known[key] == value, key


def test_the_types_are_those_of_mlx_lm_and_served_as_the_page_says() -> None:
    assert dict(OTHER_NAMES) == MODEL_REMAPPING
    page = (ROOT / MODEL_TYPES_PAGE).read_text(encoding="utf-8")
    assert dict(SERVED) == {
        name: line.split("|")[2].strip() for name, line in rows_on(page).items()
    }
