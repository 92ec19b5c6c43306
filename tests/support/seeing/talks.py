"""Conversations about pictures, and a few without any: those that train the model, and those held out."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import numpy as np

from tests.support.seeing.pictures import (
    COLOURS,
    DIGITS,
    KINDS,
    NUMBERS,
    SHAPES,
    Random,
    Scene,
    pick,
    scene,
)

# The answer to a question about a picture that is not there.
NONE: Final = "none"
SAYABLE: Final = ("yes", "no", "hello", *COLOURS, *SHAPES, *DIGITS)
_PHRASES: Final = {
    "colour": ("Which colour is the {}?", "What colour is the {}?"),
    "digit": ("Which digit is it?", "What digit is this?"),
    "count": ("How many dots are there?", "How many dots do you see?"),
}
_HELD_OUT: Final = 1
_PLACES: Final = ("first", "second")
_PLACED: Final = {
    "colour": "Which colour is the {} in the {} image?",
    "digit": "Which digit is in the {1} image?",
    "count": "How many dots are in the {1} image?",
}
_SYSTEMS: Final = ("You are a helpful assistant.", "Answer in one word.")
Message = dict[str, Any]


@dataclass(frozen=True)
class Talk:
    """Messages whose parts name images, and the images in their order."""

    messages: Sequence[Message]
    scenes: Sequence[Scene]


def picture(seed: int, kind: str = "") -> tuple[bytes, str, str]:
    """Return a picture that the model was not trained on, as a PNG file, a question and the answer."""
    (png,), question, answer = _files(held_out(seed, kind))
    return png, question, answer


def pair(seed: int, kind: str = "") -> tuple[list[bytes], str, str]:
    """Return two such pictures, a question about one of them, and the answer."""
    return _files(held_out(seed, kind, 2))


def _files(made: Talk) -> tuple[list[bytes], str, str]:
    question, answer = (message["content"] for message in made.messages)
    return [scene.png() for scene in made.scenes], question[-1]["text"], answer


def held_out(seed: int, kind: str = "", num_images: int = 1) -> Talk:
    """Return a question of this kind (of any, if empty) about one or two pictures, and its answer."""
    random = np.random.default_rng([_HELD_OUT, seed])
    kind = kind or pick(random, KINDS)
    scenes = [scene(random, kind) for _ in range(num_images)]
    which = int(random.integers(num_images))
    subject, answer = pick(random, scenes[which].facts)
    phrase = _PHRASES[kind][0] if num_images == 1 else _PLACED[kind]
    question = user(phrase.format(subject, _PLACES[which]), num_images)
    return Talk([question, {"role": "assistant", "content": answer}], scenes)


def held_out_text(seed: int) -> Talk:
    """Return questions without a picture, and their answers."""
    return _text(np.random.default_rng([_HELD_OUT, seed]))


def vocabulary() -> Iterator[str]:
    """Everything that is said: what the tokenizer has words for."""
    for phrase in (*chain(*_PHRASES.values()), *_PLACED.values()):
        for asked in (phrase, _lower(phrase)):
            yield from (asked.format(shape, place) for shape in SHAPES for place in _PLACES)
    yield from (f"Say {word}." for word in SAYABLE)
    yield from (f"Count to {number}." for number in NUMBERS)
    yield from (
        " ".join(NUMBERS),
        *SAYABLE,
        *NUMBERS,
        NONE,
        *_SYSTEMS,
        "system",
        "user",
        "assistant",
    )


def user(text: str, num_images: int = 0) -> Message:
    """Return a question behind the images that it is about."""
    images = [{"type": "image"}] * num_images
    return {"role": "user", "content": [*images, {"type": "text", "text": text}]}


def talk(random: Random) -> Talk:
    """Make a conversation up."""
    kind = random.random()
    made = _text(random) if kind < 0.1 else _two(random) if kind < 0.55 else _one(random)
    if random.random() < 0.25:
        system = {"role": "system", "content": pick(random, _SYSTEMS)}
        return Talk([system, *made.messages], made.scenes)
    return made


def _turns(random: Random, asked: Sequence[tuple[str, str]], num_images: int) -> list[Message]:
    """Questions and answers; the images are in the first message, before its text or behind."""
    messages = []
    for i, (question, answer) in enumerate(asked):
        text = question if random.random() < 0.7 else _lower(question)
        message = user(text, 0 if i else num_images)
        if random.random() < 0.3:
            message["content"].reverse()
        messages += [message, {"role": "assistant", "content": answer}]
    return messages


def _lower(question: str) -> str:
    return question[0].lower() + question[1:]


def _one(random: Random) -> Talk:
    drawn = scene(random)
    asked = [
        (pick(random, _PHRASES[drawn.kind]).format(drawn.facts[i][0]), drawn.facts[i][1])
        for i in random.permutation(len(drawn.facts))
    ]
    return Talk(_turns(random, asked, 1), [drawn])


def _two(random: Random) -> Talk:
    """Two pictures of which the same can be asked."""
    kind = pick(random, ("colour", "colour", "digit", "count"))
    scenes = [scene(random, kind) for _ in _PLACES]
    facts = [(*fact, place) for s, place in zip(scenes, _PLACES, strict=True) for fact in s.facts]
    some = [facts[i] for i in random.permutation(len(facts))[:2]]
    asked = [(_PLACED[kind].format(subject, place), answer) for subject, answer, place in some]
    return Talk(_turns(random, asked, 2), scenes)


def _text(random: Random) -> Talk:
    """Without a picture."""
    return Talk(_turns(random, [_text_question(random) for _ in range(2)], 0), [])


def _text_question(random: Random) -> tuple[str, str]:
    match int(random.integers(3)):
        case 0:
            word = pick(random, SAYABLE)
            return f"Say {word}.", word
        case 1:
            number = int(random.integers(len(NUMBERS)))
            return f"Count to {NUMBERS[number]}.", " ".join(NUMBERS[: number + 1])
        case _:
            phrase = pick(random, _PHRASES[pick(random, list(_PHRASES))])
            return phrase.format(pick(random, SHAPES)), NONE
