"""Which steps the next one can be planned behind, before their outputs are known."""

from batching.request import BatchRequest
from batching.steps.step_plan import Slice


def is_predictable(s: Slice, request: BatchRequest, *, may_draft: bool) -> bool:
    """Return whether the next slice of a request is known except for the value of one token.

    may_draft: the next step may have drafts for it.
    """
    if s.num_drafts or s.forks or request.spec.pooling or request.wants_prompt_logprobs:
        return False
    if not s.num_samples:
        return True
    # The token in flight, and the one behind it.
    if request.num_free < 2:
        return False
    return not (may_draft and request.drafter.may_draft(request.token_ids))


def goes_on(s: Slice, request: BatchRequest) -> bool:
    """Return whether the request has more to compute after this slice, unless it samples a stop token."""
    return not s.num_samples or request.num_output_tokens + 1 < request.spec.output_limit
