"""A request for the engine, independent of the API that received it.

Each API maps its request to `GenerationParams` and renders its prompts to token ids.  `build_job` turns
these into a `GenerationJob` for one engine: it applies the model's defaults, compiles grammars, and
checks everything about the request that its schema does not.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from app.generation.choice import TextOptions
from app.generation.dry import dry_params
from app.generation.params import BeamParams, GenerationParams
from app.parsing.grammars.marker_tokens import special_ids
from app.parsing.output_format import GrammarSpec, OutputFormat, Parser
from batching import (
    AllowedTokens,
    AsyncEngine,
    Constraint,
    InvalidRequest,
    ModelInfo,
    PlacedImage,
    SamplingParams,
    SequenceSpec,
    ThinkingBudget,
    check_token_ids,
)

Number = TypeVar("Number", int, float)

# The most log probabilities of a request's prompts, and of its outputs, alternatives and all choices included.  Each takes about
# a hundred bytes until the response is written, and as many in it.
MAX_LOGPROBS: Final = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """Work for one engine: `num_choices` completions of each prompt.

    specs: the engine's requests, one for each prompt; they differ in nothing else.
    text: how tokens become text.
    new_parser: makes the parser that splits a choice's text into reasoning, content and tool calls.
    """

    completion_id: str
    model_id: str
    specs: Sequence[SequenceSpec]
    text: TextOptions
    new_parser: Callable[[], Parser]
    beams: BeamParams | None

    @property
    def spec(self) -> SequenceSpec:
        """The first spec, for all that they have in common."""
        return self.specs[0]

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [spec.prompt for spec in self.specs]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(spec.prompt) for spec in self.specs)

    def written_tokens(self, num_cached: Mapping[int, int]) -> dict[float, int]:
        """Return how many computed tokens of prompts are retained, by the seconds for which they are.

        num_cached: of the prompts that are computed, by their index.
        """
        written: Counter[float] = Counter()
        for index, number in num_cached.items():
            spec = self.specs[index]
            written.update(spec.retention.num_written(len(spec.prompt), number))
        return dict(written)

    @property
    def num_image_tokens(self) -> int:
        images = (placed.image for spec in self.specs for placed in spec.images)
        return sum(len(image.token_ids) for image in images)


def build_job(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    params: GenerationParams,
    *,
    completion_id: str,
    max_output_tokens: int,
    output: OutputFormat | None = None,
    images: tuple[PlacedImage, ...] = (),
) -> GenerationJob:
    """Check a request and compile it for an engine.  It blocks, so do not call it on the event loop.

    prompts: token ids.
    max_output_tokens: the most tokens that all choices of one request may have together.
    output: the format of the output; None is plain text.
    images: those of the only prompt.

    Raises:
        RequestError: this model or this server can never serve the request as it is.
    """
    output = output or OutputFormat()
    model = engine.model
    max_tokens = _max_tokens(model, [len(p) for p in prompts], params, max_output_tokens)
    spec = _spec(engine, prompts[0], params, max_tokens, images)
    engine.check([spec.with_prompt(prompt) for prompt in prompts])
    _check_prompt_logprobs(prompts, params)
    asks_for_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    if asks_for_logprobs or output.thinking is not None:
        # The first call reads the vocabulary, which takes up to a second.
        engine.grammars.token_bytes(0)
    constraint = _constraint(engine, params, output.grammar)
    if output.thinking is not None:
        constraint = ThinkingBudget(output.thinking, constraint, engine.grammars.token_bytes)
    spec = replace(spec, constraint=constraint)
    if spec.max_tokens == 0:
        # To read a prompt, a token has to be sampled.
        spec = replace(spec, max_tokens=1)
    return GenerationJob(
        completion_id=completion_id,
        model_id=model.model_id,
        specs=[spec.with_prompt(prompt) for prompt in prompts],
        text=_text_options(model, params, spec.stop_token_ids, output.visible_special_ids),
        new_parser=output.new_parser,
        beams=params.beams,
    )


def _spec(
    engine: AsyncEngine,
    prompt: Sequence[int],
    params: GenerationParams,
    max_tokens: int | None,
    images: tuple[PlacedImage, ...],
) -> SequenceSpec:
    model = engine.model
    return SequenceSpec(
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=replace(sampling_params(model, params), dry=dry_params(engine, params.dry)),
        stop_token_ids=_stop_token_ids(model, params),
        cache_salt=params.cache_salt or "",
        retention=params.retention,
        reports_progress=params.report_progress,
        images=images,
        num_choices=params.num_choices,
    )


def _check_prompt_logprobs(prompts: Sequence[Sequence[int]], params: GenerationParams) -> None:
    if params.prompt_logprobs is None:
        return
    number = sum(map(len, prompts)) * params.num_choices * (1 + params.prompt_logprobs)
    if number > MAX_LOGPROBS:
        message = (
            f"{number} log probabilities of prompt tokens and of their alternatives in all choices are asked "
            f"for; {MAX_LOGPROBS} are the most"
        )
        raise InvalidRequest("prompt_logprobs", message)


def _stop_token_ids(model: ModelInfo, params: GenerationParams) -> frozenset[int]:
    check_token_ids(model, "stop_token_ids", params.stop_token_ids)
    eos_token_ids = frozenset() if params.ignore_eos else model.eos_token_ids
    return frozenset(i for i in eos_token_ids if i < model.vocab_size) | {*params.stop_token_ids}


def sampling_params(model: ModelInfo, params: GenerationParams) -> SamplingParams:
    """Return the parameters of a request's sampling, in tokens of the model, without DRY."""
    defaults = model.sampling_defaults
    return SamplingParams(
        temperature=_first(params.temperature, defaults.temperature, 1.0),
        top_p=_first(params.top_p, defaults.top_p, 1.0),
        top_k=max(0, _first(params.top_k, defaults.top_k, 0)),
        min_p=_first(params.min_p, defaults.min_p, 0.0),
        top_n_sigma=params.top_n_sigma,
        typical_p=params.typical_p,
        xtc_probability=params.xtc_probability,
        xtc_threshold=params.xtc_threshold,
        temperature_last=params.temperature_last,
        dynatemp_range=params.dynatemp_range,
        dynatemp_exponent=params.dynatemp_exponent,
        repetition_penalty=_first(params.repetition_penalty, defaults.repetition_penalty, 1.0),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=tuple(params.logit_bias.items()),
        min_tokens=params.min_tokens,
        bad_words=tuple(dict.fromkeys(_bad_words(model, params.bad_words))),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logprob_token_ids=tuple(dict.fromkeys(params.logprob_token_ids)),
        seed=params.seed,
    )


