"""A loaded model on the native kernels: its weights are packed, or come from the weights cache."""

import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, Final

import mlx.core as mx

from batching.backend.adapters.linears import AdaptedLinears
from batching.backend.exceptions import one_line
from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.gguf.model import evaluate
from batching.backend.hooks.changes import Changes
from batching.backend.loader import LoadedModel
from batching.backend.platform import Instead, PreparedModel
from batching.backend.platforms.cpu.adapters import PackedLinears
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.layers.scaling import Shifts, scale_inputs
from batching.backend.platforms.cpu.model import use_kernels
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.weights.storage import dtype_name
from batching.backend.weights_cache.cache import CacheEntry, NotKept
from batching.backend.weights_cache.weights_file import WeightsFile
from batching.engine.load_slices import ONE_SLICE, LoadSlices
from batching.errors import ModelLoadError

logger = logging.getLogger(__name__)

# The key of the note beside the weights.
_SHIFTS: Final = "inputs, scaled by channel"


class FurtherRounding(Enum):
    """How activations are rounded once the self-check has passed.

    BFLOAT16: to bfloat16, and so are weights; a matrix unit of the processor multiplies both.
    SCALED: to 8 bits, scaled by channel, for weights of up to 4 bits.
    """

    BFLOAT16 = auto()
    SCALED = auto()


@dataclass(frozen=True)
class _Stored:
    """Packed weights of a file."""

    file: WeightsFile
    kernels: Any

    @property
    def others(self) -> Mapping[str, mx.array]:
        return self.file.others

    def packed(self, path: str) -> Any:
        return self.file.packed(self.kernels, path)


class PackedModel(PreparedModel):
    """A model whose weights are packed, or are those that an earlier start has stored."""

    def __init__(
        self,
        loaded: LoadedModel,
        native: Native,
        entry: CacheEntry,
        *,
        input_bits: int,
        further_rounding: FurtherRounding | None,
        kv_dtype: mx.Dtype | None,
        if_not_invariant: Instead | None,
    ) -> None:
        """`entry` is where packed weights are kept; `pack` comes next."""
        super().__init__(loaded)
        self._native, self._entry, self._input_bits = native, entry, input_bits
        self._further_rounding = further_rounding
        self._if_not_invariant = if_not_invariant
        self._check_name = f"check, keys and values in {_name(kv_dtype)}"
        self._packing = Packing(native.module)

    def pack(self, changes: Changes, slices: LoadSlices = ONE_SLICE) -> bool:
        """Put the model on the kernels; return False if a stored file was damaged, and the model is spoilt.

        Raises:
            ModelLoadError: the model does not fit in memory.
        """
        try:
            with self._entry.opened() as file:
                if file is not None:
                    self._use_stored(file, changes, slices)
        except ModelLoadError:
            raise
        except Exception as error:
            logger.warning("packed weights are made again: %s", one_line(error))
            self._entry.drop()
            return False
        if file is None:
            self._pack_now(changes, slices)
        self.known_result = self._known_result()
        return True

    def finish(self, result: CheckResult, *, is_invariant: bool) -> Instead | None:
        if self.known_result is None:
            self._entry.keep_note(self._check_name, result)
        if self._if_not_invariant is not None and not is_invariant:
            # They cannot be used at another start either.
            self._entry.drop()
            return self._if_not_invariant
        # Not before: the check would take what that loses for a fault.
        self._round_further()
        return None

    @property
    def num_bytes(self) -> int:
        packed = {id(each): int(each.nbytes) for each in self._packing.packed.values()}
        return super().num_bytes + sum(packed.values())

    @property
    def note(self) -> str:
        return "4-bit ones with 8 bits, scaled by channel" if self._packing.shifts else ""

    def packed_linears(self, paths: Collection[str]) -> AdaptedLinears:
        packed = {path: each for path, each in self._packing.packed.items() if path in paths}
        return PackedLinears(self._native.module, packed)

    def _known_result(self) -> CheckResult | None:
        match self._entry.note(self._check_name):
            case [str(mode), bool(gathers_all), str(reason)] if mode in list(ExecutionMode):
                return CheckResult(ExecutionMode(mode), gathers_all, reason)
        return None

    def _use_stored(self, file: WeightsFile, changes: Changes, slices: LoadSlices) -> None:
        started = time.monotonic()
        stored = _Stored(file, self._native.module)
        packing = Packing(self._native.module, self._input_bits, stored=stored, slices=slices)
        self._use_kernels(packing, changes)
        self.source = f"read from {file.path} in {time.monotonic() - started:.1f} s"

    def _pack_now(self, changes: Changes, slices: LoadSlices) -> None:
        started = time.monotonic()
        packing = Packing(self._native.module, self._input_bits, self.loaded.read, slices=slices)
        self._use_kernels(packing, changes)
        self.source = f"in {time.monotonic() - started:.1f} s"
        try:
            self._entry.keep(packing.packed, packing.others, slices)
        except NotKept as reason:
            self.source += f", not kept: {reason}"
        else:
            seconds = time.monotonic() - started
            self.source += f", after {seconds:.1f} s kept in {self._entry.path}"

    def _round_further(self) -> None:
        """Multiply in bfloat16, or round activations to 8 bits where that loses little.

        It must not be called while the model runs.
        """
        for weights in self._packing.of_one_input:
            self._native.module.use_bfloat16(weights)
        shifts = self._packing.shifts
        scale_inputs(self._native.module, self._packing.packed, shifts)
        if self._packing.finds_shifts:
            self._entry.keep_note(_SHIFTS, {k: b64encode(v).decode() for k, v in shifts.items()})

    def _known_shifts(self) -> Shifts | None:
        """Return those of an earlier start; None if they are not known."""
        match self._entry.note(_SHIFTS):
            case dict() as note:
                return {path: b64decode(text) for path, text in note.items()}
        return None

    def _use_kernels(self, packing: Packing, changes: Changes) -> None:
        self._packing = packing
        if self._further_rounding is FurtherRounding.SCALED:
            known = self._known_shifts()
            packing.finds_shifts, packing.shifts = known is None, known or {}
        else:
            packing.finds_inputs = self._further_rounding is FurtherRounding.BFLOAT16
        model = use_kernels(self.loaded.model, self._native, packing=packing, changes=changes)
        evaluate(model, packing.slices)
        self.loaded = replace(self.loaded, model=model)


def _name(dtype: mx.Dtype | None) -> str:
    return "their own type" if dtype is None else dtype_name(dtype)
