"""A model as from a file that was written without mlx-lm: its caches are of kinds of its own.

One layer has a recurrent state in a plain object; the next attends to keys and values in another.
"""

import mlx.core as mx
import mlx.nn as nn

from scripts.make_model.random_weights import randomise
from scripts.make_model.tiny_configs import VOCAB_SIZE

_DIM = 32
_NUM_HEADS = 2


class Memory:
    """A decaying sum of what was seen, and how much that was."""

    def __init__(self) -> None:
        self.total: mx.array | None = None
        self.num_seen = 0


class Notes:
    """Keys and values by name, grown by `note`."""

    def __init__(self) -> None:
        self.pages: dict[str, mx.array] = {}

    def note(self, **rows: mx.array) -> list[mx.array]:
        for name, new in rows.items():
            old = self.pages.get(name)
            self.pages[name] = new if old is None else mx.concatenate([old, new], axis=2)
        return [self.pages[name] for name in rows]


class Mixer(nn.Module):
    """s[t] = a * s[t - 1] + x[t], token by token."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decay = mx.zeros(_DIM)
        self.inner = nn.Linear(_DIM, _DIM)
        self.outer = nn.Linear(_DIM, _DIM)

    def __call__(self, x: mx.array, memory: Memory) -> mx.array:
        total = mx.zeros((x.shape[0], _DIM)) if memory.total is None else memory.total
        rows, decay = self.inner(x), mx.sigmoid(self.decay)
        totals = []
        for at in range(x.shape[1]):
            total = decay * total + rows[:, at]
            totals.append(total)
        memory.total = total
        memory.num_seen += x.shape[1]
        mixed: mx.array = self.outer(mx.tanh(mx.stack(totals, axis=1)))
        return mixed


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.project = nn.Linear(_DIM, 3 * _DIM)
        self.outer = nn.Linear(_DIM, _DIM)

    def __call__(self, x: mx.array, notes: Notes) -> mx.array:
        batch, length, _ = x.shape
        heads = self.project(x).reshape(batch, length, 3 * _NUM_HEADS, -1).swapaxes(1, 2)
        queries, new_keys, new_values = mx.split(heads, 3, axis=1)
        keys, values = notes.note(keys=new_keys, values=new_values)
        scores = queries @ keys.swapaxes(2, 3)
        num_keys = keys.shape[2]
        ages = mx.arange(num_keys - length, num_keys)[:, None] - mx.arange(num_keys)
        # A token that is far away counts less; one that comes later, nothing.
        scores = mx.where(ages >= 0, scores - 0.1 * ages, -mx.inf)
        attended = mx.softmax(scores, axis=-1) @ values
        out: mx.array = self.outer(attended.swapaxes(1, 2).reshape(batch, length, -1))
        return out


class Layer(nn.Module):
    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm = nn.RMSNorm(_DIM)
        self.mixer = mixer

    def __call__(self, x: mx.array, memory: Memory | Notes) -> mx.array:
        mixed: mx.array = self.mixer(self.norm(x), memory)
        return x + mixed


class Trunk(nn.Module):
    def __init__(self, *, reads_positions: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embedding = nn.Embedding(VOCAB_SIZE, _DIM)
        self.layers = [Layer(mixer()) for mixer in (Mixer, Attention, Mixer, Attention)]
        self._reads_positions = reads_positions

    def __call__(self, token_ids: mx.array, cache: list[Memory | Notes]) -> mx.array:
        x: mx.array = self.embedding(token_ids)
        first = cache[0]
        if self._reads_positions:
            assert isinstance(first, Memory)
            x = x + mx.sin(mx.arange(x.shape[1]) + first.num_seen)[:, None]
        for layer, memory in zip(self.layers, cache, strict=True):
            x = layer(x, memory)
        hidden: mx.array = x
        return hidden


class Model(nn.Module):
    def __init__(self, *, reads_positions: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trunk = Trunk(reads_positions=reads_positions)
        self.head = nn.Linear(_DIM, VOCAB_SIZE)

    def __call__(self, token_ids: mx.array, cache: list[Memory | Notes]) -> mx.array:
        logits: mx.array = self.head(self.trunk(token_ids, cache))
        return logits

    @property
    def layers(self) -> list[Layer]:
        return self.trunk.layers

    def make_cache(self) -> list[Memory | Notes]:
        return [Memory(), Notes(), Memory(), Notes()]


def make(*, reads_positions: bool = False) -> Model:
    """Return a model with random weights; `reads_positions`: its trunk reads a cache, too."""
    mx.random.seed(3)
    model = Model(reads_positions=reads_positions)
    randomise(model, 3)
    model.eval()
    return model
