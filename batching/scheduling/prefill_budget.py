"""Divides the prompt tokens of a step among the requests that prefill."""

from collections.abc import Sequence


def share_prefill_budget(num_pending: Sequence[int], budget: int, max_chunk: int) -> list[int]:
    """Return how many tokens each prompt may prefill in this step, `budget` in all.

    Half of the budget goes to the prompt that is due first, so that it always advances; the rest goes to
    the shortest ones, so that they do not wait for the whole prefill of a long one.

    num_pending: the pending tokens of each prompt, in the order of due times.
    max_chunk: the most tokens of one prompt.
    """
    if not num_pending:
        return []
    granted = [0] * len(num_pending)
    shortest_first = sorted(range(len(num_pending)), key=num_pending.__getitem__)
    shares = [(0, -(-budget // 2)), *((i, budget) for i in shortest_first)]
    for i, share in shares:
        more = min(num_pending[i] - granted[i], max_chunk - granted[i], share, budget)
        granted[i] += more
        budget -= more
    return granted
