"""Numbers beyond measure, in every field that is a number."""

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
    RESPONSES,
    SECRET,
    Attack,
    Attacks,
    Body,
    chatting,
    complete,
    message,
    to,
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
# Without a limit: for each field that is a number one is added.
_SHORT: Final = {
    CHAT: json.dumps({"messages": [{"role": "user", "content": SECRET}]}).encode(),
    COMPLETIONS: json.dumps({"prompt": SECRET}).encode(),
    MESSAGES: json.dumps(
        {"max_tokens": 1, "messages": [{"role": "user", "content": SECRET}]}
    ).encode(),
    RESPONSES: json.dumps({"input": SECRET}).encode(),
}


def numbers(num_each: int, seed: str) -> Attacks:
    """Return some numbers for each field and place, others for another seed."""
    rng = random.Random(seed)

    def some() -> list[tuple[str, str]]:
        return rng.sample([*_NUMBERS.items()], min(num_each, len(_NUMBERS)))

    fields = {
        f"{path} {field}: {kind}": Attack(path, partial(_with_field, body, field, number))
        for path, body in _SHORT.items()
        for field in _number_fields(REQUESTS[path])
        for kind, number in some()
    }
    places = {
        f"{place}: {kind}": Attack(path, partial(_between, before, number, after))
        for place, (path, before, after) in _PLACES.items()
        for kind, number in some()
    }
    return fields | places


def too_much() -> Attacks:
    return to(CHAT, _TOO_MUCH) | to(COMPLETIONS, _TOO_MANY)


def _with_field(body: bytes, field: str, number: str) -> bytes:
    return body[:-1] + f', "{field}": {number}}}'.encode()


def _between(before: str, number: str, after: str) -> bytes:
    return f"{before}{number}{after}".encode()
