"""Runs the image processor of a model, as a worker of `batching.sandbox`: it must not import anything of the project.

The processor is the family's own, of mlx-vlm or of transformers, and gets pixels that were decoded elsewhere.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any, Final

import numpy as np

_MODELS: Final = "mlx_vlm.models"
# Of the processor's outputs: those of the text, which are not for the tower.
_OF_TEXT: Final = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_WARM: Final = 64

_process: Callable[[Any, str], Mapping[str, Any]]
_tokenizer: Any
# Why there is no processor.
_failure: str | None


def prepare(models_file: str, folder: str, model_type: str, text: str) -> None:
    """Load the processor of a model's directory; later, no file can be opened.

    models_file: the module that imports model files of mlx-vlm.
    text: what a prompt has for an image.
    """
    global _process, _tokenizer, _failure
    try:
        processor = _processor(_module(models_file), folder, model_type)
        _process, _tokenizer = _made_by(processor), processor.tokenizer
        # What is imported at the first use only.
        _tokens_of_image(_process(np.zeros((_WARM, _WARM, 3), np.uint8), text))
        _failure = None
    except Exception as error:
        # The code of a library can raise anything, as where a file lacks a value.
        _failure = f"{type(error).__name__}: {error}"


def answer(message: bytes) -> bytes:
    """Return the tokens of an image and the inputs of the tower, or why there are none.

    Both messages are a line of JSON and then bytes: of pixels, or of the arrays that the line describes.
    """
    if _failure is not None:
        return _packed({"failure": _failure})
    head, _, pixels = message.partition(b"\n")
    asked = json.loads(head)
    picture = np.frombuffer(pixels, np.uint8).reshape(asked["height"], asked["width"], 3)
    try:
        found = _process(picture, asked["text"])
    except (ValueError, ZeroDivisionError) as error:
        # As a picture that is too narrow for the model.
        return _packed({"error": type(error).__name__})
    arrays = {
        name: np.ascontiguousarray(values)
        for name, values in found.items()
        if name not in _OF_TEXT and values is not None
    }
    of_text = _tokens_of_image(found)
    described = [[name, a.dtype.str, a.shape] for name, a in arrays.items()]
    return _packed({**of_text, "arrays": described}, *arrays.values())


def _tokens_of_image(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens from the first to the last that is no text, and the texts around them."""
    token_ids = np.asarray(found["input_ids"]).ravel().tolist()
    added = {*_tokenizer.get_added_vocab().values()}
    places = [i for i, each in enumerate(token_ids) if each in added]
    start, stop = min(places), max(places) + 1
    before, after = (
        _tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        for ids in (token_ids[:start], token_ids[stop:])
    )
    return {"before": before, "token_ids": token_ids[start:stop], "after": after}


def _packed(head: dict[str, Any], *arrays: Any) -> bytes:
    return b"".join([json.dumps(head).encode(), b"\n", *(array.tobytes() for array in arrays)])


def _module(file: str) -> ModuleType:
    spec = spec_from_file_location("models", file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["models"] = module
    spec.loader.exec_module(module)
    return module


def _processor(models: ModuleType, folder: str, model_type: str) -> Any:
    """Load the processor of a directory."""
    # Nothing is looked for elsewhere.
    os.environ["HF_HUB_OFFLINE"] = "1"
    import mlx.core as mx
    from transformers import AutoProcessor

    mx.set_default_device(mx.cpu)
    classes = _registered(models, model_type)
    kind = classes.get(model_type.lower(), AutoProcessor)
    processor = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    # It adds the tokens that begin a prompt; not all processors take `add_special_tokens`.
    processor.tokenizer.backend_tokenizer.post_processor = None
    return processor


def _made_by(processor: Any) -> Callable[[Any, str], Mapping[str, Any]]:
    """Return what makes inputs of pixels and the text of an image."""
    from PIL import Image

    def process(pixels: Any, text: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = processor(
            text=[text], images=[Image.fromarray(pixels)], return_tensors="np"
        )
        return found

    return process


def _registered(models: ModuleType, model_type: str) -> dict[str, Any]:
    """Return the processors that mlx-vlm's model file would put into `AutoProcessor`, by model types."""
    classes: dict[str, Any] = {}

    def register(types: str | list[str], kind: Any) -> None:
        classes.update(dict.fromkeys([types] if isinstance(types, str) else types, kind))

    base: Any = models.model_file("base")
    base.install_auto_processor_patch = register
    # The arrays leave this process as they are.
    base.to_mlx = dict
    models.model_file(model_type)
    return classes
