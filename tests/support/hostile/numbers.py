"""Numbers beyond measure in every field that is a number, and large values in every field."""

import json
import random
from functools import partial
from types import UnionType
from typing import Final, get_args

from pydantic import BaseModel

from tests.support.hostile.apis import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    REQUESTS,
    SHORT,
    Attack,
    Attacks,
    Body,
    chatting,
    complete,
    message,
    nested,
    to,
    with_field,
)

_NUMBERS: Final = {
    "NaN": "NaN",
    "infinite": "Infinity",
    "less than all": "-Infinity",
    "overflow": "1e400",
    "negative overflow": "-1e400",
    "huge exponent": "1e999999999",
    "large": str(10**30),
    "negative": str(-(10**30)),
    "5000 digits": "9" * 5000,
    "4000 digits": "-" + "9" * 4000,
    "text": '"1"',
    "a list": "[1]",
    "an object": '{"1": 1}',
    "a truth": "true",
}


def _number_fields(model: type[BaseModel]) -> list[str]:
    """Return the fields that are one number."""
    return [
        name
        for name, field in model.model_fields.items()
        if {int, float}
        & set(
            get_args(field.annotation)
            if isinstance(field.annotation, UnionType)
            else [field.annotation]
        )
    ]


# Where numbers stand in lists and maps: path, and what is around the number.
_PLACES: Final = {
    "logit_bias": (CHAT, '{"messages": [], "logit_bias": {"1": ', "}}"),
    "stop_token_ids": (CHAT, '{"messages": [], "stop_token_ids": [', "]}"),
    "allowed_token_ids": (CHAT, '{"messages": [], "allowed_token_ids": [', "]}"),
    "prompt": (COMPLETIONS, '{"prompt": [1, ', "]}"),
    "prompts": (COMPLETIONS, '{"prompt": [[1], [', "]]}"),
    "tokens": ("/detokenize", '{"tokens": [', "]}"),
    "budget_tokens": (
        MESSAGES,
        message("a").decode()[:-1] + ', "thinking": {"type": "enabled", "budget_tokens": ',
        "}}",
    ),
}

# Values of any field.
_LARGE: Final = {
    "a text": f'"{"a" * 1_000_000}"',
    "numbers": f"[{'1,' * 300_000}1]",
    "texts": json.dumps(["a"] * 100_000),
    "objects": json.dumps([{}] * 100_000),
    "members": json.dumps(dict.fromkeys(map(str, range(100_000)), 1)),
    "lists in lists": nested(900),
}
_TOO_MUCH: Final[dict[str, Body]] = {
    "answers": chatting(n=10**9),
    "answers that the schema allows": chatting(n=128),
    "answers times tokens": chatting(n=16, max_tokens=2**31 - 1),
    "tokens": chatting(max_tokens=2**31 - 1),
    "token ids of logit_bias": chatting(logit_bias={"999999999": 1}),
    "keys of logit_bias": chatting(logit_bias={"a": 1}),
    "stop token": chatting(stop_token_ids=[2**31 - 1]),
}

_TOO_MANY: Final[dict[str, Body]] = {
    "answers to compare": lambda: complete(best_of=10**9),
    "answers to compare that the schema allows": lambda: complete(best_of=128),
    "prompts": lambda: complete(prompt=["a"] * 1024, n=16),
}


def numbers(num_each: int, seed: str) -> Attacks:
    """Return some numbers for each field and place, others for another seed."""
    rng = random.Random(seed)

    def some() -> list[tuple[str, str]]:
        return rng.sample([*_NUMBERS.items()], min(num_each, len(_NUMBERS)))

    fields = {
        f"{path} {field}: {kind}": Attack(path, partial(with_field, body, field, number))
        for path, body in SHORT.items()
        for field in _number_fields(REQUESTS[path])
        for kind, number in some()
    }
    places = {
        f"{place}: {kind}": Attack(path, partial(_between, before, number, after))
        for place, (path, before, after) in _PLACES.items()
        for kind, number in some()
    }
    return fields | places


def large(num_each: int, seed: str) -> Attacks:
    """Return some large values for each field, others for another seed."""
    rng = random.Random(seed)
    return {
        f"{path} {field}: {kind}": Attack(path, partial(with_field, body, field, value))
        for path, body in SHORT.items()
        for field in REQUESTS[path].model_fields
        for kind, value in rng.sample([*_LARGE.items()], num_each)
    }


def too_much() -> Attacks:
    return to(CHAT, _TOO_MUCH) | to(COMPLETIONS, _TOO_MANY)


def _between(before: str, number: str, after: str) -> bytes:
    return f"{before}{number}{after}".encode()
