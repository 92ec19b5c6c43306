"""The plan of one step as a message: plain values, which nothing changes and which point to no request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from batching.adapters.adapter import NO_SLOT
from batching.adapters.slots import AdapterLoad
from batching.block_manager import BlockCopy, BlockHash, BlockIds
from batching.block_store.keys import Key
from batching.inputs.images import ImageInput, Span
from batching.inputs.sequence_spec import SequenceSpec
from batching.pooling import Vector
from batching.steps.token_output import TokenLogprobs

# Stands for the token that a step in flight samples.
UNKNOWN_TOKEN: Final = -1
NO_BLOCKS: Final = BlockIds()


@dataclass(frozen=True, slots=True)
class StartedSequence:
    """A sequence that the executor gets to know: it has its first slice in this step, or is a fork in one.

    A sequence that was preempted has ended for the executor, and starts again with what it has generated.

    seed: 64 bits; a token that is sampled depends on it and on the token's position.
    output_token_ids: the tokens that were generated before it was preempted.
    """

    sequence_id: int
    spec: SequenceSpec
    seed: int
    output_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """The tokens of one sequence that a step processes, from position `start` on.

    token_ids: at least one; the last `num_drafts` are proposed to follow the sequence's own.  The last
        own one is UNKNOWN_TOKEN where the step in flight samples it.
    blocks, window_blocks: the KV blocks of the sequence, in the main pool and in that of sliding-window
        layers.
    state_slot: the slot of its recurrent state; None if the model has none.
    adapter_slot: the slot of its adapter; 0 is none.
    num_samples: how many tokens are sampled for the sequence: one after each draft and one more, or none.
    forks: other choices of the same prompt, whose first tokens are also sampled from the last row.
    embeds: it completes a sequence with pooling, whose vector is returned.
    num_prompt_tokens: how many of its tokens are tokens of the prompt.
    num_scored: the number of prompt tokens, from position `start + 1` on, whose log probabilities are returned.
    is_prefill: the sequence had not begun to decode when this was planned.
    keep: positions before `stop`, ascending, whose recurrent states stay in the slot beside the state at
        `stop`.  States at positions after `start` are made in this step; the others are there already.
        States at all other positions are dropped.  A slice that starts at 0 starts without a state, any
        other slice with the state at `start`.
    spans: of its tokens, positions `[start, stop)` of those that see each other, in layers that see ahead.
    """

    sequence_id: int
    start: int
    token_ids: tuple[int, ...]
    blocks: BlockIds = NO_BLOCKS
    window_blocks: BlockIds = NO_BLOCKS
    state_slot: int | None = None
    adapter_slot: int = NO_SLOT
    num_drafts: int = 0
    num_samples: int = 0
    forks: tuple[int, ...] = ()
    embeds: bool = False
    num_prompt_tokens: int = 0
    num_scored: int = 0
    is_prefill: bool = False
    keep: tuple[int, ...] = ()
    spans: tuple[Span, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        """The position after the last token, drafts included."""
        return self.start + len(self.token_ids)

    @property
    def num_known(self) -> int:
        """The position after the sequence's own tokens, without drafts."""
        return self.stop - self.num_drafts

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def expects_token(self) -> bool:
        """True if the step in flight samples its last token."""
        return self.token_ids[-1] == UNKNOWN_TOKEN

    @property
    def scored_positions(self) -> range:
        """The prompt positions whose log probabilities this slice computes."""
        return range(self.start + 1, self.start + 1 + self.num_scored)

    @property
    def slot(self) -> int:
        """The slot of the recurrent state, in a model that has one."""
        assert self.state_slot is not None, "an admitted sequence has a slot"
        return self.state_slot

    def table(self, *, is_windowed: bool = False) -> BlockIds:
        """Return the blocks in the main pool, or in that of sliding-window layers."""
        return self.window_blocks if is_windowed else self.blocks

    def __str__(self) -> str:
        drafts = f"+{self.num_drafts}" if self.num_drafts else ""
        forks = "".join(f"&{fork}" for fork in self.forks)
        keep = "".join(f"@{position}" for position in self.keep)
        adapter = f"%{self.adapter_slot}" if self.adapter_slot else ""
        return f"{self.sequence_id}[{self.start}:{self.num_known}]{drafts}{forks}{keep}{adapter}"


class StateCopy(NamedTuple):
    """An order to give slot `target` the recurrent state that slot `source` has at `position`.

    The target then holds no other state.  Slots below `max_num_seqs` belong to admitted requests, those
    above it to checkpoints.
    """

    source: int
    target: int
    position: int

    def __str__(self) -> str:
        return f"{self.source}@{self.position}>{self.target}"


