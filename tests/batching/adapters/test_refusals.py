"""What is not served, or damaged, is refused in one line that names it."""

import gc
import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from batching.adapters.files.adapter_file import AdapterFile
from batching.errors import AdapterError, RequestError
from tests.support.adapter_files import (
    PEFT_CONFIG,
    Q_PROJ,
    mlx_lm_tensors,
    peft_tensors,
    random_layers,
    safetensors,
    with_header,
    write_mlx_lm,
    write_peft,
)
from tests.support.rows import rows

LAYERS: Final = random_layers()
PEFT: Final = peft_tensors(LAYERS)
MLX_LM: Final = mlx_lm_tensors(LAYERS)
CONFIG: Final = "adapter_config.json"
OF_PEFT: Final = "adapter_model.safetensors"
OF_MLX_LM: Final = "adapters.safetensors"
BASE: Final = "base_model.model."
LAYER: Final = "model.layers.0.mlp.up_proj"
ONES: Final = np.ones((2, 2), np.float32)


def refusal(folder: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        AdapterFile(folder, "style")
    assert isinstance(caught.value, RequestError)
    start = f"cannot load the adapter {folder}: "
    assert str(caught.value).startswith(start)
    return str(caught.value).removeprefix(start)


def num_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


@rows(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora: DoRA is not served"),
        ({"lora_bias": True}, "lora_bias: biases are not served"),
        ({"bias": "all"}, "bias 'all': biases are not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: modules_to_save are not served"),
        ({"target_parameters": ["mlp.experts.up"]}, "target_parameters: adapters of experts are not served"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices: adapters of embeddings are not served"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: layers that are replicated are not served"),
        ({"use_qalora": True}, "use_qalora: QA-LoRA is not served"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens: activated LoRA is not served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa': adapters for a base that was changed are not served"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'; only LORA is served"),
        ({"peft_type": ["LORA"]}, "peft_type ['LORA']; only LORA is served"),
        ({"r": 0}, "r 0, which is not a rank"),
        ({"r": True}, "r True, which is not a rank"),
        ({"r": "2"}, "r '2', which is not a rank"),
        ({"lora_alpha": None}, "lora_alpha None, which is not a number that can be used"),
        ({"lora_alpha": math.nan}, "lora_alpha nan, which is not a number that can be used"),
        ({"lora_alpha": 10**400}, f"lora_alpha {10**400!r:.50}, which is not a number that can be used"),
        ({"rank_pattern": [2]}, "rank_pattern [2], which is not an object"),
        ({"rank_pattern": {"q_proj": -1}}, "q_proj -1, which is not a rank"),
        ({"alpha_pattern": {"q_proj": "8"}}, "q_proj '8', which is not a number that can be used"),
        ({"alpha_pattern": {"(q": 8}}, "the pattern '(q', which is no regular expression"),
        ({"alpha_pattern": {"(a|a)*b": 8}}, "the pattern '(a|a)*b', which is too long or has too many choices"),
        ({"alpha_pattern": {".*.*.*": 8}}, "the pattern '.*.*.*', which is too long or has too many choices"),
        ({"alpha_pattern": {"q{9999999999999}": 8}}, "the pattern 'q{9999999999999}', which is no regular expression"),
        ({"alpha_pattern": {str(i): 8 for i in range(1001)}}, "1001 patterns; the limit is 1000"),
        ({"alpha_pattern": {f"{i}.*": 8 for i in range(33)}}, "33 patterns with choices; the limit is 32"),
    ],
)  # fmt: skip
def test_configs_of_peft(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, PEFT, **config)
    assert refusal(folder) == f"{CONFIG} has {reason}"


@rows(
    ("config", "reason"),
    [
        ({"fine_tune_type": "dora"}, "fine_tune_type dora: DoRA is not served"),
        ({"fine_tune_type": "full"}, "fine_tune_type full: full fine-tunes are not served as adapters"),
        ({"fine_tune_type": 5}, "fine_tune_type 5; only lora is served"),
        ({"lora_parameters": 5}, "lora_parameters 5, which is not an object"),
        ({"lora_parameters": {"rank": 8, "alpha": 16}}, "scale None, which is not a number that can be used"),
        ({"lora_parameters": {"scale": 1e30}}, "scale 1e+30, which is not a number that can be used"),
    ],
)  # fmt: skip
def test_configs_of_mlx_lm(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path, MLX_LM, **config)
    assert refusal(folder) == f"{CONFIG} has {reason}"


@rows(
    ("text", "reason"),
    [
        (b"", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b"{}", "has neither PEFT's peft_type nor mlx-lm's lora_parameters"),
        (b'{"r": 2, "r": 4}', "has the key 'r' twice"),
        (b" " * (2 << 20), "has 2097152 bytes; the limit is 1048576"),
    ],
)
def test_damaged_configs(text: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_bytes(text)
    assert refusal(tmp_path) == f"{CONFIG} {reason}"


@rows(
    ("name", "reason"),
    [
        (f"{BASE}{LAYER}.lora_magnitude_vector.weight", "DoRA is not served"),
        (f"{BASE}{LAYER}.lora_B.bias", "biases are not served"),
        (f"{BASE}{LAYER}.base_layer.bias", "biases are not served"),
        (f"{BASE}score.modules_to_save.weight", "modules_to_save are not served"),
        (f"{BASE}model.norm.weight", "full fine-tunes are not served"),
        (f"{BASE}model.embed_tokens.lora_embedding_A", "adapters of embeddings are not served"),
        (f"{BASE}model.embed_tokens.weight", "adapters of embeddings are not served"),
        (f"{BASE}shared.lora_embedding_B", "adapters of embeddings are not served"),
        (f"{BASE}lm_head.lora_A.weight", "adapters of the output head are not served"),
        (f"{BASE}model.layers.0.mlp.experts.3.up_proj.lora_A.weight", "adapters of experts are not served"),
        (f"{BASE}model.layers.0.mlp.experts.lora_A.weight", "adapters of experts are not served"),
    ],
)  # fmt: skip
def test_tensors_of_peft_that_are_not_served(name: str, reason: str, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, PEFT | {name: ONES})
    assert refusal(folder) == f"{OF_PEFT} has {name}: {reason}"


@rows(
    ("name", "reason"),
    [
        (f"{LAYER}.m", ": DoRA is not served"),
        ("model.embed_tokens.lora_a", ": adapters of embeddings are not served"),
        ("lm_head.lora_a", ": adapters of the output head are not served"),
        ("model.layers.0.mlp.switch_mlp.up_proj.lora_a", ": adapters of experts are not served"),
        (f"{LAYER}.weight", ": full fine-tunes are not served"),
        (f"{LAYER}.bias", ": biases are not served"),
        (f"{BASE}{LAYER}.lora_A.weight", ": full fine-tunes are not served"),
        ("alpha", ", which is not known"),
    ],
)
def test_tensors_of_mlx_lm_that_are_not_served(name: str, reason: str, tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path, MLX_LM | {name: ONES})
    assert refusal(folder) == f"{OF_MLX_LM} has {name}{reason}"


@rows(
    ("tensors", "reason"),
    [
        ({}, "has no tensors"),
        ({"x.lora_a": ONES}, "has A of x without B"),
        ({"x.lora_b": ONES}, "has B of x without A"),
        ({"x.lora_a": ONES, "x.lora_b": np.ones((3, 2))}, "has A of x with rank 2, and B with rank 3"),
        ({"x.lora_a": np.ones((2, 0)), "x.lora_b": np.ones((0, 2))}, "has x with 2 inputs, 2 outputs and rank 0"),
        ({"x.lora_a": np.ones((4, 2, 2)), "x.lora_b": ONES}, "has x.lora_a of shape [4, 2, 2], which is no matrix"),
        ({"x.lora_a": ONES, "x.lora_b": np.ones(2)}, "has x.lora_b of shape [2], which is no matrix"),
        ({"x.lora_a": ONES, "x.lora_b": ONES * np.nan}, "has numbers in x that are not finite"),
        ({"x.lora_a": ONES * -np.inf, "x.lora_b": ONES}, "has numbers in x that are not finite"),
        ({"x.lora_a": ONES, "x.lora_b": ONES * 3e38}, "has numbers in x that are not finite"),
        ({f"{'x' * 200}.lora_a": ONES}, "has a name of 207 characters; the limit is 200"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_go_together(
    tensors: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    assert refusal(write_mlx_lm(tmp_path, tensors)) == f"{OF_MLX_LM} {reason}"


@rows("dtype", ["F32", "F16", "BF16"])
def test_a_number_that_is_not_finite_is_found_wherever_it_is(dtype: str, tmp_path: Path) -> None:
    # Of several pieces that are read.
    a = np.ones((3 << 20, 1), np.float32)
    a[-1] = np.inf
    b = np.ones((1, 1), np.float32)
    folder = write_mlx_lm(tmp_path, {"x.lora_a": a, "x.lora_b": b}, dtype=dtype)
    assert refusal(folder) == f"{OF_MLX_LM} has numbers in x that are not finite"


def test_one_matrix_under_two_names(tmp_path: Path) -> None:
    tensors = PEFT | peft_tensors(LAYERS, ".default")
    assert refusal(write_peft(tmp_path, tensors)) == f"{OF_PEFT} has A of {Q_PROJ} twice"


def entry(start: Any, stop: Any, dtype: Any = "F32", shape: Any = (2, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def pair(a: dict[str, Any], b: dict[str, Any] | None = None, num_bytes: int = 16) -> bytes:
    header = {"x.lora_a": a, "x.lora_b": b or entry(8, 16, shape=(1, 2))}
    return with_header(header, bytes(num_bytes))


@rows(
    ("content", "reason"),
    [
        (b"", "is too short for a safetensors file"),
        ((10 << 30).to_bytes(8, "little") + b"{}", "has a header of 10737418240 bytes; the limit is 8388608"),
        (b"\xff" * 64, f"has a header of {2**64 - 1} bytes; the limit is 8388608"),
        ((8 << 20).to_bytes(8, "little") + b"{}", "is cut off within its header of 8388608 bytes"),
        (with_header(b"{"), "has a header that is not JSON"),
        (with_header([1]), "has a header that is not a JSON object"),
        (with_header(b"[" * 200_000), "has a header that is not JSON"),
        (with_header(b'{"x.lora_a": 1, "x.lora_a": 2}'), "has a header that has the key 'x.lora_a' twice"),
        (with_header(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "has a header that has the key 'dtype' twice"),
        (with_header({"a": 1}), "has a without a dtype, a shape and offsets"),
        (pair(entry("0", 8)), "has x.lora_a without a dtype, a shape and offsets"),
        (pair(entry(0.0, 8)), "has x.lora_a without a dtype, a shape and offsets"),
        (pair(entry(-8, 0)), "has x.lora_a without a dtype, a shape and offsets"),
        (pair(entry(0, 8, shape=[-2, -1])), "has x.lora_a without a dtype, a shape and offsets"),
        (pair(entry(0, 8, shape=[True, 2])), "has x.lora_a without a dtype, a shape and offsets"),
        (pair(entry(0, 8, dtype=4)), "has x.lora_a without a dtype, a shape and offsets"),
        (pair(entry(8, 0)), "has x.lora_a outside of its 16 bytes of data"),
        (pair(entry(0, 2**70)), "has x.lora_a outside of its 16 bytes of data"),
        (pair(entry(0, 8), num_bytes=12), "has x.lora_b outside of its 12 bytes of data"),
        (pair(entry(0, 8, dtype="F64")), "has x.lora_a in F64; only F32, F16, BF16 are read"),
        (pair(entry(0, 8, dtype="I32")), "has x.lora_a in I32; only F32, F16, BF16 are read"),
        (pair(entry(0, 8, dtype="F16")), "has x.lora_a in 8 bytes, which are not those of its shape"),
        (pair(entry(0, 8, shape=[2**62, 1])), "has x.lora_a in 8 bytes, which are not those of its shape"),
        (pair(entry(0, 8), entry(0, 8, shape=(1, 2)), 8), "has x.lora_b not right behind the tensor before"),
        (pair(entry(0, 8), entry(4, 12, shape=(1, 2)), 12), "has x.lora_b not right behind the tensor before"),
        (pair(entry(0, 8), entry(12, 20, shape=(1, 2)), 20), "has x.lora_b not right behind the tensor before"),
        (pair(entry(0, 8), num_bytes=20), "has bytes behind its last tensor"),
    ],
)  # fmt: skip
def test_hostile_weights(content: bytes, reason: str, tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path, {})
    (folder / OF_MLX_LM).write_bytes(content)
    # Files that other tests have left open may be closed at any time.
    gc.collect()
    before = num_descriptors()
    tracemalloc.start()
    try:
        assert refusal(folder) == f"{OF_MLX_LM} {reason}"
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert num_descriptors() <= before


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path, MLX_LM)
    os.truncate(folder / OF_MLX_LM, 1 << 40)
    assert refusal(folder) == f"{OF_MLX_LM} has {1 << 40} bytes; the limit is {16 << 30}"


@rows("name", ["adapter_model.bin", "adapter_model.pt", "adapters.npz"])
def test_other_formats(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    (tmp_path / CONFIG).write_text(json.dumps(PEFT_CONFIG))
    assert refusal(tmp_path) == f"it has {name}, and only safetensors are read"
    (tmp_path / name).unlink()


def test_what_is_not_there(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == "there is no such folder"
    assert refusal(tmp_path) == f"there is no {CONFIG}"
    (tmp_path / CONFIG).write_text(json.dumps(PEFT_CONFIG))
    assert refusal(tmp_path) == f"there is no {OF_PEFT}"
    (tmp_path / OF_PEFT).mkdir()
    assert refusal(tmp_path) == f"{OF_PEFT} is not a file"
    (tmp_path / OF_PEFT).rmdir()
    os.mkfifo(tmp_path / OF_PEFT)
    assert refusal(tmp_path) == f"{OF_PEFT} is not a file"


def test_links_that_lead_out_of_the_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(safetensors(PEFT))
    folder = write_peft(tmp_path / "adapter", PEFT)
    for name, target in ((OF_PEFT, secret), (CONFIG, Path("../secret"))):
        (folder / name).unlink()
        (folder / name).symlink_to(target)
        assert refusal(folder) == f"{name} leads out of its folder"


def test_a_link_to_the_folder_itself(tmp_path: Path) -> None:
    (write_peft(tmp_path, PEFT) / OF_PEFT).unlink()
    (tmp_path / OF_PEFT).symlink_to(".")
    assert refusal(tmp_path) == f"{OF_PEFT} is not a file"


def test_links_within_the_folder_and_to_it(tmp_path: Path) -> None:
    folder = write_peft(tmp_path / "adapter", PEFT)
    (folder / "files").mkdir()
    (folder / OF_PEFT).rename(folder / "files/weights")
    (folder / OF_PEFT).symlink_to("files/weights")
    (tmp_path / "link").symlink_to(folder)
    assert len(AdapterFile(tmp_path / "link", "style").layers) == 2


def test_a_snapshot_of_the_hub_links_to_its_repository(tmp_path: Path) -> None:
    repository = tmp_path / "models--example--style"
    snapshot = write_peft(repository / "snapshots/0123", PEFT)
    (repository / "blobs").mkdir()
    for name, blob in ((OF_PEFT, "weights"), (CONFIG, "config")):
        (snapshot / name).rename(repository / "blobs" / blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    assert len(AdapterFile(snapshot, "style").layers) == 2
    (tmp_path / "other").write_bytes((repository / "blobs/weights").read_bytes())
    (snapshot / OF_PEFT).unlink()
    (snapshot / OF_PEFT).symlink_to("../../../other")
    assert refusal(snapshot) == f"{OF_PEFT} leads out of its folder"


def test_foreign_text_stays_one_short_line(tmp_path: Path) -> None:
    folder = write_mlx_lm(tmp_path / "a\nb", {"a\n\x1b[31mb": ONES})
    with pytest.raises(AdapterError) as caught:
        AdapterFile(folder, "style")
    assert str(caught.value).isprintable()
    assert str(caught.value).endswith("a b: adapters.safetensors has a ?[31mb, which is not known")
