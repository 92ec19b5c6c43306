"""The same requests alone, in a batch, after a prefix hit and after preemption."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import mlx.core as mx

from batching.batch_inference import BatchInferenceEngine
from batching.inputs.sampling_params import GREEDY, SamplingParams
from scripts.gpu_check.gates.families import MARGINS
from scripts.gpu_check.models import serve_tiny
from scripts.gpu_check.record import Options, Record
from scripts.gpu_check.serving import WITH_LOGPROBS, Answer, agreement, alone, answer, prompt
from scripts.make_model.tiny_configs import VOCAB_SIZE

Prompts = Sequence[Sequence[int]]
_BATCH: Final = 8
_BLOCK_SIZE: Final = 16
_SALT: Final = "prefix"
# It counts the token in flight, too.  The best tokens may be far behind the most probable ones, of which more are listed.
_PENALIZED: Final = SamplingParams(temperature=0.0, presence_penalty=1.0)
_PENALIZED_WITH_LOGPROBS: Final = replace(_PENALIZED, logprobs=20)


class _Comparison:
    """Requests that were served one by one, and a row for each other way to serve them."""

    def __init__(
        self, record: Record, engine: BatchInferenceEngine, prompts: Prompts, n: int
    ) -> None:
        self._record, self._engine = record, engine
        self._prompts, self._max_tokens = prompts, n
        self.expected = self.one_by_one()

    def one_by_one(self, sampling: SamplingParams = WITH_LOGPROBS) -> list[Answer]:
        """Serve them alone; the second time they find their prefixes."""
        salt = _SALT if sampling is WITH_LOGPROBS else None
        return alone(self._engine, self._prompts, self._max_tokens, salt, sampling)

    def in_a_batch(
        self, sampling: SamplingParams, engine: BatchInferenceEngine | None = None
    ) -> list[Answer]:
        return answer(engine or self._engine, self._prompts, self._max_tokens, sampling)

    def add(
        self,
        name: str,
        found: list[Answer],
        was_met: Callable[[Answer], object] = lambda _: True,
        expected: list[Answer] | None = None,
        presence_penalty: float = 0.0,
    ) -> None:
        """Add a row; what was to happen has to be met by one of the answers."""
        right = self.expected if expected is None else expected
        result = agreement(right, found, MARGINS["bfloat16"], presence_penalty)
        is_met = any(map(was_met, found))
        wrong = [
            *result.wrong,
            f"off by {result.difference:.3g}" if is_met else "it did not happen",
        ]
        verdict = self._record.expect(result.is_within() and is_met, f"{name}: {wrong[0]}")
        difference = f"{result.difference:.2g}" if found[0].logprobs else "not asked for"
        self._record.row(name, result.share, difference, verdict)


def run(options: Options, record: Record) -> None:
    length, max_tokens = (40, 8) if options.is_quick else (270, 64)
    num_requests = 4 if options.is_quick else _BATCH
    record.table("the same requests", "tokens equal", "largest logprob difference", "")
    prompts = [prompt(100 + i, length + 3 * i, VOCAB_SIZE) for i in range(num_requests)]
    room = num_requests * _blocks(length + 3 * num_requests + max_tokens)
    compared = _Comparison(record, _served(5 * room, num_requests), prompts, max_tokens)
    batch = f"in a batch of {num_requests}"
    compared.add(batch, compared.in_a_batch(WITH_LOGPROBS))
    compared.add(f"{batch}, steps queued if the pool allows", compared.in_a_batch(GREEDY))
    compared.add(
        "the same with a presence penalty",
        compared.in_a_batch(_PENALIZED),
        lambda found: all(found.token_ids != other.token_ids for other in compared.expected),
        compared.one_by_one(_PENALIZED_WITH_LOGPROBS),
        _PENALIZED.presence_penalty,
    )
    compared.add("after a prefix hit", compared.one_by_one(), lambda found: found.num_cached)
    # No room for the answers of all: some are preempted and computed again.
    tight = _served(sum(_blocks(len(p)) for p in prompts) + 1, num_requests)
    compared.add(
        "after preemption",
        compared.in_a_batch(WITH_LOGPROBS, tight),
        lambda found: found.num_preemptions,
    )
    record.note(
        f"Compared with the same requests alone, up to the first token that differs; that one may be at most "
        f"{MARGINS['bfloat16']} below the best one's log probability."
    )


def _blocks(num_tokens: int) -> int:
    return -(-num_tokens // _BLOCK_SIZE)


def _served(num_blocks: int, max_num_seqs: int) -> BatchInferenceEngine:
    limits = {"block_size": _BLOCK_SIZE, "max_num_seqs": max_num_seqs, "max_draft_tokens": 0}
    return serve_tiny("qwen3", mx.bfloat16, num_blocks=num_blocks, **limits).engine
