"""One line for each request, without a word of what it said."""

import logging
from collections.abc import Mapping, Sequence

from app.admission import Place
from app.schemas.usage import Usage
from batching import AnswerRecord

logger = logging.getLogger(__name__)


def log_request(
    completion_id: str, place: Place, answers: Sequence[AnswerRecord], usage: Usage, ending: str
) -> None:
    """Write what became of a request; times are in seconds.

    queue, first_token: from its arrival to the first step, and to the first token.
    """
    fields: dict[str, object] = {
        "id": completion_id,
        "request_id": place.request_id,
        "client": place.client.name,
        "prompt": usage.prompt_tokens,
        "cached": usage.prompt_tokens_details.cached_tokens,
        "output": usage.completion_tokens,
        "queue": _since(place, [answer.scheduled_time for answer in answers]),
        "first_token": _since(place, [answer.first_token_time for answer in answers]),
        "total": f"{place.elapsed():.3f}",
        "preemptions": sum(answer.num_preemptions for answer in answers),
        "reason": ending,
    }
    logger.info("%s", as_text(fields), extra={"fields": fields})


def as_text(fields: Mapping[str, object]) -> str:
    """Return `name=value` pairs; no value has a space."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _since(place: Place, times: Sequence[float | None]) -> str:
    known = [time for time in times if time is not None]
    return f"{min(known) - place.entered:.3f}" if known else "-"
