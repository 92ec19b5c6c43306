"""The pool's GPU kernels against the portable path."""

from typing import Final

import mlx.core as mx

from batching.backend.devices import default_gpu
from batching.errors import ModelLoadError
from scripts.gpu_check.gates.families import MARGINS
from scripts.gpu_check.models import Served, serve_tiny
from scripts.gpu_check.record import Options, Record, Skipped
from scripts.gpu_check.serving import (
    WITH_LOGPROBS,
    Agreement,
    Answer,
    agreement,
    alone,
    answer,
    prompt,
)
from scripts.make_model.tiny_configs import VOCAB_SIZE

# Dense, windows, sinks with windows.
_FAMILIES: Final = ("qwen3", "gemma3_text", "gpt_oss")
_BLOCK_SIZE: Final = 16


def run_scattered(options: Options, record: Record) -> None:
    """Compare kernels with the portable path, where blocks of a request lie anywhere."""
    _need_gpu()
    record.table("family", "type", "tokens equal", "largest logprob difference", "")
    for family in _FAMILIES:
        for name, dtype in (("float32", mx.float32), ("bfloat16", mx.bfloat16)):
            try:
                result = _compare(family, dtype, MARGINS[name])
            except ModelLoadError as error:
                verdict = record.expect(False, f"{family} in {name}: {error}")
                record.row(family, name, "", "", verdict)
                continue
            wrong = result.wrong or [f"off by {result.difference:.3g}"]
            verdict = record.expect(result.is_within(), f"{family} in {name}: {wrong[0]}")
            record.row(family, name, result.share, f"{result.difference:.2g}", verdict)


def _compare(family: str, dtype: mx.Dtype, margin: float) -> Agreement:
    portable, with_kernels = (_serve(family, dtype, mode) for mode in ("off", "require"))
    prompts = [prompt(300 + i, 40 + 61 * i, VOCAB_SIZE) for i in range(5)]
    expected = alone(portable.engine, prompts, 24)
    _scatter(with_kernels)
    return agreement(expected, answer(with_kernels.engine, prompts, 24, WITH_LOGPROBS), margin)


def run_order(options: Options, record: Record) -> None:
    """Queue 200 steps over a pool so small that blocks change hands, and compare with single ones."""
    _need_gpu()
    served = _serve("qwen3", mx.float32, "require", num_blocks=48)
    record.expect(served.runner.takes_queued_steps, "steps are not queued")
    record.table("requests", "tokens equal", "")
    prompts = [prompt(400 + i, 8 + 5 * (i % 9), VOCAB_SIZE) for i in range(60)]
    expected = alone(served.engine, prompts, 40)
    found: list[Answer] = answer(served.engine, prompts, 40)
    result = agreement(expected, found, MARGINS["float32"])
    verdict = record.expect(result.is_within(), "; ".join(result.wrong[:3]))
    record.row(len(prompts), result.share, verdict)


def _need_gpu() -> None:
    if default_gpu() is None:
        raise Skipped("these kernels run on a GPU; on a CPU make test-kernels runs them")


def _serve(family: str, dtype: mx.Dtype, mode: str, num_blocks: int = 256) -> Served:
    sizes = {"block_size": _BLOCK_SIZE, "num_blocks": num_blocks}
    return serve_tiny(family, dtype, **sizes, gpu_kernels=mode)


def _scatter(served: Served) -> None:
    """Leave the free blocks in another order: requests of unlike lengths end one after the other."""
    for i in (3, 1, 2, 0):
        answer(
            served.engine, [prompt(500 + i, 17 + 31 * j, VOCAB_SIZE) for j in range(i + 4)], 2 + i
        )
