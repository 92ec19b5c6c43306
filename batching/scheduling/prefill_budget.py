"""Divides the prompt tokens of a step among the requests that prefill."""

from collections.abc import Sequence


def share_prefill_budget(
    num_pending: Sequence[int], budget: int, max_chunk: int, due_first: int = 0
) -> list[int]:
    """Return how many tokens each prompt may prefill in this step, `budget` in all.

    Half of the budget goes to the first prompt, a quarter to the one that is due first if that is another
    one, so that both always advance; the rest goes to the shortest ones, so that they do not wait for
    the whole prefill of a long one.

    num_pending: the pending tokens of each prompt, in the order of the batch.
    max_chunk: the most tokens of one prompt.
    due_first: the index of the one that is due first; those before it are of higher classes.
    """
    if not num_pending:
        return []
    granted = [0] * len(num_pending)
    shortest_first = sorted(range(len(num_pending)), key=num_pending.__getitem__)
    shares = [(0, -(-budget // 2)), *((i, budget) for i in shortest_first)]
    if due_first:
        shares.insert(1, (due_first, -(-budget // 4)))
    for i, share in shares:
        more = min(num_pending[i] - granted[i], max_chunk - granted[i], share, budget)
        granted[i] += more
        budget -= more
    return granted