def _first(requested: Number | None, recommended: Number | None, default: Number) -> Number:
    if requested is not None:
        return requested
    return default if recommended is None else recommended


def _bad_words(model: ModelInfo, words: Sequence[str]) -> Iterator[tuple[int, ...]]:
    """Yield the tokens of each word, at the beginning of a text and after a space."""
    encode = model.tokenizer.encode
    texts = (text for word in words for text in (word, f" {word.lstrip()}"))
    tokens = (tuple(encode(text, add_special_tokens=False)) for text in texts)
    # A tokenizer can have more tokens than its model.
    return (word for word in tokens if word and max(word) < model.vocab_size)


def _max_tokens(
    model: ModelInfo, lengths: Sequence[int], params: GenerationParams, limit: int
) -> int | None:
    """Return the most tokens of one choice; `limit` bounds those of all choices together.

    Tokens with log probabilities are bounded by `MAX_LOGPROBS`, too.  None is as many as fit in the context.

    Raises:
        InvalidRequest: the request asks for more.
    """
    num_sequences = len(lengths) * params.num_choices
    num_logprobs, each = _num_logprobs(params), ""
    if num_logprobs * limit > MAX_LOGPROBS:
        limit = MAX_LOGPROBS // num_logprobs
        each = f", each with {num_logprobs} log probabilities,"
    max_tokens = params.max_tokens
    room = max(1, model.max_model_len - max(lengths))
    if max_tokens is None and params.default_max_tokens is not None:
        max_tokens = min(params.default_max_tokens, room)
    if max_tokens is not None and params.clamp_max_tokens:
        max_tokens = min(max_tokens, room, max(1, limit // num_sequences))
    if max_tokens is None:
        longest = max(1, model.max_model_len - min(lengths))
        return None if num_sequences * longest <= limit else max(1, limit // num_sequences)
    if num_sequences * max_tokens > limit:
        message = f"{num_sequences} choices of {max_tokens} tokens{each} are more than the {limit} "
        raise InvalidRequest("max_tokens", f"{message}that one request may ask for")
    return max_tokens


def _num_logprobs(params: GenerationParams) -> int:
    """Return how many log probabilities come with each token of the output."""
    if params.logprobs is None:
        return 0
    return 1 + (len(set(params.logprob_token_ids)) or params.logprobs)


def _constraint(
    engine: AsyncEngine, params: GenerationParams, grammar: GrammarSpec | None
) -> Constraint | None:
    if grammar is None:
        if params.allowed_token_ids is None:
            return None
        check_token_ids(engine.model, "allowed_token_ids", params.allowed_token_ids)
        return AllowedTokens(params.allowed_token_ids)
    if params.allowed_token_ids is not None:
        raise InvalidRequest("allowed_token_ids", f"it cannot be combined with {grammar.param}")
    compiled = engine.grammars.compile(grammar.grammar, param=grammar.param)
    rest = compiled.begun_with(grammar.begun)
    if rest.error is not None:
        raise InvalidRequest(grammar.param, "the grammar does not allow what the prompt ends with")
    return rest


def _text_options(
    model: ModelInfo,
    params: GenerationParams,
    stop_token_ids: frozenset[int],
    visible_ids: frozenset[int],
) -> TextOptions:
    hidden = frozenset() if params.include_stop_str_in_output else stop_token_ids
    if visible_ids and params.skip_special_tokens:
        hidden |= special_ids(model) - visible_ids
    return TextOptions(
        hidden_token_ids=hidden | stop_token_ids & model.eos_token_ids,
        stops=params.stop,
        include_stop=params.include_stop_str_in_output,
        min_tokens=params.min_tokens,
        skip_special_tokens=params.skip_special_tokens and not visible_ids,
        is_empty=params.max_tokens == 0,
        has_hidden_logprobs=params.has_hidden_logprobs,
        has_cut_logprobs=params.has_cut_logprobs,
    )
