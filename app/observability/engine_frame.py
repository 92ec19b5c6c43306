"""Encodes a snapshot of an engine as a server-sent event."""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

from batching import EngineSnapshot, RequestSnapshot


class EngineCounts(NamedTuple):
    """Counts since watching began; `first_tokens` are the latest times to first token in seconds."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    step_seconds: float
    first_tokens: tuple[float, ...]


def encode_frame(snapshot: EngineSnapshot, counts: EngineCounts, reason: str | None) -> bytes:
    """Return the event; `reason` says why the engine is unhealthy, None if it is healthy."""
    store = snapshot.stats.store
    frame = {
        "unhealthy_reason": reason,
        "max_num_seqs": snapshot.max_num_seqs,
        "stats": snapshot.stats._asdict() | {"store": store and store._asdict()},
        "counts": counts._asdict() | {"first_tokens": _percentiles(counts.first_tokens)},
        "running": [_request(request) for request in snapshot.running],
        "waiting": [_request(request) for request in snapshot.waiting],
        "empty_blocks": _flat((start, stop - start) for start, stop in snapshot.empty_runs),
        "is_map_whole": snapshot.is_map_whole,
    }
    return b"data: " + json.dumps(frame, separators=(",", ":")).encode() + b"\n\n"


def _request(request: RequestSnapshot) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "status": request.status,
        "priority": request.priority.name.lower(),
        "age": round(request.age, 2),
        "effective_priority": round(request.effective_priority, 3),
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_output_tokens": request.num_output_tokens,
        "max_tokens": request.max_tokens,
        "num_preemptions": request.num_preemptions,
        "num_choices": request.num_choices,
        "blocks": _flat(request.runs),
        "adapter": request.adapter,
    }


def _flat(runs: Iterable[tuple[int, int]]) -> list[int]:
    """Return first block and length of each run, one after the other."""
    return list(chain.from_iterable(runs))


def _percentiles(times: Sequence[float]) -> dict[str, float] | None:
    if not times:
        return None
    ordered = sorted(times)
    return {
        name: round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4)
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }
