"""How relevant one text is to another: a reranker says so, or the vectors of both."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from typing import NamedTuple

from fastapi import Request

from app.api.pooling import begin_prompts, embeddings_of, input_reader, prompted
from app.api.scoring.request import ScoringRequest
from app.api.serving import admit, engine_for, prepared
from app.generation.prompt_task import PromptTask
from app.observability.request_record import TokenUsage
from app.prompts.inputs import InputReader
from app.prompts.scoring.pairs import PairPrompts
from app.prompts.scoring.rerank import RerankPrompts
from app.server_state import server_state
from app.settings import env_name
from batching import (
    CrossEncoder,
    Embeddings,
    InvalidRequest,
    ModelInfo,
    NoEmbeddings,
    PoolingParams,
    Reranker,
    SamplingParams,
    SequenceSpec,
    TokenOutput,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Pairs of texts; `params` name the fields that these come from.

    roles: the model's prompts that are put before the texts for their vectors, if it has such.
    """

    pairs: Sequence[tuple[str, str]]
    params: tuple[str, str]
    roles: tuple[str | None, str | None] = (None, None)


class _Plan(NamedTuple):
    """The prompts that the model reads, and the score of each pair in its outputs."""

    prompts: Sequence[Sequence[int]]
    pooling: Sequence[PoolingParams | None]
    sampling: SamplingParams
    scores: Callable[[Sequence[TokenOutput]], list[float]]

    def specs(self, cache_salt: str | None) -> list[SequenceSpec]:
        """Return what is asked of the engine: a vector of each prompt, or one token."""
        return [
            SequenceSpec(
                prompt=tuple(prompt),
                max_tokens=1 if pooling is None else 0,
                pooling=pooling,
                sampling=self.sampling,
                cache_salt=cache_salt or "",
            )
            for prompt, pooling in zip(self.prompts, self.pooling, strict=True)
        ]


class ScoreTask:
    """The scores of a comparison; `close` never waits and may be called at any time."""

    def __init__(self, request: Request, model_id: str, task: PromptTask, plan: _Plan) -> None:
        self.model_id = model_id
        self._request, self._task, self._plan = request, task, plan

    @property
    def usage(self) -> TokenUsage:
        return self._task.usage

    async def scores(self) -> list[float]:
        """Return the score of each pair."""
        outputs = await self._task.collect()
        self._task.close()
        return await prepared(self._request, partial(self._plan.scores, outputs))

    def close(self) -> None:
        self._task.close()


async def begin_scoring(
    request: Request, body: ScoringRequest, comparison: Comparison, *, completion_id: str
) -> ScoreTask:
    """Admit a request and prepare its scores, which `scores` waits for.

    Raises:
        Rejection: see `AdmissionController.admit`.
        InvalidRequest: the model neither reranks nor embeds, or cannot read a text.
    """
    async with admit(request, priority=body.queue_priority, time_limit=body.timeout) as admitted:
        engine = await engine_for(request, body.model)
        plan = await prepared(request, _planner(request, engine.model, body, comparison))
        specs = plan.specs(body.cache_salt)
        task = await begin_prompts(request, engine, specs, admitted, completion_id=completion_id)
    return ScoreTask(request, engine.model.model_id, task, plan)


def _planner(
    request: Request, model: ModelInfo, body: ScoringRequest, comparison: Comparison
) -> Callable[[], _Plan]:
    """Return a blocking function that makes the plan; the reranker's if the model is one."""
    limit = server_state(request).settings.max_queued_tokens
    if isinstance(model.reranker, CrossEncoder):
        return partial(_cross_encoded, model, model.reranker, body, comparison, limit)
    if model.reranker is not None:
        return partial(_reranked, model, model.reranker, body, comparison, limit)
    _check_embeds(model, body)
    reader = input_reader(request, model, body.cut())
    return partial(_compared, reader, embeddings_of(model), comparison)


def _check_embeds(model: ModelInfo, body: ScoringRequest) -> None:
    if isinstance(model.embeddings, NoEmbeddings):
        message = (
            f"the model '{model.model_id}' is no reranker, and {model.embeddings.reason}; "
            f"{env_name('rerank_template')} or {env_name('pooling')} says what it is"
        )
        raise InvalidRequest("model", message)
    for name in ("instruction", "max_tokens_per_doc"):
        if getattr(body, name) is not None:
            raise InvalidRequest(name, "this needs a reranker, and the model compares vectors")


