"""`/v1/batches`: the request and the object."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator

from app.api.schemas.base import RequestModel
from app.api.schemas.fields import Id, Metadata, field_error
from app.batches.work import Counts
from app.storage.batches import StoredBatch

_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_MAX_WINDOW = 30 * 86_400


class ExpiresAfter(RequestModel):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class BatchRequest(RequestModel):
    input_file_id: Id
    endpoint: Id
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}[mhd]$")] = Field(
        default="24h", description="Minutes, hours or days, up to 30 days: `24h`."
    )
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("completion_window")
    @classmethod
    def _check_window(cls, window: str) -> str:
        if _seconds(window) > _MAX_WINDOW:
            raise field_error("it must be at most 30 days")
        return window

    @property
    def window_seconds(self) -> int:
        return _seconds(self.completion_window)


def _seconds(window: str) -> int:
    return int(window[:-1]) * _UNITS[window[-1]]


class BatchError(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: StoredBatch, counts: Counts | None) -> "BatchObject":
        """Describe a batch; `counts` are newer than what is stored."""
        completed, failed = counts or (batch.num_completed, batch.num_failed)
        faults = [BatchError(**fault) for fault in batch.errors]
        times: dict[str, Any] = {f"{status}_at": batch.times.get(status) for status in _TIMED}
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            errors=BatchErrors(data=faults) if faults else None,
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=batch.status,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            created_at=batch.created,
            expires_at=batch.expires,
            request_counts=RequestCounts(total=batch.num_total, completed=completed, failed=failed),
            metadata=None if batch.metadata is None else dict(batch.metadata),
            **times,
        )


_TIMED = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
