"""The parameters of one request to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from batching.adapters.adapter import Adapter
from batching.constraints.protocol import Constraint
from batching.inputs.images import PlacedImage
from batching.inputs.retention import NOT_RETAINED, Retention
from batching.inputs.sampling_params import GREEDY, SamplingParams
from batching.pooling import PoolingParams
from batching.priority_queue import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSpec:
    """Everything that one prompt asks of the engine, from the API's layer to the executor.

    It never changes, and all choices of the prompt share it.  A new field of a request is added here only.

    prompt: token ids, at least one.
    max_tokens: the most tokens of each choice; None is as many as fit in the context.  It is 0 with `pooling`.
    stop_token_ids: tokens that end the output.
    constraint: a grammar, or a set of tokens, that the output must follow.
    is_best_effort: run only when no other request has work, as the lines of batches do.
    cache_salt: the prefix cache is shared only by requests with the same salt.
    retention: how long its cached blocks stay when others need room.
    reports_progress: the outputs also report how much of the prompt is prefilled.
    pooling: return one vector instead of tokens.
    images: those of the prompt, in its order; their tokens are in it already.
    num_choices: how many outputs are sampled; they share the KV blocks of the prompt.
    adapter: is added to the model for this prompt; None is the model alone.
    time_limit: seconds, from when it is submitted, after which it fails; None is no limit.
    """

    prompt: tuple[int, ...]
    max_tokens: int | None = None
    sampling: SamplingParams = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    constraint: Constraint | None = None
    priority: Priority = Priority.NORMAL
    is_best_effort: bool = False
    cache_salt: str = ""
    retention: Retention = NOT_RETAINED
    reports_progress: bool = False
    pooling: PoolingParams | None = None
    images: tuple[PlacedImage, ...] = ()
    num_choices: int = 1
    adapter: Adapter | None = None
    time_limit: float | None = None

    def with_prompt(self, prompt: Sequence[int]) -> "SequenceSpec":
        """Return the same for another prompt."""
        return replace(self, prompt=tuple(prompt))

    @property
    def cache_key(self) -> bytes:
        """What else keys and values depend on: they are shared only by prompts with the same."""
        salt = self.cache_salt.encode()
        if self.adapter is None:
            return salt
        # No salt has such a byte: none can be taken for another one with an adapter.
        return b"\xff%b %b" % (self.adapter.digest.encode(), salt)

    @property
    def output_limit(self) -> int:
        """The most tokens of the output, which the engine has set if the request did not."""
        assert self.max_tokens is not None, "the engine sets it when the request is submitted"
        return self.max_tokens
