"""Headers of safetensors, beside a small model's config; an input is the header's JSON."""

import struct
from typing import Final

from tests.fuzz.loading import load, new_folder
from tests.fuzz.mutations import json_mutation
from tests.fuzz.target import Target
from tests.support.model_files import write_model

_WORDS: Final = (
    *("dtype", "shape", "data_offsets", "__metadata__", "format", "F32", "BF16", "U32", "I64"),
    *("model.norm.weight", "lm_head.weight", [8, 8], [0, 0], [0, 1 << 62], -1, 1 << 31, 1 << 63),
)
# As many as the model's own file has.
_NUM_BYTES: Final = 1 << 17

_MODEL: Final = write_model(new_folder())


def run(data: bytes) -> None:
    """The model is loaded or rejected; nothing is read that is not there."""
    content = struct.pack("<Q", len(data)) + data + bytes(_NUM_BYTES)
    (_MODEL / "model.safetensors").write_bytes(content)
    load(_MODEL)


TARGET: Final = Target(run=run, mutate=json_mutation(*_WORDS), cpu_seconds=20)
