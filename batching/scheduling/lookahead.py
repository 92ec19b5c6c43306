"""Which steps the next one can be planned behind, before their outputs are known."""

from batching.steps.step_plan import Slice


def is_predictable(s: Slice, *, may_draft: bool) -> bool:
    """Return whether the next slice of a request is known except for the value of one token.

    may_draft: the next step may have drafts for it.
    """
    request = s.request
    if s.drafts or s.forks or request.pooling is not None or request.wants_prompt_logprobs:
        return False
    if not s.samples:
        return True
    if request.constraint is not None:
        return False
    return not (may_draft and request.drafter.may_draft(request.token_ids))


def goes_on(s: Slice) -> bool:
    """Return whether the request has more to compute after this slice, unless it samples a stop token."""
    return not s.samples or s.request.num_output_tokens + 1 < s.request.max_tokens
