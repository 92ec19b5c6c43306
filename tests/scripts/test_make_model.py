import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from batching.backend.gguf.file.quantizations import Weight, read_weight
from batching.backend.loader import LoadedModel, load_model
from batching.model_files.gguf_formats import Format
from batching.model_files.gguf_header import read_header
from scripts.make_model.__main__ import layers_that_fit, main
from scripts.make_model.shapes import SHAPES, Shape
from scripts.make_model.weights import KINDS, QUANTIZATIONS, matrix, mlx_parts
from scripts.make_model.write import size_of, write_directory, write_gguf
from tests.support.tiny_shapes import VOCAB_SIZE, tiny_shape
from tests.support.weekly import weekly

_PROMPT = "A fox"


def _written(shape: Shape, path: Path) -> LoadedModel:
    (write_gguf if path.suffix == ".gguf" else write_directory)(shape, path)
    return load_model(str(path), dtype=None)


def _logits(loaded: LoadedModel) -> mx.array:
    token_ids = loaded.tokenizer.encode(_PROMPT)
    logits: mx.array = loaded.model(mx.array([token_ids]))
    return logits[0].astype(mx.float32)


def _assert_sound(loaded: LoadedModel) -> None:
    """Every position has a choice: its probabilities neither are all alike nor have one winner."""
    logits = _logits(loaded)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    entropy = np.array(-(mx.exp(logprobs) * logprobs).sum(-1))
    assert loaded.vocab_size == VOCAB_SIZE
    assert np.isfinite(entropy).all()
    assert entropy.min() > 1 and entropy.max() < math.log(VOCAB_SIZE) - 0.5


FORMS: Final = ("model.gguf", "model")


@pytest.mark.parametrize(("name", "form"), weekly(product(SHAPES, FORMS), 2))
def test_each_shape_is_loaded_and_has_sound_logits(name: str, form: str, tmp_path: Path) -> None:
    loaded = _written(tiny_shape(name), tmp_path / form)
    _assert_sound(loaded)
    assert loaded.model_type == SHAPES[name].form.model_type


@pytest.mark.parametrize(
    ("quantization", "form"),
    weekly(product(sorted({*QUANTIZATIONS} - {SHAPES["qwen3-1.7b"].quantization}), FORMS), 1),
)
def test_each_quantization_is_loaded(quantization: str, form: str, tmp_path: Path) -> None:
    _assert_sound(_written(tiny_shape("qwen3-1.7b", quantization), tmp_path / form))


@pytest.mark.slow
def test_a_mix_of_k_types_has_more_bits_where_they_count(tmp_path: Path) -> None:
    tiny = tiny_shape("qwen3-1.7b", "q4_k_m")
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    shape = replace(tiny, config=tiny.config | sizes).with_layers(8)
    _assert_sound(_written(shape, path := tmp_path / "model.gguf"))
    header = read_header(path)
    types = {name: tensor.type_name for name, tensor in header.tensors.items()}
    assert sum(t.num_bytes for t in header.tensors.values()) == size_of(shape)
    assert types["token_embd.weight"] == "Q6_K"
    assert {types[f"blk.{layer}.ffn_up.weight"] for layer in range(8)} == {"Q4_K"}
    for name in ("attn_v", "ffn_down"):
        more = [layer for layer in range(8) if types[f"blk.{layer}.{name}.weight"] == "Q6_K"]
        assert more == [0, 3, 6, 7]
    for name in ("blk.0.ffn_down.weight", "blk.0.ffn_up.weight"):
        weights = read_weight(header, name, mx.float32).dense()
        assert mx.std(weights).item() == pytest.approx(weights.shape[-1] ** -0.5, rel=0.05)
        assert mx.mean(weights).item() == pytest.approx(0, abs=0.003)


@pytest.mark.parametrize("form", weekly(FORMS, 1))
def test_experts_of_gpt_oss_stay_mxfp4(form: str, tmp_path: Path) -> None:
    model = _written(tiny_shape("gpt-oss-20b"), tmp_path / form).model
    experts = [m for m in model.modules() if isinstance(m, QuantizedSwitchLinear)]
    assert [(m.mode, m.bits, m.group_size) for m in experts] == [("mxfp4", 4, 32)] * 3 * 2


@pytest.mark.parametrize("quantization", KINDS)
def test_both_forms_hold_weights_of_the_deviation_that_inputs_need(
    quantization: str, tmp_path: Path
) -> None:
    write_gguf(tiny_shape("qwen3-1.7b", quantization), path := tmp_path / "model.gguf")
    ours = read_weight(read_header(path), "blk.0.ffn_up.weight", None).dense()
    pieces = matrix(quantization, "up_proj", ours.shape, np.random.default_rng(0))
    kind = KINDS[quantization]
    format_ = Format(kind.bits, mode=kind.mode)
    of_mlx = Weight(mlx_parts(quantization, ours.shape, pieces), format_).dense()
    for weights in (ours, of_mlx):
        assert mx.std(weights).item() == pytest.approx(1 / math.sqrt(128), rel=0.05)
        assert mx.mean(weights).item() == pytest.approx(0, abs=0.003)


@pytest.mark.slow
def test_llama_s_rope_scaling_is_the_same_in_both_forms(tmp_path: Path) -> None:
    tiny = tiny_shape("llama-3.2-3b")
    of_file, of_directory = (_written(tiny, tmp_path / name) for name in ("m.gguf", "m"))
    (ours,), (theirs,) = (
        [m._freqs for m in loaded.model.modules() if hasattr(m, "_freqs")]
        for loaded in (of_file, of_directory)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours[-1].item() > 500000


@pytest.mark.slow
def test_unused_tokens_have_texts(tmp_path: Path) -> None:
    for form in ("model.gguf", "model"):
        loaded = _written(tiny_shape("mixture"), tmp_path / form)
        assert loaded.tokenizer.decode([VOCAB_SIZE - 1]) == f"<unused{VOCAB_SIZE - 1}>"
        assert loaded.tokenizer.has_chat_template


def test_a_written_size_is_the_computed_one(tmp_path: Path) -> None:
    write_gguf(tiny := tiny_shape("qwen3.5-4b"), path := tmp_path / "model.gguf")
    assert sum(t.num_bytes for t in read_header(path).tensors.values()) == size_of(tiny)


def test_layers_are_as_many_as_two_fifths_of_the_memory_hold() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    count = layers_that_fit(shape, 16 << 30)
    assert size_of(shape.with_layers(count)) <= 0.4 * (16 << 30)
    assert size_of(shape.with_layers(count + 1)) > 0.4 * (16 << 30)
    assert layers_that_fit(shape, 1 << 40) == 48
    assert layers_that_fit(SHAPES["qwen3.5-4b"], 0) == 4


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["gpt-2", "{out}"], "invalid choice: 'gpt-2'"),
        (["mixture", "{out}", "--quantization", "q2"], "invalid choice: 'q2'"),
        (["mixture", "{out}", "--layers", "13"], "mixture has 1 to 12 layers, not 13"),
        (["mixture", "{out}", "--quantization", "q4_k_m"], "only GGUF files are q4_k_m"),
        (["qwen3.5-4b", "{out}", "--layers", "3"], "qwen3.5-4b has 4 to 32 layers, not 3"),
        (["mixture", "{exists}"], "exists"),
        (["mixture", "{exists}/a/b"], "there is no directory"),
    ],
)
def test_bad_input_gets_a_clear_error(
    words: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"out": tmp_path / "new", "exists": tmp_path}
    with pytest.raises(SystemExit, match="2"):
        main([word.format(**places) for word in words])
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
