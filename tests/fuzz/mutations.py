"""Makes inputs of others: of any bytes, or of JSON, whose values change and stay JSON.

What grows is worth as much as what differs: most findings of this kind take too long.
"""

import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from tests.fuzz.target import Mutate

_MAX_CHANGES: Final = 4
# As powers of two.
_MAX_COPIES: Final = 13
# In bytes, of one change.
_MAX_REPEATED: Final = 1 << 18
_MAX_SERIES: Final = 1024
_MAX_NESTING: Final = 200
# Where many values are alike, any of the first ones will do.
_MAX_PLACES: Final = 1000
_NUMBERS: Final = (
    *(0, 1, 7, 31, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1),
    *(2**53, 2**62, 2**63, 2**64 - 1),
)
_VALUES: Final[Sequence[Any]] = (
    *(None, True, False, -1, 0.5, 1e308, "", "a", "é", "\ud800", "\0", [], {}),
    *_NUMBERS,
)


def bytes_mutation(*words: bytes) -> Mutate:
    """Return a mutation of bytes; `words` are what such inputs are made of."""

    def mutate(data: bytes, rng: Random, max_bytes: int) -> bytes:
        for _ in range(rng.randint(1, _MAX_CHANGES)):
            data = rng.choice(_OF_BYTES)(data, rng, words)
        return data[:max_bytes]

    return mutate


def _replace(data: bytes, rng: Random, words: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) + 1)
    new = _some(data, rng, words)
    return data[:start] + new + data[start + len(new) :]


def _insert(data: bytes, rng: Random, words: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[:start] + _some(data, rng, words) + data[start:]


def _remove(data: bytes, rng: Random, _: Sequence[bytes]) -> bytes:
    part = _part(data, rng)
    return data.replace(part, b"", 1)


def _repeat(data: bytes, rng: Random, words: Sequence[bytes]) -> bytes:
    start = rng.randrange(len(data) + 1)
    part = _some(data, rng, words)
    return data[:start] + part * _copies(rng, len(part)) + data[start:]


def _some(data: bytes, rng: Random, words: Sequence[bytes]) -> bytes:
    """Return a byte, a number, a word or a part of the input."""
    match rng.randrange(4):
        case 0:
            return rng.randbytes(1)
        case 1:
            return rng.choice(_NUMBERS).to_bytes(8, "little")[: rng.choice((1, 2, 4, 8))]
        case 2 if words:
            return rng.choice(words)
        case _:
            return _part(data, rng)


def _part(data: bytes, rng: Random) -> bytes:
    start = rng.randrange(len(data) + 1)
    return data[start : start + rng.choice((1, 2, 4, 8, 40, len(data)))]


def _copies(rng: Random, length: int = 1) -> int:
    """Return how often something of a length is repeated."""
    return min(1 << rng.randrange(_MAX_COPIES), _MAX_REPEATED // (length + 1))


_OF_BYTES: Final = (_replace, _replace, _insert, _insert, _remove, _repeat)


def json_mutation(*words: Any) -> Mutate:
    """Return a mutation of JSON; `words` are values and keys that such inputs have."""

    def mutate(data: bytes, rng: Random, max_bytes: int) -> bytes:
        try:
            root = [json.loads(data)]
            for _ in range(rng.randint(1, _MAX_CHANGES)):
                container, key = rng.choice(_places(root))
                change = rng.choice(_OF_JSON)
                container[key] = change(container[key], rng, [*words, root[0]])
            changed = json.dumps(root[0]).encode()
        except (ValueError, RecursionError):
            # None, or nested too deep to be changed.
            return of_bytes(data, rng, max_bytes)
        return changed if len(changed) <= max_bytes else data

    of_bytes = bytes_mutation(*(json.dumps(word).encode() for word in words))
    return mutate


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Return where the values are: in a container, by an index or a key."""
    places: list[tuple[Any, Any]] = [(root, 0)]
    for container, key in places:
        value = container[key]
        keys = range(len(value)) if isinstance(value, list) else value
        if isinstance(value, list | dict) and len(places) < _MAX_PLACES:
            places += [(value, inner) for inner in list(keys)[:_MAX_PLACES]]
    return places


def _other(_: Any, rng: Random, words: Sequence[Any]) -> Any:
    """Return another value: one of the words, or one that is anywhere in the input."""
    if rng.randrange(2):
        return rng.choice(_VALUES)
    container, key = rng.choice(_places([rng.choice(words)]))
    return _copy(container[key])


def _fewer(value: Any, rng: Random, _: Sequence[Any]) -> Any:
    if not isinstance(value, list | dict | str) or not value:
        return value
    if isinstance(value, str):
        return value[: rng.randrange(len(value))]
    kept = list(value.items() if isinstance(value, dict) else value)
    del kept[rng.randrange(len(kept))]
    return type(value)(kept)


def _more(value: Any, rng: Random, words: Sequence[Any]) -> Any:
    """Add a value of another place; to an object, under one of the words."""
    new = _other(value, rng, words)
    match value:
        case list():
            return [*value, new]
        case dict():
            keys = [word for word in words if isinstance(word, str)] or ["a"]
            return value | {rng.choice(keys): new}
        case str():
            return value + str(new)
    return value


def _many(value: Any, rng: Random, _: Sequence[Any]) -> Any:
    """Repeat one of the items, under a name of its own each, or a text."""
    match value:
        case [*_] if value:
            item = rng.choice(value)
            return value + [item] * _copies(rng, len(json.dumps(item)))
        case dict() if value:
            key, item = rng.choice(list(value.items()))
            count = _copies(rng, len(key) + len(json.dumps(item)))
            return value | {f"{key}{i}": item for i in range(count)}
        case str():
            return value * _copies(rng, len(value))
    return value


def _series(value: Any, rng: Random, _: Sequence[Any]) -> Any:
    """Add the multiples of a text to its list: that twice, three times and so on."""
    if not isinstance(value, list) or not (texts := [v for v in value if isinstance(v, str)]):
        return value
    text = rng.choice(texts)[:1]
    return value + [text * count for count in range(2, min(_copies(rng), _MAX_SERIES))]


def _nested(value: Any, rng: Random, words: Sequence[Any]) -> Any:
    keys = [word for word in words if isinstance(word, str)]
    key = rng.choice(keys) if keys and rng.randrange(2) else None
    for _ in range(min(_copies(rng), _MAX_NESTING)):
        value = [value] if key is None else {key: value}
    return value


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


Change = Callable[[Any, Random, Sequence[Any]], Any]
_OF_JSON: Final[Sequence[Change]] = (_other, _other, _fewer, _more, _more, _many, _series, _nested)
