"""What `/v1/decisions` and `/v1/systemone` share: the probabilities of the answers to typed questions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastapi import Request

from app.api.attachments import attached_to
from app.api.pooling import begin_prompts
from app.api.serving import admit, engine_for, prepared
from app.generation.prompt_task import PromptTask
from app.observability.request_record import TokenUsage
from app.prompts.conversation import ChatMessage
from app.prompts.images.image_marks import Attachment
from app.prompts.scoring.questions import Labelled, Question, QuestionPrompts, question_prompts
from app.server_state import server_state
from batching import (
    NOT_RETAINED,
    Priority,
    Retention,
    SamplingParams,
    SequenceSpec,
    TokenOutput,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Questions about one input, as either API asks them."""

    model: str | None
    messages: Sequence[ChatMessage]
    questions: Sequence[Question]
    attachments: Mapping[str, Attachment]
    priority: Priority
    time_limit: float | None
    cache_salt: str
    retention: Retention = NOT_RETAINED


@dataclass(frozen=True, slots=True)
class Reading:
    """What the model makes of a question.

    probabilities: of the options in their order; 1 together.
    best: the index of the most probable one.
    confidence: the probability of its label among all tokens: lower where the model would say something else.
    """

    probabilities: Sequence[float]
    confidence: float

    @property
    def best(self) -> int:
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def expected(self) -> float:
        """The mean of the indices, by their probabilities."""
        return math.fsum(i * p for i, p in enumerate(self.probabilities))


class DecisionTask:
    """The answers of a request; `close` never waits and may be called at any time."""

    def __init__(
        self, model_id: str, task: PromptTask, prompts: QuestionPrompts, retention: Retention
    ) -> None:
        self.model_id = model_id
        self._task, self._prompts, self._retention = task, prompts, retention

    @property
    def usage(self) -> TokenUsage:
        """The input counts once, and what was cached of it before the request."""
        usage = self._task.usage
        num_shared = len(self._prompts.prefix)
        # The last token of the prefix is retained, too: it is not the last one of a prompt.
        written = self._retention.num_written(num_shared + 1, usage.num_cached_tokens)
        return replace(usage, written_tokens=written)

    async def readings(self) -> list[Reading]:
        """Return what the model makes of each question."""
        outputs = await self._task.collect()
        self._task.close()
        return [*map(_reading, self._prompts.ends, outputs)]

    def close(self) -> None:
        self._task.close()


async def begin_decisions(
    request: Request, asked: Decisions, *, completion_id: str
) -> DecisionTask:
    """Admit a request and prepare its prompts, which `readings` waits for.

    Raises:
        Rejection: see `AdmissionController.admit`.
        RequestError: the model cannot answer the questions.
    """
    async with admit(request, priority=asked.priority, time_limit=asked.time_limit) as admitted:
        engine = await engine_for(request, asked.model)
        model = engine.model
        attached = await attached_to(request, model, asked.attachments)
        prepare = partial(
            question_prompts,
            model,
            asked.messages,
            asked.questions,
            attached,
            server_state(request).settings.max_queued_tokens,
        )
        prompts = await prepared(request, prepare)
        retention = _of_prefix(asked.retention, len(prompts.prefix))
        specs = [
            SequenceSpec(
                prompt=tuple(end.token_ids),
                max_tokens=1,
                sampling=SamplingParams(
                    temperature=0.0, logprobs=0, logprob_token_ids=end.label_ids
                ),
                cache_salt=asked.cache_salt,
                retention=retention,
                images=prompts.images,
            )
            for end in prompts.ends
        ]
        task = await begin_prompts(
            request, engine, specs, admitted, completion_id=completion_id, prefix=prompts.prefix
        )
    return DecisionTask(model.model_id, task, prompts, retention)


def _of_prefix(retention: Retention, num_tokens: int) -> Retention:
    """Return what is asked of the input alone: the questions behind it are not retained."""
    prefixes = tuple(each._replace(num_tokens=num_tokens) for each in retention.prefixes)
    return retention._replace(prefixes=prefixes)


def _reading(end: Labelled, output: TokenOutput) -> Reading:
    logprobs = dict(output.logprobs[0].top)
    found = [logprobs[token_id] for token_id in end.label_ids]
    highest = max(found)
    weights = [math.exp(each - highest) for each in found]
    total = math.fsum(weights)
    return Reading([weight / total for weight in weights], math.exp(highest))
