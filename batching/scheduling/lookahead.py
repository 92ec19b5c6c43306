"""Which steps can be followed by others that are planned before their outputs are known."""

from batching.steps.step_plan import Slice


def is_predictable(s: Slice, *, may_draft: bool) -> bool:
    """Return whether what follows a slice is known but for one token.

    may_draft: the next step may begin with drafts, if the request's tokens suggest some.
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
    """Return whether the request of a slice has more to compute, unless a stop token ends it."""
    return not s.samples or s.request.num_output_tokens + 1 < s.request.max_tokens
