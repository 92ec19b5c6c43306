"""The scheduler's parts: admission, token budgets, lookahead, snapshots."""
