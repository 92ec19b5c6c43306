"""The same requests alone, in a batch, after a prefix hit and after preemption."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import mlx.core as mx

from batching.inputs.sampling_params import GREEDY, SamplingParams
from scripts.gpu_check.gates.families import MARGINS
from scripts.gpu_check.models import serve_tiny
from scripts.gpu_check.record import Options, Record
from scripts.gpu_check.serving import WITH_LOGPROBS, Answer, agreement, alone, answer, prompt
from scripts.make_model.tiny_configs import VOCAB_SIZE

_BATCH: Final = 8
_BLOCK_SIZE: Final = 16
_SALT: Final = "prefix"
# It counts the token in flight, too.  The best tokens may be far behind the most probable ones, of which more are listed.
_PENALIZED: Final = SamplingParams(temperature=0.0, presence_penalty=1.0)
_PENALIZED_WITH_LOGPROBS: Final = replace(_PENALIZED, logprobs=20)


def run(options: Options, record: Record) -> None:
    length, max_tokens = (40, 8) if options.is_quick else (270, 64)
    num_requests = 4 if options.is_quick else _BATCH
    record.table("the same requests", "tokens equal", "largest logprob difference", "")
    prompts = [prompt(100 + i, length + 3 * i, VOCAB_SIZE) for i in range(num_requests)]
    longest = length + 3 * num_requests + max_tokens
    room = num_requests * -(-longest // _BLOCK_SIZE)
    # No room for the answers of all: some are preempted and computed again.
    least = sum(-(-len(p) // _BLOCK_SIZE) for p in prompts) + 1

    def limits(num_blocks: int) -> dict[str, int]:
        sizes = {"num_blocks": num_blocks, "block_size": _BLOCK_SIZE}
        return {**sizes, "max_num_seqs": num_requests, "max_draft_tokens": 0}

    served = serve_tiny("qwen3", mx.bfloat16, **limits(5 * room))
    expected = alone(served.engine, prompts, max_tokens, _SALT)

    def compare(
        name: str,
        serve: Callable[[], list[Answer]],
        was_met: Callable[[Answer], bool],
        right: list[Answer] = expected,
        presence_penalty: float = 0.0,
    ) -> None:
        found = serve()
        result = agreement(right, found, MARGINS["bfloat16"], presence_penalty)
        is_met = any(map(was_met, found))
        wrong = result.wrong or [
            f"off by {result.difference:.3g}" if is_met else "it did not happen"
        ]
        verdict = record.expect(result.is_within() and is_met, f"{name}: {wrong[0]}")
        difference = f"{result.difference:.2g}" if found[0].logprobs else "not asked for"
        record.row(name, result.share, difference, verdict)

    def always(_: Answer) -> bool:
        return True

    def from_cache(found: Answer) -> bool:
        return found.num_cached > 0

    def penalized(found: Answer) -> bool:
        return all(found.token_ids != other.token_ids for other in expected)

    def preempted(found: Answer) -> bool:
        return found.num_preemptions > 0

    def of_batch(sampling: SamplingParams) -> list[Answer]:
        return answer(served.engine, prompts, max_tokens, sampling)

    batch = f"in a batch of {num_requests}"
    compare(batch, lambda: of_batch(WITH_LOGPROBS), always)
    compare(f"{batch}, steps queued if the pool allows", lambda: of_batch(GREEDY), always)
    compare(
        "the same with a presence penalty",
        lambda: of_batch(_PENALIZED),
        penalized,
        alone(served.engine, prompts, max_tokens, sampling=_PENALIZED_WITH_LOGPROBS),
        _PENALIZED.presence_penalty,
    )
    compare(
        "after a prefix hit", lambda: alone(served.engine, prompts, max_tokens, _SALT), from_cache
    )
    tight = serve_tiny("qwen3", mx.bfloat16, **limits(least))
    compare(
        "after preemption",
        lambda: answer(tight.engine, prompts, max_tokens, WITH_LOGPROBS),
        preempted,
    )
    record.note(
        f"Compared with the same requests alone, up to the first token that differs; that one may be at most "
        f"{MARGINS['bfloat16']} below the best one's log probability."
    )
