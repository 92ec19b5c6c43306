"""What models need and take, from what their files say: nothing is read from the hub."""

from pathlib import Path

from batching.backend_calls.machine import Machine
from batching.config import EngineConfig
from batching.errors import ModelLoadError
from batching.fit.estimate import estimate
from batching.model_files.description import describe, read_config
from batching.model_files.references import BUNDLED_MODEL, bundled_file, is_hub_id
from batching.model_files.snapshot import CONFIG
from batching.model_files.vision import expected_vision
from batching.model_info.vision import TEXT_ONLY, NoVision, VisionModel
from batching.models.residency.model_state import MemoryNeed


def memory_need(config: EngineConfig, machine: Machine) -> MemoryNeed | None:
    """Return the bytes that a model needs on the device; None where its files are not here, or say nothing.

    It reads the headers of files.
    """
    try:
        path = local_path(config.model)
        if path is None:
            return None
        needs = estimate(describe(path), config, machine.compute)
    except (OSError, ModelLoadError):
        # Its load says what is wrong with it.
        return None
    of_process = needs.overhead
    least, wanted = needs.least - of_process, needs.wanted - of_process
    if config.num_blocks is None and config.max_blocks is None:
        # The pool takes what there is.
        wanted = max(least, int(config.memory_fraction * machine.memory))
    return MemoryNeed(least, wanted)


def vision_on_disk(config: EngineConfig) -> VisionModel | NoVision | None:
    """Return what a load is expected to find of a model's vision part; None where its files are not here, or say nothing."""
    try:
        path = local_path(config.model)
        if path is None:
            return None
        return TEXT_ONLY if path.is_file() else expected_vision(read_config(path / CONFIG), path)
    except (OSError, ModelLoadError):
        return None


def local_path(reference: str) -> Path | None:
    """Return the file or directory of a model that is on this machine; None if it is not."""
    if reference == BUNDLED_MODEL:
        return bundled_file()
    path = Path(reference).expanduser()
    if path.exists():
        return path
    if not is_hub_id(reference):
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(reference, "config.json")
    return Path(found).parent if isinstance(found, str) else None
