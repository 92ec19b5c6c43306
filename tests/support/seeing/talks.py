"""Conversations about pictures, and a few without any: those that train the model, and those held out."""

from collections.abc import Callable, Iterator, Sequence
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
PLACES: Final = ("first", "second")
_PLACED: Final = {
    "colour": "Which colour is the {} in the {} image?",
    "digit": "Which digit is in the {1} image?",
    "count": "How many dots are in the {1} image?",
}
_SYSTEMS: Final = ("You are a helpful assistant.", "Answer in one word.")
Message = dict[str, Any]
Draw = Callable[[Random, str], Scene]


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
    if num_images == 1:
        drawn = scene(random, kind)
        subject, answer = pick(random, drawn.facts)
        return Talk(_turns([(_PHRASES[kind][0].format(subject), answer)], 1), [drawn])
    scenes, asked = _pair(random, kind, scene)
    return Talk(_turns([pick(random, asked)], 2), scenes)


def held_out_text(seed: int) -> Talk:
    """Return questions without a picture, and their answers."""
    return _text(np.random.default_rng([_HELD_OUT, seed]))


def vocabulary() -> Iterator[str]:
    """Everything that is said: what the tokenizer has words for."""
    for phrase in (*chain(*_PHRASES.values()), *_PLACED.values()):
        for asked in (phrase, _lower(phrase)):
            yield from (asked.format(shape, place) for shape in SHAPES for place in PLACES)
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


def talk(random: Random, draw: Draw = scene) -> Talk:
    """Make a conversation up.

    draw: returns a picture of a kind.
    """
    kind = random.random()
    made = _text(random) if kind < 0.1 else _two(random, draw) if kind < 0.6 else _one(random, draw)
    return Talk(_varied(random, made.messages), made.scenes)


def _turns(asked: Sequence[tuple[str, str]], num_images: int) -> list[Message]:
    """Questions and answers; the images are in the first message."""
    messages = []
    for i, (question, answer) in enumerate(asked):
        messages += [
            user(question, 0 if i else num_images),
            {"role": "assistant", "content": answer},
        ]
    return messages


def _varied(random: Random, messages: Sequence[Message]) -> list[Message]:
    """Some begin with a system message; some questions begin small, or stand before their images."""
    made: list[Message] = []
    if random.random() < 0.25:
        made.append({"role": "system", "content": pick(random, _SYSTEMS)})
    for message in messages:
        if message["role"] == "user":
            *images, text = message["content"]
            if random.random() < 0.3:
                text = {"type": "text", "text": _lower(text["text"])}
            content = [text, *images] if random.random() < 0.3 else [*images, text]
            message = {"role": "user", "content": content}
        made.append(message)
    return made


def _lower(question: str) -> str:
    return question[0].lower() + question[1:]


def _one(random: Random, draw: Draw) -> Talk:
    drawn = draw(random, "")
    asked = [
        (pick(random, _PHRASES[drawn.kind]).format(drawn.facts[i][0]), drawn.facts[i][1])
        for i in random.permutation(len(drawn.facts))
    ]
    return Talk(_turns(asked, 1), [drawn])


def _two(random: Random, draw: Draw) -> Talk:
    scenes, asked = _pair(random, pick(random, KINDS), draw)
    return Talk(_turns([asked[i] for i in random.permutation(len(asked))[:2]], 2), scenes)


def _pair(random: Random, kind: str, draw: Draw) -> tuple[list[Scene], list[tuple[str, str]]]:
    """Return two pictures to which the same question has different answers, and those for each."""
    while True:
        scenes = [draw(random, kind) for _ in PLACES]
        first, second = (dict(scene.facts) for scene in scenes)
        asked = [
            (_PLACED[kind].format(subject, place), facts[subject])
            for subject in first
            if first[subject] != second.get(subject, first[subject])
            for place, facts in zip(PLACES, (first, second), strict=True)
        ]
        if asked:
            return scenes, asked


def _text(random: Random) -> Talk:
    """Without a picture."""
    return Talk(_turns([_text_question(random) for _ in range(2)], 0), [])


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
