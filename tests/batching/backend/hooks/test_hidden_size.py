"""The size of hidden states, found without computing any."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from batching.backend.hooks.rows import hidden_size_of
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "mamba"])
def test_the_trunk_shows_it(family: str) -> None:
    assert hidden_size_of(tiny_model(family)) == 32


class Trunk(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [nn.Linear(2, 2)]
        self._result = result

    def __call__(self, token_ids: mx.array, cache: Any = None) -> Any:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class Model(nn.Module):
    def __init__(self, result: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = Trunk(result)

    @property
    def layers(self) -> list[nn.Linear]:
        return self.model.layers


class Flat(nn.Module):
    """Owns its layers itself."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [nn.Linear(2, 2)]


def test_what_shows_none_has_none() -> None:
    assert hidden_size_of(Model(mx.zeros((1, 1, 6)))) == 6
    assert hidden_size_of(Model((mx.zeros((1, 1, 6)), None))) is None
    assert hidden_size_of(Model(ValueError("it needs more"))) is None
    assert hidden_size_of(Flat()) is None