def _reranked(
    model: ModelInfo, reranker: Reranker, body: ScoringRequest, comparison: Comparison, limit: int
) -> _Plan:
    """Ask the model about each pair; `limit` is of all tokens together, if there are several."""
    cuts = body.truncate_prompt_tokens is not None
    writer = RerankPrompts(
        model=model,
        reranker=reranker,
        instruction=body.instruction,
        max_prompt_tokens=(body.num_kept_tokens or model.max_model_len - 1) if cuts else None,
        max_document_tokens=body.max_tokens_per_doc,
    )
    param = comparison.params[1]
    prompts = _within(
        limit,
        param,
        (
            writer.write(f"{param}.{index}", query, document)
            for index, (query, document) in enumerate(comparison.pairs)
        ),
    )
    token_ids = (reranker.relevant_id, reranker.irrelevant_id)
    sampling = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=token_ids)
    return _Plan(prompts, [None] * len(prompts), sampling, partial(_relevances, reranker))


def _within(limit: int, param: str, prompts: Iterable[list[int]]) -> list[list[int]]:
    """Return prompts, unless they have more tokens than `limit`; each is written when it is due."""
    written: list[list[int]] = []
    num_tokens = 0
    for prompt in prompts:
        written.append(prompt)
        num_tokens += len(prompt)
        if len(written) > 1 and num_tokens > limit:
            raise InvalidRequest(param, f"all prompts together may have at most {limit} tokens")
    return written


def _cross_encoded(
    model: ModelInfo,
    encoder: CrossEncoder,
    body: ScoringRequest,
    comparison: Comparison,
    limit: int,
) -> _Plan:
    """Let the model read each pair; `limit` is of all tokens together, if there are several."""
    if body.instruction is not None:
        raise InvalidRequest("instruction", "a cross-encoder has no template that would show it")
    cuts = body.truncate_prompt_tokens is not None
    writer = PairPrompts(
        model,
        encoder,
        comparison.params,
        max_prompt_tokens=(body.num_kept_tokens or model.max_model_len) if cuts else None,
        max_document_tokens=body.max_tokens_per_doc,
    )
    pairs = comparison.pairs
    written = (writer.write(index, *pair) for index, pair in enumerate(pairs))
    prompts = _within(limit, comparison.params[1], written)
    pooling = [PoolingParams(second=writer.second(query)) for query, _ in pairs]
    return _Plan(prompts, pooling, SamplingParams(), _scores)


def _scores(outputs: Sequence[TokenOutput]) -> list[float]:
    return [score for output in outputs for score in output.embedding or ()]


def _relevances(reranker: Reranker, outputs: Sequence[TokenOutput]) -> list[float]:
    """Return the probability of the one token where the model says one of both."""
    scores: list[float] = []
    for output in outputs:
        logprobs = dict(output.logprobs[0].top)
        margin = logprobs[reranker.relevant_id] - logprobs[reranker.irrelevant_id]
        scores.append(1 / (1 + math.exp(-margin)) if margin > -700 else 0.0)
    return scores


def _compared(reader: InputReader, embeddings: Embeddings, comparison: Comparison) -> _Plan:
    """Embed each text once."""
    columns = [list(dict.fromkeys(texts)) for texts in zip(*comparison.pairs, strict=True)]
    prompts: list[list[int]] = []
    for texts, param, role in zip(columns, comparison.params, comparison.roles, strict=True):
        name = role if role in embeddings.prompts else None
        prompts += reader.read(param, [prompted(embeddings, name, text) for text in texts])
    first = {text: index for index, text in enumerate(columns[0])}
    second = {text: index for index, text in enumerate(columns[1], len(columns[0]))}
    pairs = [(first[a], second[b]) for a, b in comparison.pairs]
    pooling = PoolingParams(type=embeddings.pooling, normalize=True)
    return _Plan(prompts, [pooling] * len(prompts), SamplingParams(), partial(_cosines, pairs))


def _cosines(pairs: Sequence[tuple[int, int]], outputs: Sequence[TokenOutput]) -> list[float]:
    """Return the cosines of vectors of length 1."""
    vectors = [output.embedding or () for output in outputs]
    return [math.fsum(map(mul, vectors[a], vectors[b])) for a, b in pairs]
