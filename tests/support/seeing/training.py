"""Training: first the tower, to name what each of its tokens shows; then the text model, to answer."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from tests.support.seeing.batches import NAMES, SHADES, Batch, Encoder, Grid, Pictures, look
from tests.support.seeing.folder import (
    make_config,
    make_model,
    make_processor,
    make_tokenizer,
    write_folder,
)
from tests.support.seeing.forward import logits, see, with_zeros
from tests.support.seeing.pictures import KINDS, SIZES, Random, Scene, pick, scene
from tests.support.seeing.talks import Talk, held_out, held_out_text, talk

_SEED: Final = 1
_NUM_HELD_OUT: Final = 300
# How many pictures conversations are about, and how many the tower sees at once.
_NUM_SEEN: Final = 4000
_ENOUGH: Final = 50
_LABEL_STEPS: Final = 1500
_LABEL_SIZE: Final = 16
_LABEL_RATE: Final = 3e-3
_TALK_STEPS: Final = 2500
_TALK_SIZE: Final = 16
_TALK_RATE: Final = 2e-3
# As many batches are sorted by length.
_SORTED: Final = 8
_LOG_EVERY: Final = 100
# Most tokens show nothing, which is learned fast.
_NOTHING: Final = 0.1
# What embeddings of pictures are on average.
_LOUDNESS: Final = 0.2

Halves = tuple[Any, Any]


class Labeller(nn.Module):
    """A tower with heads that name things and colours; only the tower is kept."""

    def __init__(self, tower: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tower = tower
        levels = 1 + len(tower.deepstack_visual_indexes)
        width = len(NAMES) + len(SHADES)
        self.heads = [nn.Linear(tower.config.out_hidden_size, width) for _ in range(levels)]

    def loss(self, pictures: Pictures) -> mx.array:
        weights = mx.where(pictures.labels[:, 0] > 0, 1.0, _NOTHING)
        total = mx.array(0.0)
        for head, level in zip(self.heads, see(self.tower, pictures), strict=True):
            names, shades = mx.split(head(level), [len(NAMES)], axis=-1)
            for part, labels in ((names, pictures.labels[:, 0]), (shades, pictures.labels[:, 1])):
                total = total + (weights * nn.losses.cross_entropy(part, labels)).sum()
        return total / weights.sum()


def make(folder: Path) -> dict[str, float]:
    """Train the model, write it, and return which part of held-out questions it answers, by their kind."""
    mx.random.seed(_SEED)
    tokenizer = make_tokenizer()
    config = make_config(tokenizer)
    model = make_model(config)
    encoder = Encoder(tokenizer, make_processor())
    train(model, encoder)
    write_folder(folder, model, tokenizer, config)
    seeds = range(_NUM_HELD_OUT)
    asked = {"text": [held_out_text(seed) for seed in seeds]}
    for kind in KINDS:
        asked[kind] = [held_out(seed, kind) for seed in seeds]
        asked[f"{kind} of two"] = [held_out(seed, kind, 2) for seed in seeds]
    reached = {name: accuracy(model, encoder, talks) for name, talks in asked.items()}
    log("".join(f"{name}: {share:.1%}\n" for name, share in reached.items()))
    return reached


def train(model: Any, encoder: Encoder, part: float = 1.0) -> None:
    """part: of all the steps, for a test that wants no model that sees."""
    labeller = Labeller(model.vision_tower)
    pictures = _picture_batches(np.random.default_rng([0, 0]), encoder.processor)
    _train("see", labeller, labeller.loss, pictures, int(_LABEL_STEPS * part), _LABEL_RATE)
    _weaken(model.vision_tower, next(pictures)[0])
    model.vision_tower.freeze()
    random = np.random.default_rng([0, 1])
    scenes = [scene(random) for _ in range(int(_NUM_SEEN * part) + _ENOUGH)]
    album = _album(model.vision_tower, encoder.processor, scenes)
    talks = _talk_batches(random, encoder, scenes, album)
    loss = partial(_loss, model)
    _train("talk", model, loss, talks, int(_TALK_STEPS * part), _TALK_RATE)


def _loss(model: Any, batch: Batch) -> mx.array:
    """Pictures' tokens say which picture they are of: questions about one of two would not teach it in time."""
    both = logits(model, batch, mx.concatenate([batch.places, batch.marks]))
    said, marked = mx.split(both, [batch.places.size])
    loss = nn.losses.cross_entropy(said, batch.targets, reduction="mean")
    if batch.marks.size:
        loss = loss + nn.losses.cross_entropy(marked, batch.ordinals, reduction="mean")
    return loss


