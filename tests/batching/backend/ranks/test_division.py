"""The parts of a model that ranks have: together they are all of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from batching.backend.loader import load_model
from batching.backend.ranks.division import divide
from batching.errors import ModelLoadError
from tests.support.arrays import parameters
from tests.support.gguf_models import BPE, metadata_of, random_model, tensors_of
from tests.support.gguf_writer import write_gguf
from tests.support.model_files import write_model
from tests.support.model_zoo import make_tiny


@dataclass(frozen=True)
class Group:
    """One of several ranks that are not there."""

    of: int
    num: int

    def rank(self) -> int:
        return self.of

    def size(self) -> int:
        return self.num


@pytest.fixture(autouse=True)
def no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs be built that are never computed."""
    monkeypatch.setattr(mx.distributed, "all_sum", lambda array, **_: array)


def part(path: Path, rank: int, dtype: mx.Dtype | None) -> dict[str, mx.array]:
    group: Any = Group(rank, 2)
    loaded = load_model(str(path), dtype=dtype, divide=lambda model: divide(model, group))
    return parameters(loaded.model)


@pytest.mark.parametrize("dtype", [None, mx.float32])
@pytest.mark.parametrize("kind", ["quantized", "gguf"])
def test_two_parts_are_all_of_a_model(tmp_path: Path, kind: str, dtype: mx.Dtype | None) -> None:
    if kind == "quantized":
        path = write_model(tmp_path / "model", intermediate_size=128)
    else:
        model, config = random_model("llama", vocab_size=262)
        metadata = BPE | metadata_of(config)
        path = write_gguf(tmp_path / "m.gguf", metadata, tensors_of(model, config))
    whole = parameters(load_model(str(path), dtype=dtype).model)
    parts = [part(path, rank, dtype) for rank in range(2)]
    assert sum(array.nbytes for array in parts[0].values()) < 0.8 * sum(
        array.nbytes for array in whole.values()
    )
    for name, array in whole.items():
        first, second = (each[name] for each in parts)
        if first.shape == array.shape:
            assert mx.array_equal(first, array)
            continue
        axis = next(i for i, size in enumerate(first.shape) if size != array.shape[i])
        assert mx.array_equal(mx.concatenate([first, second], axis=axis), array), name


@pytest.mark.parametrize(
    ("num_ranks", "changes", "reason"),
    [
        (3, {}, "among 3 ranks: n_heads is 4"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3}, "2 ranks: n_kv_heads is 3"),
        (
            2,
            {"num_attention_heads": 3, "num_key_value_heads": 3},
            "2 ranks: num_attention_heads is 3",
        ),
        # Three groups of 32 weights each.
        (2, {"intermediate_size": 96}, "among 2 ranks: ValueError: "),
    ],
)
def test_heads_and_groups_that_do_not_divide_are_rejected_in_one_line(
    tmp_path: Path, num_ranks: int, changes: dict[str, int], reason: str
) -> None:
    path = write_model(
        tmp_path / "model", **({"hidden_size": 96, "intermediate_size": 192} | changes)
    )
    group: Any = Group(0, num_ranks)
    with pytest.raises(ModelLoadError) as caught:
        load_model(str(path), dtype=None, divide=lambda model: divide(model, group))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_that_mlx_lm_does_not_divide_are_named() -> None:
    group: Any = Group(0, 2)
    with pytest.raises(ModelLoadError, match="models of the type gemma3_text among ranks"):
        divide(make_tiny("gemma3_text"), group)
