"""The output of one forward pass for each slice."""

from collections.abc import Sequence

import mlx.core as mx

from batching.backend.host_array import host_array
from batching.backend.sampling.logit_rows import LogitRows
from batching.backend.sampling.logprobs import token_logprobs
from batching.request import BatchRequest, TokenLogprobs
from batching.steps.step_plan import Slice, SliceOutput


def slice_outputs(
    slices: Sequence[Slice], logit_rows: LogitRows, logits: mx.array, token_ids: Sequence[int]
) -> list[SliceOutput]:
    """Put the sampled tokens into the order of the slices; the rows may have had another.

    Logits `[L, vocab_size]`; only rows with log probabilities are read.
    """
    sampled: dict[BatchRequest, list[int]] = {}
    for sample, token_id in zip(logit_rows.samples, token_ids, strict=True):
        sampled.setdefault(sample.request, []).append(token_id)
    chosen, scored = _logprobs(logit_rows, logits, token_ids)
    return [
        SliceOutput(
            [token_id for r in _sampled_requests(s) for token_id in sampled[r]],
            [logprobs for r in _sampled_requests(s) for logprobs in chosen.get(r, ())],
            scored.get(s.request, ()),
        )
        for s in slices
    ]


def _sampled_requests(s: Slice) -> tuple[BatchRequest, ...]:
    return (s.request, *s.forks) if s.samples else ()


ByRequest = dict[BatchRequest, list[TokenLogprobs]]


def _logprobs(
    logit_rows: LogitRows, logits: mx.array, token_ids: Sequence[int]
) -> tuple[ByRequest, ByRequest]:
    """Return the log probabilities of the sampled tokens, and of those of the prompt."""
    asked = [
        (request, logit_rows.sample_rows[i], token_ids[i], top)
        for i, (request, *_) in enumerate(logit_rows.samples)
        if (top := request.sampling.output_logprobs) is not None
    ]
    num_sampled = len(asked)
    asked += [
        (request, row, request.token_ids[position], request.sampling.prompt_logprobs or 0)
        for request, position, row in logit_rows.scores
    ]
    chosen: ByRequest = {}
    scored: ByRequest = {}
    if asked:
        requests, rows, tokens, tops = zip(*asked, strict=True)
        rows_on_host = host_array(logits[mx.array(rows)].astype(mx.float32))
        for i, logprobs in enumerate(token_logprobs(rows_on_host, tokens, tops)):
            (chosen if i < num_sampled else scored).setdefault(requests[i], []).append(logprobs)
    return chosen, scored
