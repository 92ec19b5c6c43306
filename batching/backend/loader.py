"""Loads models: from a reference to a model that is ready to run, with its tokenizer.

A reference is the name of the bundled model, a `.gguf` file, a directory with a `config.json`, or the
id of a repository on the Hugging Face hub.
"""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config, load_model as load_mlx_model, load_tokenizer
from transformers import PreTrainedTokenizerBase

from batching.backend.exceptions import one_line
from batching.backend.former_config import former_values
from batching.backend.generation_config import directory_defaults, gguf_defaults
from batching.backend.gguf.model import GgufOutline, arrays_of, evaluate
from batching.backend.gguf.storage import num_bytes, stored_tensors as tensors_of_file
from batching.backend.gguf.tokenizer import build_tokenizer, with_chat_template
from batching.backend.memory.device import check_room, memory_in_use
from batching.backend.pooling.causal import why_not_causal
from batching.backend.pooling.description import (
    MODULES,
    NO_DESCRIPTION,
    Description,
    describe_directory,
    describe_file,
)
from batching.backend.pooling.trunk_weights import trunk_classes, trunk_config
from batching.backend.vision.mlx_vlm_text import text_model_classes
from batching.backend.vision.text_part import has_text_part, text_part_classes
from batching.backend.weights.dequantize import dequantize
from batching.backend.weights.empty_groups import empty_groups_rejected
from batching.backend.weights.storage import dtype_name, storage_line, stored_tensors
from batching.backend.yarn import leave_untruncated
from batching.engine.load_slices import ONE_SLICE, LoadCancelled, LoadSlices
from batching.errors import ModelLoadError
from batching.model_files.context_length import declared_context
from batching.model_files.gguf_header import read_header
from batching.model_files.model_types import RENAMED, TEXT_OF_MLX_VLM
from batching.model_files.references import (
    BUNDLED_MODEL as BUNDLED_MODEL,
    HOW_TO_BUNDLE,
    bundled_file,
    hub_files,
    is_hub_id,
)
from batching.model_files.snapshot import CONFIG, WEIGHTS, missing_files
from batching.model_info.sampling_defaults import SamplingDefaults

logger = logging.getLogger(__name__)

Config = dict[str, Any]  # config.json's contents: any JSON
Divide = Callable[[nn.Module], None]

# Measured: "What is the capital of France?" gets Paris 200 times of 200; at temperature 0.1, 0.2 and
# 0.3 it does not 2, 6 and 6 times of 20.  Of 36 long completions 20 end in a loop without the
# penalty and 7 with it; of 78 easy questions 56 and 58 are answered right.
_BUNDLED_DEFAULTS: Final = SamplingDefaults(temperature=0.0, repetition_penalty=1.05)
_LAYER_KEYS: Final = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
# A hundred times what models have: building the layers of a hostile config would never end.
_MAX_LAYERS: Final = 10_000
# Older versions of transformers wrote a processor's template here.
_PROCESSOR_TEMPLATE: Final = "chat_template.json"


