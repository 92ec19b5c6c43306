"""What a request's fields mean to the engine, for one model.  Blocking, so not for the event loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from app.admission.controller import AdmissionTicket
from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.completions.request import CompletionRequest
from app.generation.choice import Choice, Parser, PlainText, TextOptions
from app.generation.generation import Generation
from batching import (
    AllowedTokens,
    EngineThread,
    GrammarText,
    InvalidRequest,
    ModelInfo,
    SamplingParams,
    TokenConstraint,
)

AnyRequest = ChatCompletionRequest | CompletionRequest


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """What an answer has to keep to."""

    sampling: SamplingParams
    stop_token_ids: frozenset[int]
    constraint: TokenConstraint | None


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar, and the field that asked for it."""

    grammar: GrammarText
    param: str


async def generate(
    engine: EngineThread,
    prompts: Sequence[Sequence[int]],
    body: AnyRequest,
    wanted: GenerationParams,
    *,
    completion_id: str,
    max_tokens: int | None,
    place: AdmissionTicket,
    parser: Callable[[], Parser] = PlainText,
    kept_token_ids: frozenset[int] = frozenset(),
    is_blocking: bool = False,
) -> Generation:
    """Queue the answers to a request; without `max_tokens` they may fill the context.

    kept_token_ids: special tokens that the parser looks for in the text.
    is_blocking: the parser may take its time.

    Raises:
        RequestError: it can never be served as it is.
        QueueFull: too much waits to be read.
        DeadlineExceeded: its time is over.
        EngineStopped, EngineStalled: nobody is there to serve it.
    """
    lengths = [len(prompt) for prompt in prompts]
    engine.check(prompts, max_tokens, wanted.sampling)
    place.hold(sum(lengths))
    tokens = await engine.submit(
        prompts,
        sampling=wanted.sampling,
        max_tokens=max_tokens,
        stop_token_ids=wanted.stop_token_ids,
        constraint=wanted.constraint,
        priority=body.queue_priority,
        num_choices=body.num_choices,
        cache_salt=place.cache_salt(body.cache_salt),
        reports_progress=body.return_progress,
        time_limit=place.time_left(),
    )
    options = text_options(engine.model, body, wanted, kept_token_ids)
    choices = [
        Choice(index, engine.model.tokenizer, options, parser())
        for index in range(len(prompts) * body.num_choices)
    ]
    return Generation(
        completion_id,
        tokens,
        choices,
        lengths,
        place,
        is_blocking=is_blocking,
        tells_timings=body.return_timings,
    )


def text_options(
    model: ModelInfo, body: AnyRequest, wanted: GenerationParams, kept: frozenset[int] = frozenset()
) -> TextOptions:
    """Return how the tokens of a request's answers become text."""
    hidden = frozenset() if body.include_stop_str_in_output else wanted.stop_token_ids
    if kept and body.skip_special_tokens:
        hidden |= frozenset(model.tokenizer.all_special_ids) - kept
    return TextOptions(
        hidden_token_ids=hidden | wanted.stop_token_ids & model.eos_token_ids,
        stops=body.stop,
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens and not kept,
    )


def demands(
    engine: EngineThread,
    body: AnyRequest,
    *,
    grammar: GrammarSpec | None = None,
    prompt_logprobs: int | None = None,
) -> GenerationParams:
    """Compile what a request asks of its answer; this may take a while.

    Raises:
        InvalidRequest: a field that this model cannot serve.
    """
    model = engine.model
    check_token_ids(model, "stop_token_ids", body.stop_token_ids)
    eos_token_ids = frozenset() if body.ignore_eos else model.eos_token_ids
    if body.num_logprobs is not None:
        # It reads the vocabulary the first time, which takes up to a second.
        engine.grammars.token_bytes(0)
    return GenerationParams(
        sampling_params(model, body, prompt_logprobs),
        frozenset(i for i in eos_token_ids if i < model.vocab_size) | {*body.stop_token_ids},
        _constraint(engine, body, grammar),
    )


def truncated(model: ModelInfo, prompt: list[int], body: AnyRequest) -> list[int]:
    """Return the end of a prompt, if the request asks for no more than that."""
    if body.truncate_prompt_tokens is None:
        return prompt
    if body.truncate_prompt_tokens > 0:
        return prompt[-body.truncate_prompt_tokens :]
    return prompt[-max(1, model.max_model_len - body.num_reserved_tokens) :]


def sampling_params(
    model: ModelInfo, body: AnyRequest, prompt_logprobs: int | None = None
) -> SamplingParams:
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias.items()),
        min_tokens=body.min_tokens,
        bad_words=tuple(dict.fromkeys(_bad_words(model, body.bad_words))),
        logprobs=body.num_logprobs,
        prompt_logprobs=prompt_logprobs,
        seed=body.seed,
    )


def _bad_words(model: ModelInfo, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Return the tokens of each word, as it stands at the beginning and after a space."""
    encode = model.tokenizer.encode
    texts = (text for word in words for text in (word, f" {word.lstrip()}"))
    words_of_tokens = (tuple(encode(text, add_special_tokens=False)) for text in texts)
    # A tokenizer can know more tokens than its model.
    return (word for word in words_of_tokens if word and max(word) < model.vocab_size)


def _constraint(
    engine: EngineThread, body: AnyRequest, grammar: GrammarSpec | None
) -> TokenConstraint | None:
    if grammar is None:
        if body.allowed_token_ids is None:
            return None
        check_token_ids(engine.model, "allowed_token_ids", body.allowed_token_ids)
        return AllowedTokens(body.allowed_token_ids)
    if body.allowed_token_ids is not None:
        raise InvalidRequest("allowed_token_ids", f"it cannot be combined with {grammar.param}")
    return engine.grammars.compile(grammar.grammar, param=grammar.param).matcher()


def check_token_ids(model: ModelInfo, param: str, token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        if token_id >= model.vocab_size:
            raise InvalidRequest(param, f"token id {token_id} is not in [0, {model.vocab_size})")


def bounded_tokens(
    model: ModelInfo,
    lengths: Sequence[int],
    num_choices: int,
    max_tokens: int | None,
    limit: int,
) -> int | None:
    """Return the most tokens of an answer, so that all answers together keep to a limit.

    None stays None, which is as many as fit the context, where that keeps to it.

    Raises:
        InvalidRequest: the request asks for more.
    """
    num_answers = len(lengths) * num_choices
    if max_tokens is not None:
        if num_answers * max_tokens > limit:
            message = f"{num_answers} answers of {max_tokens} tokens are more than the {limit} "
            raise InvalidRequest("max_tokens", f"{message}that one request may ask for")
        return max_tokens
    room = max(1, model.max_model_len - min(lengths))
    return None if num_answers * room <= limit else max(1, limit // num_answers)
