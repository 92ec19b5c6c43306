"""One line for each request, without any text of its prompt or output."""

import logging

from app.observability.logs import logfmt
from app.observability.request_record import RequestRecord

logger = logging.getLogger(__name__)


def log_request(record: RequestRecord) -> None:
    """Log a finished request; times are in seconds."""
    usage = record.usage
    fields: dict[str, object] = {
        "id": record.completion_id,
        "request_id": record.request_id,
        "client": record.client_name,
        "prompt": usage.num_prompt_tokens,
        "cached": usage.num_cached_tokens,
        "output": usage.num_output_tokens,
        "queue": _seconds(record.queue_time),
        "first_token": _seconds(record.first_token_time),
        "total": _seconds(record.elapsed),
        "preemptions": record.num_preemptions,
        "reason": record.outcome,
    }
    if adapter := next((s.adapter for s in record.sequences if s.adapter is not None), None):
        fields["adapter"] = adapter
    logger.info("%s", logfmt(fields), extra={"fields": fields})


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