def _is_read(_: str) -> None:
    """Read nothing: all arrays are there, or are read when they are computed."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, with its tokenizer.

    All its arrays are computed, unless it was loaded for the native kernels, which read them later.

    description: what its files say about embeddings and reranking.
    max_model_len: the declared context in tokens; None if the model declares none.
    storage: how weights are kept that are not kept as stored, for the start-up banner.
    read: for a model that was loaded for the kernels: reads the arrays of the module at a path, or with
        an empty path all arrays that are left.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    eos_token_ids: frozenset[int]
    vocab_size: int
    max_model_len: int | None
    model_type: str
    source: str
    sampling_defaults: SamplingDefaults
    description: Description = NO_DESCRIPTION
    storage: str = ""
    read: Callable[[str], None] = _is_read

    @property
    def has_jinja_template(self) -> bool:
        """Whether transformers renders the chat template, and neither mlx-lm nor the tokenizer."""
        render = type(self.tokenizer._tokenizer).apply_chat_template
        is_inherited = render is PreTrainedTokenizerBase.apply_chat_template
        return self.tokenizer._chat_template is None and is_inherited


def load_model(
    reference: str,
    *,
    dtype: mx.Dtype | None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    has_kernels: bool = False,
    divide: Divide | None = None,
    slices: LoadSlices = ONE_SLICE,
) -> LoadedModel:
    """Load the model of a reference.

    dtype: all weights are dequantized and cast to it; None keeps them as stored.
    trust_remote_code: whether code that comes with the model may run; a model that needs its own code is
        rejected otherwise.
    chat_template: replaces the model's own.
    has_kernels: the native kernels will compute the model.  They keep as float32 what is not quantized,
        and no weights are read yet, so that they never have to be in memory all at once.
    divide: leaves of the model the part of this rank; None loads all of it.
    slices: is called between the parts of the load.

    Raises:
        ModelLoadError: whatever is wrong with the model, in one line.
    """
    try:
        path = slices.in_thread(partial(resolve, reference, trust_remote_code=trust_remote_code))
        if path.is_file():
            loaded = _load_file(path, dtype, has_kernels, divide, slices)
        else:
            loaded = _load_directory(path, dtype, trust_remote_code, has_kernels, divide, slices)
        # Layers draw weights that are never computed: the next draw would refer to all of them.
        mx.eval(mx.random.state)
        if chat_template is not None:
            tokenizer = with_chat_template(loaded.tokenizer, chat_template)
            loaded = replace(loaded, tokenizer=tokenizer)
        if reference == BUNDLED_MODEL:
            return replace(loaded, sampling_defaults=_BUNDLED_DEFAULTS)
        return loaded
    except (ModelLoadError, LoadCancelled, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # Loaders and tokenizers of other packages raise whatever they meet in a foreign file;
        # the panics of those that are written in Rust are no Exceptions.
        raise ModelLoadError(f"cannot load {reference}: {one_line(error)}") from error


def resolve(reference: str, *, trust_remote_code: bool = False) -> Path:
    """Return the file or directory of a reference; downloads a hub repository if necessary.

    Code is downloaded only with `trust_remote_code`.
    """
    if reference == BUNDLED_MODEL:
        return _bundled()
    path = Path(reference).expanduser()
    if path.is_dir():
        return _checked_directory(path)
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.exists():
        raise ModelLoadError(f"{reference} is neither a .gguf file nor a model directory")
    if path.suffix == ".gguf" or not is_hub_id(reference):
        raise ModelLoadError(f"there is no file or directory {reference}")
    return _download(reference, hub_files(with_code=trust_remote_code))


def _bundled() -> Path:
    if (path := bundled_file()) is None:
        raise ModelLoadError(f"the bundled model {BUNDLED_MODEL} is not installed: {HOW_TO_BUNDLE}")
    return path


def _checked_directory(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"there is no config.json in {path}")
    return path


def _download(repository: str, patterns: list[str]) -> Path:
    """Return the repository's files; a whole copy on this machine is used without asking the hub."""
    with suppress(LocalEntryNotFoundError):
        found = snapshot_download(repository, allow_patterns=patterns, local_files_only=True)
        if not missing_files(Path(found)):
            return Path(found)
    logger.info("downloading %s", repository)
    try:
        found = snapshot_download(repository, allow_patterns=patterns)
    except Exception as error:
        # Not found, not allowed, no connection, offline mode: the hub's client says which.
        raise ModelLoadError(
            f"there is no directory {repository}, "
            f"and the hub has not given that model: {one_line(error)}"
        ) from error
    # Without a connection it is what there was.
    if missing := missing_files(Path(found)) & {CONFIG, WEIGHTS}:
        message = f"{min(missing)} of {repository} is neither in the hub's cache nor could it be downloaded"
        raise ModelLoadError(message)
    return Path(found)


def _load_file(
    path: Path,
    dtype: mx.Dtype | None,
    has_kernels: bool,
    divide: Divide | None,
    slices: LoadSlices,
) -> LoadedModel:
    header = slices.in_thread(partial(read_header, path))
    slices.pause()
    storage = storage_line(tensors_of_file(header, dtype, has_kernels=has_kernels))
    _check_room(num_bytes(header, dtype, has_kernels=has_kernels), dtype, memory_in_use(), storage)
    tokenizer = slices.in_thread(partial(build_tokenizer, header))
    slices.pause()
    outline = GgufOutline(header, dtype, has_kernels=dtype is None and has_kernels)
    slices.pause()
    if not has_kernels:
        outline.read_all(slices)
        if divide is not None:
            divide(outline.model)
        evaluate(outline.model, slices)
    loaded = _loaded(outline.model, tokenizer, outline.config, path, gguf_defaults(header))
    return replace(loaded, storage=storage, read=outline.read, description=describe_file(header))


