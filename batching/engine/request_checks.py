"""The checks of a request against the model, made once before it is queued."""

from collections.abc import Sequence

from batching.adapters.adapter import NoAdapters
from batching.errors import ContextLengthExceeded, EmptyPrompt, InputTooLong, InvalidRequest
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_info.model import ModelInfo
from batching.model_info.vision import VisionModel


def check_request(model: ModelInfo, spec: SequenceSpec) -> None:
    """Check that the model can serve a request.

    Raises:
        EmptyPrompt: the prompt has no tokens.
        ContextLengthExceeded: the prompt and `max_tokens` do not fit the context.
        InvalidRequest: a token id is not in the vocabulary, an image has too many tokens, the model writes no text, or it takes no
            adapters.
    """
    if spec.pooling is None:
        check_generates(model)
    prompt, sampling, limit = spec.prompt, spec.sampling, model.max_model_len
    if not prompt:
        raise EmptyPrompt
    if len(prompt) + (spec.max_tokens or 1) > limit:
        raise ContextLengthExceeded(len(prompt), spec.max_tokens, limit)
    check_token_ids(model, "prompt", (min(prompt), max(prompt)))
    check_token_ids(model, "logprob_token_ids", sampling.logprob_token_ids)
    check_token_ids(model, "logit_bias", [token_id for token_id, _ in sampling.logit_bias])
    _check_spans(model, spec)
    if spec.adapter is not None and isinstance(model.adapters, NoAdapters):
        raise InvalidRequest("model", f"the model '{model.model_id}' {model.adapters.reason}")


def check_generates(model: ModelInfo) -> None:
    """Check that the model writes text.

    Raises:
        InvalidRequest: it is an encoder.
    """
    if not model.generates:
        message = f"the model '{model.model_id}' is an encoder, which writes no text"
        raise InvalidRequest("model", message)


def _check_spans(model: ModelInfo, spec: SequenceSpec) -> None:
    lengths = [span.stop - span.start for placed in spec.images for span in placed.spans]
    limit = model.vision.max_span if isinstance(model.vision, VisionModel) else 0
    if max(lengths, default=0) > limit:
        reason = f"an image has {max(lengths)} tokens that see each other; the limit is {limit}"
        raise InvalidRequest("images", reason)


def check_input(model: ModelInfo, param: str, token_ids: Sequence[int], limit: int) -> None:
    """Check that the model can read one input of at most `limit` tokens; `param` names it in errors.

    Raises:
        InvalidRequest: the input is empty or has a token id that is not in the vocabulary.
        InputTooLong: the input has more than `limit` tokens.
    """
    if not token_ids:
        raise InvalidRequest(param, "it has no tokens; at least one is needed")
    if len(token_ids) > limit:
        raise InputTooLong(len(token_ids), limit, param)
    check_token_ids(model, param, (min(token_ids), max(token_ids)))


def check_token_ids(model: ModelInfo, param: str, token_ids: Sequence[int]) -> None:
    """Check that token ids are in the vocabulary; `param` names them in the error.

    Raises:
        InvalidRequest: one of them is not.
    """
    for token_id in token_ids:
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(param, f"token id {token_id} is not in [0, {model.vocab_size})")
