"""Puts a loaded model on the native kernels: packs its weights, or takes them from the weights cache."""

import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from batching.backend.exceptions import one_line
from batching.backend.gguf.model import evaluate
from batching.backend.loader import LoadedModel
from batching.backend.platforms.cpu.layers.packing import Packing
from batching.backend.platforms.cpu.layers.scaling import Shifts, scale_inputs
from batching.backend.platforms.cpu.model import use_kernels
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.precision import FurtherRounding
from batching.backend.self_check.verdict import Verdict, Way
from batching.backend.weights.storage import dtype_name
from batching.backend.weights_cache.cache import CacheEntry, NotKept, WeightsCache, default_folder
from batching.backend.weights_cache.weights_file import WeightsFile
from batching.config import EngineConfig
from batching.errors import ModelLoadError

logger = logging.getLogger(__name__)

# What is noted beside the weights.
_SHIFTS: Final = "inputs, scaled by channel"


class CannotUseFile(Exception):
    """The cached file of the packed weights was damaged and deleted; the model has to be loaded again."""


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


class PackedModel:
    """Packs the weights of a model, or uses those that an earlier start has stored."""

    def __init__(
        self,
        config: EngineConfig,
        native: Native,
        loaded: LoadedModel,
        *,
        input_bits: int,
        further_rounding: FurtherRounding | None,
        dtype: mx.Dtype | None,
    ) -> None:
        self._native, self._loaded, self._input_bits = native, loaded, input_bits
        self._further_rounding = further_rounding
        self._packing = Packing(native.module)
        folder = config.weights_cache_dir or default_folder()
        max_bytes = config.weights_cache_gib << 30
        if folder is None:
            logger.warning("packed weights are not kept: there is no home directory for them")
            folder, max_bytes = Path(), 0
        self._entry: CacheEntry = WeightsCache(folder, max_bytes).entry(
            Path(loaded.source),
            config.model_id,
            isa=native.isa,
            input_bits=input_bits,
            dtype=None if dtype is None else dtype_name(dtype),
        )

    def verdict(self, kv_dtype: mx.Dtype | None) -> Verdict | None:
        """Return the result of the self-check at an earlier start; None if it is not known."""
        match self._entry.note(_note(kv_dtype)):
            case [str(way), bool(gathers_all), str(reason)] if way in list(Way):
                return Verdict(Way(way), gathers_all, reason)
        return None

    def keep_verdict(self, kv_dtype: mx.Dtype | None, verdict: Verdict) -> None:
        self._entry.keep_note(_note(kv_dtype), verdict)

    def drop(self) -> None:
        """Discard the packed weights, also from the cache: they cannot be used at another start either."""
        self._entry.drop()

    def on_kernels(self) -> tuple[LoadedModel, str]:
        """Return the model on the kernels, and a line for the banner about where its weights come from.

        Raises:
            ModelLoadError: the model does not fit in memory.
            CannotUseFile: the cached file was damaged.
        """
        try:
            with self._entry.opened() as file:
                if file is not None:
                    return self._from(file)
        except ModelLoadError:
            raise
        except Exception as error:
            logger.warning("packed weights are made again: %s", one_line(error))
            self._entry.drop()
            raise CannotUseFile from error
        return self._packed()

    def _from(self, file: WeightsFile) -> tuple[LoadedModel, str]:
        started = time.monotonic()
        stored = _Stored(file, self._native.module)
        model = self._use_kernels(Packing(self._native.module, self._input_bits, stored=stored))
        return model, f"read from {file.path} in {time.monotonic() - started:.1f} s"

    def _packed(self) -> tuple[LoadedModel, str]:
        started = time.monotonic()
        packing = Packing(self._native.module, self._input_bits, self._loaded.read)
        model = self._use_kernels(packing)
        line = f"in {time.monotonic() - started:.1f} s"
        try:
            self._entry.keep(packing.packed, packing.others)
        except NotKept as reason:
            return model, f"{line}, not kept: {reason}"
        seconds = time.monotonic() - started
        return model, f"{line}, after {seconds:.1f} s kept in {self._entry.path}"

    @property
    def scales_inputs(self) -> bool:
        """Whether activations are rounded to 8 bits, scaled by channel, for some weights."""
        return bool(self._packing.shifts)

    def round_further(self) -> None:
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

    def _use_kernels(self, packing: Packing) -> LoadedModel:
        self._packing = packing
        if self._further_rounding is FurtherRounding.SCALED:
            known = self._known_shifts()
            packing.finds_shifts, packing.shifts = known is None, known or {}
        else:
            packing.finds_inputs = self._further_rounding is FurtherRounding.BFLOAT16
        model = use_kernels(self._loaded.model, self._native, packing=packing)
        evaluate(model)
        return replace(self._loaded, model=model)


def _note(kv_dtype: mx.Dtype | None) -> str:
    return f"check, keys and values in {'their own type' if kv_dtype is None else dtype_name(kv_dtype)}"