class SliceOutput(NamedTuple):
    """The result of processing one slice.

    token_ids: `num_samples` tokens for the sequence, then one for each fork.
    logprobs: one entry for each of these, if the request asks for them.
    prompt_logprobs: one entry for each of `scored_positions`.
    vector: the vector of a slice that `embeds`.
    completed: which of the sequences, itself and its forks, have reached the end of their constraint.
    errors: which of them cannot follow their constraint any further, and why.
    num_free: how many of the next tokens of each one with a constraint need no mask.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    vector: Vector | None = None
    completed: tuple[int, ...] = ()
    errors: tuple[tuple[int, str], ...] = ()
    num_free: tuple[tuple[int, int], ...] = ()


class EncodeOrder(NamedTuple):
    """An order to encode pieces `[first, stop)` of an image, which this sequence needs.

    The first piece begins the image; each of the others follows the one before, in the same step or a later one.
    """

    sequence_id: int
    image: ImageInput
    first: int
    stop: int
    num_pieces: int

    @property
    def is_last(self) -> bool:
        """True if the image has its rows with these pieces."""
        return self.stop == self.num_pieces

    @property
    def num_bytes(self) -> float:
        """The part of the image's bytes that is as large as that of its pieces."""
        return self.image.num_bytes * (self.stop - self.first) / self.num_pieces

    def __str__(self) -> str:
        is_whole = self.first == 0 and self.is_last
        return f"*{self.image.num_rows}" + ("" if is_whole else f"[{self.first}:{self.stop}]")


class SaveOrder(NamedTuple):
    """An order to store a block, or a state, as it is before the step.

    source: the block, or the slot of the state.
    parent, token_ids: the hash of the prefix before the block, and the block's tokens.
    position: of the state.
    """

    key: Key
    source: int
    parent: BlockHash
    token_ids: tuple[int, ...]
    position: int = 0

    def __str__(self) -> str:
        return f"{self.source}>{self.key.kind}"


class RestoreOrder(NamedTuple):
    """An order to write what was fetched into a block, or into slots of states, before the step.

    targets: the block, or the slots.
    position: of the state.
    """

    key: Key
    targets: tuple[int, ...]
    position: int = 0

    def __str__(self) -> str:
        return f"{self.key.kind}>{','.join(map(str, self.targets))}"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The slices of one forward pass, and what happens before it.

    slices: in the order of service, at most one per sequence; none if a step has only pieces of images.
    copies, state_copies: made before the step, in this order.
    started: the sequences of this step that the executor does not know yet.
    ended: the ids of sequences that it may forget.
    preempted: the sequences that it also forgets, because they lost their blocks; they start again later.
    encodes: images that are encoded, or pieces of them, before the slices; those whose last piece is among them
        have rows, which are kept, for the slices of this step on.
    dropped_images: the digests of images of which all is forgotten before that.
    adapters: those that are put into slots, before the slices.
    """

    slices: tuple[Slice, ...]
    copies: tuple[BlockCopy, ...] = ()
    preempted: tuple[int, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    started: tuple[StartedSequence, ...] = ()
    ended: tuple[int, ...] = ()
    encodes: tuple[EncodeOrder, ...] = ()
    dropped_images: tuple[bytes, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    restores: tuple[RestoreOrder, ...] = ()
    adapters: tuple[AdapterLoad, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if it would change nothing."""
        return not (self.slices or self.encodes or self.saves or self.restores or self.adapters)

    @property
    def gone(self) -> frozenset[int]:
        """The ids of all sequences whose blocks and slots belong to others now."""
        return frozenset((*self.ended, *self.preempted))

    @property
    def num_tokens(self) -> int:
        return sum(len(s) for s in self.slices)

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens of the step are prompt tokens, those computed again after preemption included."""
        return sum(s.num_prompt_tokens for s in self.slices)

    @property
    def num_decode_tokens(self) -> int:
        """How many tokens belong to sequences that decode, their drafts included."""
        return sum(len(s) for s in self.slices if not s.is_prefill)

    def __str__(self) -> str:
        """Return one line for logs and tests, as `0[0:8]&4@4 1[4:5]+2 3>9 -2 1@8>5`.

        In this order: slices, as `sequence[start:stop]`, with `+` the number of drafts, `&` forks and `@`
        kept states, and `%slot` of an adapter; copies of blocks, `source>target`; preempted sequences, `-sequence`; copies of states,
        `source@position>target`; images that are encoded, as `*rows`, or as `*rows[first:stop]` of their pieces.
        """
        return " ".join(
            [
                *map(str, self.slices),
                *map(str, self.copies),
                *(f"-{sequence_id}" for sequence_id in self.preempted),
                *map(str, self.state_copies),
                *map(str, self.encodes),
                *map(str, self.saves),
                *map(str, self.restores),
                *map(str, self.adapters),
            ]
        )
