"""Adapters that are damaged at random are read, or refused in one line; no other error leaves the reader."""

import random
from pathlib import Path

import numpy as np
import pytest

from batching.adapters.files.adapter_file import AdapterFile
from batching.errors import AdapterError
from tests.support.adapter_files import peft_tensors, random_layers, write_peft
from tests.support.damaged_files import damaged


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_damaged_files(name: str, tmp_path: Path) -> None:
    patterns = {"(q|v)_proj": 4, ".*layers.0.*": 8}
    folder = write_peft(tmp_path, peft_tensors(random_layers()), alpha_pattern=patterns)
    content = (folder / name).read_bytes()
    rng = random.Random(3)
    num_read = num_refused = 0
    for _ in range(200):
        (folder / name).write_bytes(damaged(content, len(content), rng))
        try:
            file = AdapterFile(folder, "style")
        except AdapterError as error:
            num_refused += 1
            text = str(error)
        else:
            num_read += 1
            text = ""
            for path, numbers in file.read().items():
                inputs, outputs, rank = file.layers[path]
                assert numbers.a.shape == (inputs, rank)
                assert numbers.b.shape == (rank, outputs)
                assert np.isfinite(numbers.b).all()
        assert text.isprintable()
    assert min(num_read, num_refused) > 5
