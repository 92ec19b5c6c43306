"""The log probabilities of transformers in float32: scaled rotations, sinks, windows, clipped gates.

mlx-lm is under test, too, which the other tests of models hold our results against.  The golden file
is written by scripts/references/transformers.py.
"""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig, NativeMode
from batching.inputs.sampling_params import SamplingParams
from batching.steps.token_output import TokenOutput
from tests.support.model_files import write_model
from tests.support.reference_weights import CONFIGS, TOKENS, weight
from tests.support.requests import make_request

GOLDEN: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "golden_transformers.json").read_text(encoding="utf-8")
)


def checkpoint(model_type: str) -> dict[str, mx.array]:
    shapes = GOLDEN[model_type]["shapes"]
    arrays = {name: mx.array(weight(name, tuple(shape))) for name, shape in shapes.items()}
    return {
        renamed: array
        for name, tensor in arrays.items()
        for renamed, array in _of_experts(name, tensor).items()
    }


def _of_experts(name: str, tensor: mx.array) -> dict[str, mx.array]:
    """Name experts as mlx-lm does: transposed, and gates apart from what they let through."""
    if "experts" not in name:
        return {name: tensor}
    is_bias = name.endswith("_bias")
    rows = tensor if is_bias else tensor.swapaxes(1, 2)
    name = f"{name.removesuffix('_bias')}.{'bias' if is_bias else 'weight'}"
    if "gate_up" not in name:
        return {name: rows}
    return {
        name.replace("gate_up", "gate"): mx.contiguous(rows[:, ::2]),
        name.replace("gate_up", "up"): mx.contiguous(rows[:, 1::2]),
    }


@pytest.fixture(params=CONFIGS)
def model_type(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Write a model's directory and return what it is."""
    write_model(tmp_path)
    kind: str = request.param
    config = CONFIGS[kind] | {"model_type": kind, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(tmp_path / "model.safetensors"), checkpoint(kind), {"format": "mlx"})
    return kind


@pytest.mark.parametrize("native", ["auto", "off"])
def test_log_probabilities_are_those_of_transformers(
    tmp_path: Path, model_type: str, native: NativeMode
) -> None:
    built = build_engine(
        EngineConfig(
            model=str(tmp_path),
            model_id=model_type,
            num_blocks=64,
            device="cpu",
            native=native,
            cpu_precision="exact",
        )
    )
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
    built.engine.add(make_request(0, TOKENS, max_tokens=1, sampling=sampling))
    found: list[float] = []
    while built.engine.has_work:
        for _, output in built.engine.step():
            assert isinstance(output, TokenOutput)
            found += [each.logprob for each in output.prompt_logprobs]
    assert found == pytest.approx(GOLDEN[model_type]["logprobs"], abs=1e-4)
