"""Requests on an engine without a server, and whether two answers agree."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from batching.adapters.adapter import Adapter
from batching.batch_inference import BatchInferenceEngine
from batching.inputs.sampling_params import GREEDY, SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest
from batching.scheduling.outputs import RequestFailure
from batching.steps.token_output import TokenLogprobs

# With log probabilities no step is queued, without them it is where the pool takes queued ones.
WITH_LOGPROBS: Final = SamplingParams(temperature=0.0, logprobs=8)
_IDS: Final = count()


@dataclass
class Answer:
    """What a request got."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    has_failed: bool = False


def prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=num_tokens)


def answer(
    engine: BatchInferenceEngine,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
    salt: str | None = None,
    adapters: Sequence[Adapter | None] = (),
) -> list[Answer]:
    """Serve requests at once, and return their answers in the same order.

    They share prefixes with requests of the same salt; without one, with each other only.

    adapters: one for each; empty is none for all.
    """
    salt = str(next(_IDS)) if salt is None else salt
    requests = [
        BatchRequest(
            next(_IDS),
            SequenceSpec(
                prompt=tuple(p),
                max_tokens=max_tokens,
                sampling=sampling,
                cache_salt=salt,
                adapter=adapter,
            ),
        )
        for p, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True)
    ]
    answers = {request.request_id: Answer() for request in requests}
    engine.add(*requests)
    while engine.has_work:
        for item in engine.step():
            of = answers[item.request_id]
            if isinstance(item, RequestFailure):
                of.has_failed = True
                continue
            of.token_ids += item.output.token_ids
            of.logprobs += item.output.logprobs
            of.num_cached = max(of.num_cached, item.output.num_cached_tokens)
            of.num_preemptions = item.output.num_preemptions
    return [*answers.values()]


def alone(
    engine: BatchInferenceEngine,
    prompts: Iterable[Sequence[int]],
    max_tokens: int,
    salt: str | None = None,
    sampling: SamplingParams = WITH_LOGPROBS,
) -> list[Answer]:
    """Serve one request after the other, with log probabilities."""
    return [answer(engine, [p], max_tokens, sampling, salt)[0] for p in prompts]


@dataclass
class Agreement:
    """How far answers agree with those that are right.

    num_equal: tokens up to the first one that differs, of each answer; behind it nothing can be compared.
    difference: the largest one of log probabilities there.
    wrong: other tokens whose log probability, less the presence penalty, is more than the margin below the
        best one's.
    """

    margin: float
    presence_penalty: float = 0.0
    num_equal: int = 0
    num_tokens: int = 0
    difference: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def share(self) -> str:
        return f"{100 * self.num_equal / max(1, self.num_tokens):.1f} %"

    def is_within(self, num_may_leap: int = 0) -> bool:
        """True if all is within the margin, but for so many answers."""
        is_near = num_may_leap > 0 or self.difference <= self.margin
        return is_near and len(self.wrong) <= num_may_leap

    def add(self, expected: Answer, found: Answer) -> None:
        """Compare an answer with one that has log probabilities."""
        self.num_tokens += len(expected.token_ids)
        if found.has_failed or len(found.token_ids) != len(expected.token_ids):
            self.wrong.append("it failed or ended early")
            return
        for i, token in enumerate(expected.token_ids):
            if found.token_ids[i] != token:
                self._add_other(expected, found.token_ids[i], i)
                return
            self.num_equal += 1
            if found.logprobs:
                gap = abs(expected.logprobs[i].logprob - found.logprobs[i].logprob)
                self.difference = max(self.difference, gap)

    def _add_other(self, expected: Answer, token: int, position: int) -> None:
        best, before = expected.token_ids[position], set(expected.token_ids[:position])
        found = expected.logprobs[position]
        logprobs = {**dict(found.top), best: found.logprob}

        def penalized(token: int) -> float:
            return logprobs.get(token, float("-inf")) - self.presence_penalty * (token in before)

        gap = penalized(best) - penalized(token)
        if not gap <= self.margin:
            self.wrong.append(f"token {position} is {gap:.3g} below the best")


def agreement(
    expected: Sequence[Answer],
    found: Sequence[Answer],
    margin: float,
    presence_penalty: float = 0.0,
) -> Agreement:
    result = Agreement(margin, presence_penalty)
    for pair in zip(expected, found, strict=True):
        result.add(*pair)
    return result
