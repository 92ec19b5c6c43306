"""Steps that raise in the middle: the engine goes on, is right, and keeps no memory."""

from typing import Any, Final

import mlx.core as mx

from batching.backend.paged.kv_cache import StepInputs
from batching.backend.runner.mlx_runner import MLXRunner
from scripts.gpu_check.gates.families import MARGINS
from scripts.gpu_check.models import Served, serve_tiny
from scripts.gpu_check.record import Options, Record
from scripts.gpu_check.serving import Answer, agreement, alone, answer, prompt
from scripts.make_model.tiny_configs import VOCAB_SIZE

_NUM_REQUESTS: Final = 4
_FAILS_AT: Final = 5
# What rounds of failures may leave: the allocator's rounding, and no pool, which has 4 MiB.
_MOST_GROWTH: Final = 1 << 20


class Fault:
    """Raises once, as MLX does, after the pool was written and before a token is sampled."""

    def __init__(self, runner: MLXRunner) -> None:
        self._logits = runner.logits
        self._left = 0
        # An attribute of the instance hides the method.
        patched: Any = runner
        patched.logits = self._call

    def arm(self, num_steps: int) -> None:
        self._left = num_steps

    def _call(self, step: StepInputs) -> mx.array:
        logits = self._logits(step)
        if self._left:
            self._left -= 1
            if not self._left:
                # The device computes it meanwhile.
                mx.async_eval(logits)
                raise RuntimeError("[malloc] injected")
        return logits


def run(options: Options, record: Record) -> None:
    record.table("round", "requests failed", "answers equal afterwards", "active memory, MiB", "")
    served = serve_tiny("qwen3", mx.bfloat16, num_blocks=512)
    length, max_tokens = (20, 8) if options.is_quick else (120, 32)
    prompts = [prompt(200 + i, length + i, VOCAB_SIZE) for i in range(_NUM_REQUESTS)]
    expected = alone(served.engine, prompts, max_tokens)
    fault = Fault(served.runner)
    before = 0
    for number in range(1, 4 if options.is_quick else 9):
        fault.arm(_FAILS_AT)
        failed = sum(each.has_failed for each in answer(served.engine, prompts, max_tokens))
        found = _after(served, prompts, max_tokens)
        result = agreement(expected, found, MARGINS["bfloat16"])
        mx.clear_cache()
        used = mx.get_active_memory()
        before = before or used
        is_right = failed > 0 and result.is_within() and used - before <= _MOST_GROWTH
        why = f"{failed} failed; {result.wrong}; {(used - before) / 2**20:.1f} MiB more"
        verdict = record.expect(is_right, f"round {number}: {why}")
        record.row(
            number, f"{failed} of {len(prompts)}", result.share, f"{used / 2**20:.1f}", verdict
        )
    record.note(
        "Memory is compared with that after the first round, which allocates the pool again."
    )


def _after(served: Served, prompts: list[list[int]], max_tokens: int) -> list[Answer]:
    assert not served.engine.has_work, "requests that failed have ended"
    return answer(served.engine, prompts, max_tokens)