def _picture_batches(random: Random, processor: Any) -> Iterator[Halves]:
    """Those in a half are equally large, which is faster."""

    def half() -> Pictures:
        size = pick(random, SIZES)
        return look([scene(random, size=size) for _ in range(_LABEL_SIZE // 2)], processor)

    while True:
        yield half(), half()


def _weaken(tower: Any, pictures: Pictures) -> None:
    """Make embeddings about as large as those of text: what layers add to larger ones is not noticed."""
    mergers = [tower.merger, *tower.deepstack_merger_list]
    for merger, level in zip(mergers, see(tower, pictures), strict=True):
        scale = _LOUDNESS / mx.sqrt(mx.square(level).mean())
        merger.linear_fc2.weight = merger.linear_fc2.weight * scale
        merger.linear_fc2.bias = merger.linear_fc2.bias * scale


def _album(tower: Any, processor: Any, scenes: Sequence[Scene]) -> Pictures:
    """Return what a tower that learns no more makes of pictures, so that it sees each of them once."""
    first = 0
    where: dict[int, tuple[int, Grid]] = {}
    seen = []
    for i in range(0, len(scenes), _ENOUGH):
        some = look(scenes[i : i + _ENOUGH], processor)
        where |= {scene: (first + at, size) for scene, (at, size) in some.where.items()}
        first += len(some.labels)
        seen.append(see(tower, some))
        mx.eval(seen[-1])
    levels = with_zeros([mx.concatenate(list(level)) for level in zip(*seen, strict=True)])
    mx.eval(levels)
    return Pictures((), where, mx.zeros((0, 2)), levels)


def _talk_batches(
    random: Random, encoder: Encoder, scenes: Sequence[Scene], album: Pictures
) -> Iterator[Halves]:
    """Those in a half are about equally long; only the second one has those about two pictures."""
    kinds = {kind: [scene for scene in scenes if scene.kind == kind] for kind in KINDS}

    def draw(random: Random, kind: str) -> Scene:
        return pick(random, kinds[kind or pick(random, KINDS)])

    size = _TALK_SIZE // 2
    while True:
        made = [talk(random, draw) for _ in range(2 * size * _SORTED)]
        made.sort(key=lambda t: (len(t.scenes), len(t.messages)))
        halves = [made[i : i + size] for i in range(0, len(made), size)]
        for i in random.permutation(_SORTED):
            yield encoder.batch(halves[i], album), encoder.batch(halves[i + _SORTED], album)


def _train(
    name: str,
    model: nn.Module,
    loss: Callable[[Any], mx.array],
    batches: Iterator[Halves],
    num_steps: int,
    rate: float,
) -> None:
    """The halves of a batch are computed at the same time, each by a core."""
    optimizer = optim.AdamW(_schedule(rate, num_steps), betas=[0.9, 0.98], weight_decay=0.01)
    step = nn.value_and_grad(model, loss)
    streams = [mx.new_stream(mx.default_device()) for _ in range(2)]
    start = time.perf_counter()
    for i, halves in enumerate(islice(batches, num_steps)):
        made = []
        for stream, half in zip(streams, halves, strict=True):
            with mx.stream(stream):
                made.append(step(half))
        (first, one), (second, other) = made
        gradients, _ = optim.clip_grad_norm(tree_map(lambda a, b: (a + b) / 2, one, other), 1.0)
        optimizer.update(model, gradients)
        mx.eval(first, second, model.parameters(), optimizer.state)
        if i % _LOG_EVERY == 0 or i == num_steps - 1:
            mean = (first.item() + second.item()) / 2
            log(f"{name} {i}: loss {mean:.3f} after {time.perf_counter() - start:.0f} s")


def _schedule(rate: float, num_steps: int) -> Any:
    warm = num_steps // 20 + 1
    rise = optim.linear_schedule(0, rate, warm)
    return optim.join_schedules(
        [rise, optim.cosine_decay(rate, max(1, num_steps - warm), rate / 50)], [warm]
    )


def log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def accuracy(model: Any, encoder: Encoder, talks: Sequence[Talk]) -> float:
    """Return the part of the conversations of which the model, greedily, says all answers and their ends."""
    num_right = 0
    for i in range(0, len(talks), _TALK_SIZE):
        some = talks[i : i + _TALK_SIZE]
        batch = encoder.batch(some)
        is_wrong = np.array(logits(model, batch, batch.places).argmax(-1) != batch.targets)
        num_right += len(some) - len(
            {*(np.array(batch.places)[is_wrong] // batch.ids.shape[1]).tolist()}
        )
    return num_right / len(talks)