def _load_directory(
    path: Path,
    dtype: mx.Dtype | None,
    trust_remote_code: bool,
    has_kernels: bool,
    divide: Divide | None,
    slices: LoadSlices,
) -> LoadedModel:
    published = _checked_config(path)
    used = memory_in_use()
    changes = {"model_type": published["model_type"], **former_values(published)}
    try:
        model, config = _mlx_model(path, changes, trust_remote_code)
    except ValueError as error:
        raise _unreadable(path, published, error) from error
    leave_untruncated(model, config)
    storage = storage_line(stored_tensors(model, dtype, has_kernels=has_kernels))
    if dtype is not None:
        # First the scales, then the weights: otherwise these would be rounded to the scales' type.
        model.set_dtype(dtype)
        model = dequantize(model)
    if divide is not None:
        divide(model)
    # Nothing of the files is read before the arrays are evaluated.
    matrices = stored_tensors(model, None, has_kernels=has_kernels)
    more = sum(tensor.kept_bytes - tensor.num_bytes for tensor in matrices)
    _check_room(sum(array.nbytes for array in arrays_of(model)) + more, dtype, used, storage)
    model.eval()
    slices.pause()
    if not has_kernels:
        evaluate(model, slices)
    # None, the default, would ask at the terminal whether to run the tokenizer's code.
    options = {"trust_remote_code": trust_remote_code}
    eos_token_ids = config.get("eos_token_id")
    tokenizer = slices.in_thread(
        partial(load_tokenizer, path, options, eos_token_ids=eos_token_ids)
    )
    slices.pause()
    if not tokenizer.has_chat_template and (template := _processor_template(path)) is not None:
        tokenizer = with_chat_template(tokenizer, template)
    loaded = _loaded(model, tokenizer, config, path, directory_defaults(path))
    return replace(loaded, storage=storage, description=describe_directory(path))


def _processor_template(path: Path) -> str | None:
    """Return the chat template of a model with images, where its processor's file alone has it."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        template = json.loads((path / _PROCESSOR_TEMPLATE).read_text(encoding="utf-8"))
        return str(template["chat_template"])
    return None


def _unreadable(path: Path, config: Config, error: ValueError) -> ModelLoadError:
    """Say what mlx-lm says of weights, and first how they are quantized, which may be why."""
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    reason = one_line(error)
    if method is not None:
        reason = f"mlx-lm does not read weights of a {config['model_type']} quantized with {method} like these: {reason}"
    return ModelLoadError(f"cannot load {path}: {reason}")


def _mlx_model(path: Path, changes: Config, trust_remote_code: bool) -> tuple[nn.Module, Config]:
    """Return a model whose arrays are not read yet; `changes` are of its config."""
    options: dict[str, Any] = {"lazy": True, "trust_remote_code": trust_remote_code}
    if (path / MODULES).is_file():
        options["get_model_classes"] = trunk_classes
        changes = changes | trunk_config(path)
    elif (config := load_config(path)).get("model_type") in TEXT_OF_MLX_VLM:
        options["get_model_classes"] = text_model_classes
    elif has_text_part(config):
        options["get_model_classes"] = text_part_classes
    with empty_groups_rejected():
        model, config = load_mlx_model(path, model_config=changes, **options)
    return model, config


def _check_room(needed: int, dtype: mx.Dtype | None, used: int, storage: str) -> None:
    kind = dtype_name(dtype) if dtype else f"as stored, but {storage}" if storage else "as stored"
    advice = "take a smaller model, or a dtype that takes less"
    check_room(needed, f"weights ({kind})", advice, used=used)


def _checked_config(path: Path) -> Config:
    """Return a directory's config.

    Raises:
        ModelLoadError: no model of such a config is served.
    """
    config: Config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["model_type"] = RENAMED.get(config["model_type"], config["model_type"])
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for key in _LAYER_KEYS:
            if isinstance(count := part.get(key), int) and count > _MAX_LAYERS:
                raise ModelLoadError(f"cannot load {path}: its config declares {count} layers")
    if (reason := why_not_causal(config)) is not None:
        raise ModelLoadError(f"cannot load {path}: {reason}")
    return config


def _loaded(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    config: Config,
    path: Path,
    sampling_defaults: SamplingDefaults,
) -> LoadedModel:
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        vocab_size=_vocab_size(model),
        max_model_len=declared_context(config),
        model_type=str(config["model_type"]),
        source=str(path),
        sampling_defaults=sampling_defaults,
    )


def _vocab_size(model: nn.Module) -> int:
    """Return the width of the logits; only their shape is worked out, nothing is computed."""
    logits = model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    assert isinstance(logits, mx.array)
    return logits.shape[-1]
