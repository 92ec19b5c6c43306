"""Log probabilities and keys of tiny models, as each version of the numerics has them.

Keys and values that are stored outlive a release: `NUMERICS_VERSION` says whether they still fit.  A change of how they
are computed that moves these figures has to change the version, too.
"""

from pathlib import Path
from typing import Final

import mlx.core as mx
import numpy as np
import pytest

from batching.backend.numerics import NUMERICS_VERSION
from batching.inputs.sampling_params import SamplingParams
from batching.model_files.gguf_header import read_header
from scripts.make_model.random_weights import randomise
from tests.support.gguf_architectures import TINY
from tests.support.gguf_converter import random_model, write_model
from tests.support.gguf_models import load_gguf
from tests.support.platforms import check_model
from tests.support.requests import make_request
from tests.support.serving import limits, make_runner, serve
from tests.support.tiny_models import VOCAB_SIZE, Check, tiny_model

# Other machines, and other libraries of products, differ by a tenth of that.
TOLERANCE: Final = 1e-4
PROMPT: Final = [i * 37 % 90 + 5 for i in range(40)]
# Those of every fifth token of the prompt, and of four that are sampled: of norms of heads; of windows, sinks and experts; of
# soft caps; of a state.
GOLDEN: Final[dict[int, dict[str, list[float]]]] = {
    2: {
        "qwen3": [
            -6.37106,
            -4.3337,
            -5.37837,
            -3.54501,
            -5.9961,
            -7.14388,
            -5.50604,
            -5.96241,
            -2.45919,
            -2.06579,
            -2.61891,
            -2.64606,
        ],
        "gpt_oss": [
            -4.80471,
            -6.65093,
            -5.11378,
            -6.0752,
            -4.33133,
            -4.90509,
            -5.86532,
            -4.21104,
            -2.76197,
            -2.58869,
            -2.96728,
            -3.19083,
        ],
        "gemma2": [
            -11.30102,
            -5.82894,
            -4.59701,
            -8.12136,
            -8.68383,
            -5.20124,
            -7.63645,
            -9.3178,
            -1.32642,
            -1.7763,
            -1.48192,
            -1.46224,
        ],
        "mamba": [
            -4.0312,
            -4.96423,
            -4.10312,
            -4.11326,
            -5.50924,
            -6.73644,
            -4.36097,
            -7.42156,
            -2.68413,
            -2.03161,
            -2.3969,
            -3.03672,
        ],
    }
}


def log_probabilities(family: str, check: Check) -> list[float]:
    model = tiny_model(family)
    randomise(model, 3)
    checked = check(model, VOCAB_SIZE)
    sampling = SamplingParams(temperature=0, logprobs=0, prompt_logprobs=0)
    request = make_request(0, PROMPT, max_tokens=4, sampling=sampling)
    runner = make_runner(model, VOCAB_SIZE, checked)
    outputs = serve(runner, limits(checked), [request]).outputs[0]
    of_output = [each.logprob for output in outputs for each in output.logprobs]
    return [each.logprob for each in request.prompt_logprobs[::5]] + of_output


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma2", "mamba"])
def test_what_is_computed_is_that_of_the_version(family: str, device_kind: Check) -> None:
    found = log_probabilities(family, device_kind)
    expected = GOLDEN[NUMERICS_VERSION][family]
    difference = np.abs(np.array(found) - expected).max()
    assert difference < TOLERANCE, (
        f"keys and values of version {NUMERICS_VERSION} on disks fit no more: give NUMERICS_VERSION, in "
        f"batching/backend/numerics.py, the next number, and it these figures: {np.round(found, 5).tolist()}"
    )


# Of the first token in the first head of the first layer, in the order in which they are stored.
KEYS: Final[dict[int, list[float]]] = {
    2: [
        -1.04961,
        0.41418,
        -0.20015,
        0.01822,
        1.19714,
        -0.52752,
        -1.47722,
        -1.49325,
        -0.12158,
        1.47449,
        2.56261,
        -2.76965,
        -0.43097,
        0.60463,
        -0.21218,
        -0.5623,
    ]
}


def test_keys_of_a_file_are_in_the_order_of_the_version(tmp_path: Path) -> None:
    """An order that queries have, too, moves no log probability."""
    path = write_model(tmp_path / "m.gguf", TINY["llama"], *random_model(TINY["llama"]))
    model, config = load_gguf(read_header(path), mx.float32)
    size = config["vocab_size"]
    checked = check_model(model, size)
    runner = make_runner(model, size, checked)
    serve(runner, limits(checked), [make_request(0, PROMPT, max_tokens=1)])
    found = np.frombuffer(runner.cache.export_block(0)[0], np.float32)[: config["head_dim"]]
    assert np.abs(found - KEYS[NUMERICS_VERSION]).max() < TOLERANCE
