"""Adapters of unlike requests in one step, against engines whose weights they are merged into."""

import tempfile
from pathlib import Path
from typing import Final

import mlx.core as mx
import mlx.nn as nn

from batching.adapters.adapter import AdaptableLayers
from batching.adapters.files.adapter_file import AdapterFile
from scripts.gpu_check.models import FAMILIES, serve, serve_tiny, tiny_model
from scripts.gpu_check.record import Options, Record
from scripts.gpu_check.serving import WITH_LOGPROBS, Answer, agreement, alone, answer, prompt
from scripts.make_model.adapters import Matrices, added, random_matrices, write_adapter
from scripts.make_model.tiny_configs import COMMON, VOCAB_SIZE

MARGINS: Final = {"float32": 0.03, "bfloat16": 0.25}
_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16}
_FAMILIES: Final = ("qwen3", "qwen3_5", "gemma3_text")
# Unlike ones, so that stacks have room that some do not fill.
_RANKS: Final = (8, 3, 16)
# Fewer than there are adapters, so that slots change hands.
_NUM_SLOTS: Final = 2
_LENGTHS: Final = (9, 23, 40, 130, 270, 31, 12, 64)
_QUICK_LENGTHS: Final = (9, 40, 12, 5)


def run(options: Options, record: Record) -> None:
    record.table("family", "type", "tokens equal", "largest logprob difference", "")
    for family in _FAMILIES[:1] if options.is_quick else _FAMILIES:
        for name in ["float32"] if options.is_quick else _DTYPES:
            _check(options, record, family, name)
    record.note(
        f"{len(_RANKS)} adapters of ranks {_RANKS} in {_NUM_SLOTS} slots, and none, beside each other; against "
        "merged weights."
    )


def _check(options: Options, record: Record, family: str, name: str) -> None:
    served = serve_tiny(family, _DTYPES[name], max_adapters=_NUM_SLOTS)
    layers = served.adapters
    if not isinstance(layers, AdaptableLayers):
        record.expect(False, f"{family} in {name} {layers.reason}")
        return
    lengths = _QUICK_LENGTHS if options.is_quick else _LENGTHS
    prompts = [prompt(i, length, VOCAB_SIZE) for i, length in enumerate(lengths)]
    matrices = [random_matrices(layers, r, seed, size=0.02) for seed, r in enumerate(_RANKS)]
    max_tokens = 4 if options.is_quick else 24
    expected: dict[int, Answer] = {}
    of_prompt = [i % (len(_RANKS) + 1) for i in range(len(prompts))]
    for which in sorted(set(of_prompt)):
        mine = [i for i, each in enumerate(of_prompt) if each == which]
        own = matrices[which] if which < len(_RANKS) else {}
        engine = serve(_merged(family, name, own), _config(family)).engine
        answers = alone(engine, [prompts[i] for i in mine], max_tokens)
        expected |= dict(zip(mine, answers, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        files = [
            AdapterFile(write_adapter(Path(folder) / str(i), each), str(i))
            for i, each in enumerate(matrices)
        ]
        given = [None if i == len(files) else files[i].adapter for i in of_prompt]
        found = answer(served.engine, prompts, max_tokens, WITH_LOGPROBS, adapters=given)
        queued = answer(served.engine, prompts, max_tokens, adapters=given)
    in_order = [expected[i] for i in range(len(prompts))]
    together = agreement(in_order, found, MARGINS[name])
    after = agreement(in_order, queued, MARGINS[name])
    wrong = "; ".join(together.wrong + after.wrong) or f"off by {together.difference:.3g}"
    is_right = together.is_within() and after.is_within()
    verdict = record.expect(is_right, f"{family} in {name}: {wrong}")
    shares = f"{together.share}, {after.share}"
    record.row(family, name, shares, f"{together.difference:.2g}", verdict)


def _config(family: str) -> dict[str, object]:
    return {**COMMON, "model_type": family, **FAMILIES[family]}


def _merged(family: str, name: str, matrices: Matrices) -> nn.Module:
    model = tiny_model(family, mx.float32)
    modules = dict(model.named_modules())
    for path, delta in added(matrices).items():
        modules[path].weight = modules[path].weight + mx.array(delta)
    model.set_dtype(_DTYPES[name])
    mx.eval(model.parameters())
    return model
