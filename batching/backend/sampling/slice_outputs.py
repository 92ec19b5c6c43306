"""The output of one forward pass for each slice."""

from collections.abc import Mapping, Sequence

import mlx.core as mx

from batching.backend.host_array import host_array
from batching.backend.sampling.logit_rows import LogitRows
from batching.backend.sampling.logprobs import token_logprobs
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import Slice, SliceOutput
from batching.steps.token_output import TokenLogprobs


def slice_outputs(
    slices: Sequence[Slice],
    sequences: Mapping[int, SequenceState],
    logit_rows: LogitRows,
    logits: mx.array,
    token_ids: Sequence[int],
) -> list[SliceOutput]:
    """Put the sampled tokens into the order of the slices; the rows may have had another.

    Logits `[L, vocab_size]`; only rows with log probabilities are read.
    """
    sampled: dict[int, list[int]] = {}
    for sample, token_id in zip(logit_rows.samples, token_ids, strict=True):
        sampled.setdefault(sample.sequence_id, []).append(token_id)
    chosen, scored = _logprobs(sequences, logit_rows, logits, token_ids)
    return [
        SliceOutput(
            [token_id for each in sampling_ids(s) for token_id in sampled[each]],
            [logprobs for each in sampling_ids(s) for logprobs in chosen.get(each, ())],
            scored.get(s.sequence_id, ()),
        )
        for s in slices
    ]


def sampling_ids(s: Slice) -> tuple[int, ...]:
    """Return the ids of the sequences for which a slice samples."""
    return (s.sequence_id, *s.forks) if s.num_samples else ()


BySequence = dict[int, list[TokenLogprobs]]


def _logprobs(
    sequences: Mapping[int, SequenceState],
    logit_rows: LogitRows,
    logits: mx.array,
    token_ids: Sequence[int],
) -> tuple[BySequence, BySequence]:
    """Return the log probabilities of the sampled tokens, and of those of the prompt."""
    asked = [
        (sample.sequence_id, logit_rows.sample_rows[i], token_ids[i], top)
        for i, sample in enumerate(logit_rows.samples)
        if (top := sequences[sample.sequence_id].sampling.output_logprobs) is not None
    ]
    num_sampled = len(asked)
    asked += [
        (each, row, sequence.token_ids[position], sequence.sampling.prompt_logprobs or 0)
        for each, position, row in logit_rows.scores
        for sequence in [sequences[each]]
    ]
    chosen: BySequence = {}
    scored: BySequence = {}
    if asked:
        ids, rows, tokens, tops = zip(*asked, strict=True)
        rows_on_host = host_array(logits[mx.array(rows)].astype(mx.float32))
        for i, logprobs in enumerate(token_logprobs(rows_on_host, tokens, tops)):
            (chosen if i < num_sampled else scored).setdefault(ids[i], []).append(logprobs)
    return chosen, scored
