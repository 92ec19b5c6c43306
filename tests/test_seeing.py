"""The tiny model that sees, untrained: its pictures, its folder, and both libraries over the same weights."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from PIL import Image
from transformers import AutoTokenizer

from batching.backend.hooks.changes import Changes
from batching.backend.vision.mlx_vlm_models import model_file
from batching.backend.vision.tower import load_tower
from tests.support.seeing.__main__ import REQUIRED
from tests.support.seeing.batches import Encoder
from tests.support.seeing.folder import (
    IMAGE,
    make_config,
    make_model,
    make_processor,
    make_tokenizer,
    write_folder,
)
from tests.support.seeing.forward import logits
from tests.support.seeing.pictures import COLOURS
from tests.support.seeing.talks import Talk, held_out, pair, picture, talk, user, vocabulary
from tests.support.seeing.training import accuracy, make, train

# Of logits that are a few units large.
CLOSE = 1e-4


@cache
def encoder() -> Encoder:
    return Encoder(make_tokenizer(), make_processor())


def parameters(model: Any) -> dict[str, mx.array]:
    arrays: dict[str, mx.array] = {}
    tree_flatten(model.parameters(), destination=arrays)
    return arrays


def mlx_vlm_weights(folder: Path) -> Any:
    """Return the weights of the folder by mlx-vlm's names, as its loader makes them of the hub's."""
    model = make_model(json.loads((folder / "config.json").read_text()))
    weights = model.sanitize(mx.load(str(folder / "model.safetensors")))
    return model.vision_tower.sanitize(weights)


@pytest.fixture(scope="module")
def model() -> Any:
    mx.random.seed(3)
    return make_model(make_config(make_tokenizer()))


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "seeing"
    tokenizer = make_tokenizer()
    write_folder(folder, model, tokenizer, make_config(tokenizer))
    return folder


def test_a_picture_is_drawn_again_and_shows_what_is_asked() -> None:
    assert picture(5) == picture(5) != picture(6)
    assert len({pair(1)[0][0], pair(1)[0][1], pair(2)[0][0]}) == 3
    for seed in range(20):
        png, question, answer = picture(seed, "colour")
        assert answer in COLOURS and question.startswith("Which colour is the ")
        near = np.abs(np.array(Image.open(io.BytesIO(png)), int) - COLOURS[answer]).max(-1) <= 24
        assert near.sum() > 100, (seed, answer)


def test_each_word_has_one_token_and_any_text_has_some() -> None:
    tokenizer = make_tokenizer()
    for text in vocabulary():
        assert len(tokenizer.encode(text)) == len(tokenizer.tokenize(text)) <= len(text.split()) + 1
    for text in ("Grüße, 世界 🟥\n\t", "x" * 99, IMAGE):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert make_tokenizer().get_vocab() == tokenizer.get_vocab()


def test_the_template_takes_strings_and_parts() -> None:
    tokenizer = make_tokenizer()
    turns = [{"role": "system", "content": "Be brief."}, user("Which?", 2)]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"
        + "<|vision_start|><|image_pad|><|vision_end|>" * 2
        + "Which?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_folder_is_read_by_transformers_and_both_libraries(folder: Path, model: Any) -> None:
    assert {path.name for path in folder.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.get_vocab() == make_tokenizer().get_vocab()
    assert mlx_vlm_weights(folder).keys() == parameters(model).keys()
    assert all(mx.array_equal(mlx_vlm_weights(folder)[k], w) for k, w in parameters(model).items())
    changes = Changes()
    load_tower(folder, json.loads((folder / "config.json").read_text()), None, changes)
    changes.undo()
    text, _ = load_model(folder)
    ids = mx.array([tokenizer.encode("Say yes. Count to five.")])
    assert mx.abs(text(ids) - model(ids).logits).max() < CLOSE


def test_the_processors_make_the_same_of_a_png(folder: Path) -> None:
    """That of mlx-vlm, as it loads the folder, that of the training, and transformers'."""
    files: Any = model_file("qwen3_vl.processing_qwen3_vl")
    whole = files.Qwen3VLProcessor.from_pretrained(folder)
    others = _pil_processor(json.loads((folder / "preprocessor_config.json").read_text()))
    for seed in range(20):
        image = Image.open(io.BytesIO(picture(seed)[0]))
        trained_on = encoder().processor(images=[held_out(seed).scenes[0].image])
        made = whole(images=[image], text=[IMAGE])
        height, width = trained_on["image_grid_thw"][0, 1:]
        assert made["input_ids"].shape == (1, height * width // 4)
        assert all(np.array_equal(made[name], trained_on[name]) for name in trained_on)
        other = others(images=[image], return_tensors="np")
        assert np.array_equal(other["image_grid_thw"], trained_on["image_grid_thw"])
        assert np.abs(other["pixel_values"] - trained_on["pixel_values"]).max() < 1e-5


def _pil_processor(settings: dict[str, Any]) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make: Any = Qwen2VLImageProcessorPil
    return make(**settings)


def test_the_batched_forward_is_the_librarys(model: Any) -> None:
    random = np.random.default_rng(9)
    talks = [talk(random) for _ in range(12)]
    assert {len(t.scenes) for t in talks} == {0, 1, 2}
    batch = encoder().batch(talks)
    expected = mx.concatenate([_library_logits(model, t) for t in talks])
    made = logits(model, batch, batch.places)
    assert made.shape == expected.shape
    assert mx.abs(made - expected).max() < CLOSE


def _library_logits(model: Any, said: Talk) -> mx.array:
    """Return the logits of the tokens that the model says, one conversation by itself."""
    one = encoder().batch([said])
    arguments = {}
    if said.scenes:
        made = encoder().processor(images=[scene.image for scene in said.scenes])
        arguments = {name: mx.array(value) for name, value in made.items()}
    made_by_library: mx.array = model(one.ids, **arguments).logits[0, one.places]
    return made_by_library


def test_training_learns_and_is_repeated() -> None:
    """A few steps: the whole takes minutes."""
    weights = []
    for _ in range(2):
        mx.random.seed(3)
        made = make_model(make_config(make_tokenizer()))
        train(made, encoder(), 0.002)
        weights.append(parameters(made))
        assert 0 <= accuracy(made, encoder(), [held_out(seed) for seed in range(4)]) <= 1
    assert all(mx.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_trained_model_sees(tmp_path: Path) -> None:
    reached = make(tmp_path / "seeing")
    assert reached.keys() == REQUIRED.keys()
    assert all(reached[name] >= share for name, share in REQUIRED.items()), reached
