"""The errors of the engine.

EngineError
├── RequestError            the client can fix it
│   ├── EmptyPrompt
│   ├── ContextLengthExceeded
│   │   └── InputTooLong    one input of several
│   ├── InvalidRequest      a parameter that this model cannot serve
│   └── AdapterError         a LoRA adapter cannot be read, or does not fit the model
│       └── AdapterChanged   its files are not what was loaded
├── RequestFailed           the step that served the request raised
├── DeadlineExceeded        the deadline of the request has passed
├── SlowReader              too much is unread, most of it by this request's caller
├── EngineStalled           a step takes longer than the step timeout
├── EngineStopped           it serves no more requests
│   ├── EngineClosed        since the server shuts down
│   └── RankLost            since a process is gone that computes a part of the model
│       ├── RankRefused     it cannot take part, and could not after a new start either
│       └── RanksEnded      rank 0 has ended them all, on purpose
├── ModelNotFound           no such model is served here
├── ModelTooLarge           there is never room for the model beside those that stay
└── ModelLoadError          the model cannot be found or read
    ├── PoolTooLarge        the KV pool that was asked for does not fit
    └── UnsupportedKVDType  no pool here keeps keys and values in it
"""

from collections.abc import Sequence
from typing import ClassVar, Final

_MIB: Final = 1 << 20
_MAX_MESSAGE: Final = 300


class EngineError(Exception):
    """Root of everything raised on purpose."""


class RequestError(EngineError):
    """A request that cannot be served as it is; `param` names the field to change."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EmptyPrompt(RequestError):
    def __init__(self) -> None:
        super().__init__("the prompt has no tokens; at least one is needed", "prompt")


class ContextLengthExceeded(RequestError):
    """Prompt and requested output together do not fit the context.

    `max_tokens` is None when the prompt alone leaves no room for one token.
    """

    def __init__(
        self, num_prompt_tokens: int, max_tokens: int | None, limit: int, param: str | None = None
    ) -> None:
        asked = num_prompt_tokens + (max_tokens or 0)
        parts = f"{num_prompt_tokens} in the prompt"
        if max_tokens is not None:
            parts += f", {max_tokens} for the completion"
        super().__init__(
            f"This model's maximum context length is {limit} tokens. "
            f"However, you requested {asked} tokens ({parts}). "
            "Please reduce the length of the prompt or of the completion.",
            param,
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class InputTooLong(ContextLengthExceeded):
    """An input of several that is too long for the model."""

    def __init__(self, num_tokens: int, limit: int, param: str) -> None:
        super().__init__(num_tokens, None, limit, param)
        message = (
            f"This model's maximum context length is {limit} tokens. However, {param} has "
            f"{num_tokens}. Please reduce its length, or set truncate_prompt_tokens."
        )
        self.args = (message,)


class InvalidRequest(RequestError):
    def __init__(self, param: str, message: str) -> None:
        super().__init__(message, param)


class AdapterError(RequestError):
    """Its message is one line, for an operator at the start and for a client at run time."""


class AdapterChanged(AdapterError):
    def __init__(self, adapter: str) -> None:
        super().__init__(
            f"the files of the adapter '{printable(adapter)}' have changed since it was loaded; load it again"
        )


class RequestFailed(EngineError):
    """The step that served this request raised; other requests continue."""

    def __init__(self, message: str = "the model failed while serving this request") -> None:
        super().__init__(message)


class DeadlineExceeded(EngineError):
    def __init__(self) -> None:
        super().__init__("the request's deadline passed before its completion was finished")


class SlowReader(EngineError):
    def __init__(self) -> None:
        super().__init__("the stream was read too slowly: too many of its tokens were waiting")


class EngineStalled(EngineError):
    def __init__(self) -> None:
        super().__init__("the model does not respond: its step has taken too long")


class EngineStopped(EngineError):
    def __init__(self) -> None:
        super().__init__("the engine has stopped and serves no requests")


class EngineClosed(EngineStopped):
    def __init__(self) -> None:
        EngineError.__init__(self, "the server is shutting down")


class RankLost(EngineStopped):
    """A rank is gone, or does not answer: what all ranks compute together has ended for good.

    rank: its number.
    status: the exit status that follows for each rank.
    """

    status: ClassVar[int] = 1

    def __init__(self, rank: int, reason: str) -> None:
        EngineError.__init__(self, f"rank {rank} {reason}")
        self.rank, self.reason = rank, reason


class RankRefused(RankLost):
    status = 2


class RanksEnded(RankLost):
    status = 0


class ModelNotFound(EngineError):
    def __init__(self, model_id: str, nearest: Sequence[str] = ()) -> None:
        """nearest: names that are like it."""
        hint = f"; did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
        super().__init__(f"the model '{model_id}' does not exist here{hint}")
        self.model_id = model_id


class ModelTooLarge(EngineError):
    def __init__(self, model_id: str, needed: int, limit: int, pinned: int) -> None:
        """needed, limit, pinned: bytes of the model, for it, and of models that are never unloaded."""
        beside = f" beside {-(-pinned // _MIB)} MiB of pinned models" if pinned else ""
        super().__init__(
            f"the model '{model_id}' needs {-(-needed // _MIB)} MiB, and {max(0, limit) // _MIB} MiB are "
            f"there for it{beside}"
        )


class ModelLoadError(EngineError):
    """Its message is one line for the operator."""


class PoolTooLarge(ModelLoadError):
    """More blocks were asked for than fit into the memory that is free."""

    def __init__(self, num_blocks: int, num_bytes: int, free: int, num_fitting: int) -> None:
        super().__init__(
            f"a KV pool of {num_blocks} blocks needs {-(-num_bytes // _MIB)} MiB; "
            f"{free // _MIB} MiB are free, which hold {num_fitting} blocks"
        )


class UnsupportedKVDType(ModelLoadError):
    def __init__(self, dtype: str, kernels: str, reason: str) -> None:
        super().__init__(f"{dtype} needs the {kernels} kernels, which are {reason}")


def printable(text: str) -> str:
    """Return foreign text as one bounded line without control characters."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line[:_MAX_MESSAGE])
