"""Encoders on the native kernels: attention with its products, and the MLP, are an operation each.

The pool of keys and values has room for one step, and all layers write into the same.
"""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from batching.backend.encoders.bert import Bert, BertAttention, BertLayer
from batching.backend.encoders.encoder import PlainTrunk
from batching.backend.encoders.modernbert import ModernBert, ModernBertAttention, ModernBertLayer
from batching.backend.encoders.ragged import Texts
from batching.backend.host_array import host_array
from batching.backend.platforms.cpu.native_loader import Native

_BLOCK_SIZE: Final = 32
# The kernels' numbers of activations.
_ACTIVATIONS: Final = {nn.gelu_approx: 1, nn.gelu: 2, nn.relu: 3}

# Longer than the windows of models; the other text is within them.
_PROBE_TOKENS: Final = 160
_SHORT_TOKENS: Final = 5
# As a share of the largest number; windows or norms that are mistaken are off by far more.
_TOLERANCE: Final = 1e-3
# A norm as the kernels take it; this one is none.
_NO_NORM: Final[tuple[list[float], float, bool, list[float]]] = ([], 0.0, False, [])


class NativeStep:
    """The texts of a step, as the kernels read them."""

    def __init__(self, kernels: Any, texts: Texts) -> None:
        self._kernels, self._texts = kernels, texts
        self._steps: dict[int | None, Any] = {}
        self._angles: dict[float, Any] = {}
        self._positions = texts.positions()

    def window(self, window: int | None) -> int | None:
        """Return how far tokens see to either side; None if that is all of each text."""
        longest = max(group.length for group in self._texts.groups)
        return None if window is None or window >= longest - 1 else window

    def step(self, window: int | None) -> Any:
        """Return the step of the kernels for layers with a window."""
        if window not in self._steps:
            self._steps[window] = self._step(window)
        return self._steps[window]

    def angles(self, theta: float | None, dim: int) -> tuple[mx.array | None, mx.array | None]:
        if theta is None:
            return None, None
        if theta not in self._angles:
            radians = theta ** -(np.arange(0, dim, 2) / dim)
            frequencies = self._kernels.Frequencies(radians.tolist(), 1.0)
            self._angles[theta] = self._kernels.angles(self._positions, frequencies)
        cosines, sines = self._angles[theta]
        return cosines, sines

    def _step(self, window: int | None) -> Any:
        rows: list[tuple[int, int, int, int, int]] = []
        slots: list[np.ndarray[Any, Any]] = []
        num_blocks = 0
        for group in self._texts.groups:
            for first in range(group.first, group.stop, group.length):
                rows += _rows(first, group.length, num_blocks, window)
                slots.append(np.arange(group.length) + num_blocks * _BLOCK_SIZE)
                num_blocks += -(-group.length // _BLOCK_SIZE)
        return self._kernels.step(
            np.array(rows, np.int32),
            np.arange(num_blocks, dtype=np.int32),
            np.concatenate(slots).astype(np.int32),
        )


def _rows(
    first: int, length: int, table: int, window: int | None
) -> list[tuple[int, int, int, int, int]]:
    """Return slices: first row, number of rows, position, where the blocks begin, until where they see."""
    if window is None:
        return [(first, length, 0, table, length)]
    return [(first + i, 1, i, table, min(length, i + window + 1)) for i in range(length)]


class NativeLayer:
    """A layer: norms before both halves (ModernBERT), or behind them (BERT)."""

    def __init__(self, kernels: Any, layer: BertLayer | ModernBertLayer, pool: Any) -> None:
        self._kernels, self._pool = kernels, pool
        self.theta: float | None = None
        self.window: int | None = None
        self._after: list[nn.LayerNorm] = []
        attention: BertAttention | ModernBertAttention
        before: list[nn.LayerNorm | None] = [None, None]
        if isinstance(layer, BertLayer):
            attention = bert = layer.attention
            up, down = layer.intermediate.dense, layer.output.dense
            products, activation = (
                [bert.qkv, bert.output.dense],
                layer.intermediate.activation,
            )
            self._after = [bert.output.LayerNorm, layer.output.LayerNorm]
        else:
            attention = modern = layer.attn
            up, down = layer.mlp.Wi, layer.mlp.Wo
            products, activation = [modern.Wqkv, modern.Wo], layer.mlp.activation
            before = [layer.get("attn_norm"), layer.mlp_norm]
            self.theta, self.window = modern.theta, modern.window
        size = products[0].weight.shape[1]
        self.dim = size // attention.num_heads
        norms = [_norm(before[0], size), *[_NO_NORM] * 4]
        self._attention = kernels.attention(
            [_packed(kernels, each) for each in products],
            norms,
            attention.num_heads,
            self.dim**-0.5,
            residual=1.0,
        )
        self._mlp = kernels.mlp(
            [_packed(kernels, each) for each in (up, down)],
            [_norm(before[1], size), _NO_NORM],
            _ACTIVATIONS[activation],
            1.0,
        )

    def __call__(self, x: mx.array, step: NativeStep) -> mx.array:
        window = step.window(self.window)
        angles = step.angles(self.theta, self.dim)
        x = self._kernels.run_attention(
            x,
            *angles,
            False,
            self._attention,
            self._pool,
            step.step(window),
            0 if window is None else window + 1,
        )
        x = self._behind(0, x)
        return self._behind(1, self._kernels.run_mlp(x, self._mlp))

    def _behind(self, index: int, x: mx.array) -> mx.array:
        if not self._after:
            return x
        norm = self._after[index]
        normed: mx.array = self._kernels.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return normed


def _packed(kernels: Any, linear: nn.Linear) -> tuple[Any, list[float]]:
    return kernels.pack(linear.weight), _floats(linear.get("bias"))


def _norm(norm: nn.LayerNorm | None, size: int) -> tuple[list[float], float, bool, list[float]]:
    if norm is None:
        return _NO_NORM
    return _floats(norm.weight), norm.eps, True, _floats(norm.get("bias"))


def _floats(array: mx.array | None) -> list[float]:
    return [] if array is None else host_array(array).tolist()


class NativeTrunk:
    """A trunk whose layers the kernels compute; it returns what the plain one does."""

    def __init__(self, native: Native, trunk: PlainTrunk, max_tokens: int, max_texts: int) -> None:
        """max_tokens, max_texts: the most of a step."""
        self._kernels = native.module
        self._trunk = trunk
        sizes = trunk.sizes
        dim = sizes.hidden // sizes.num_heads
        num_blocks = max_texts + -(-max_tokens // _BLOCK_SIZE)
        pool = self._kernels.pool(num_blocks, _BLOCK_SIZE, sizes.num_heads, dim, dim)
        layers = trunk.encoder.layer if isinstance(trunk, Bert) else trunk.layers
        self._layers = [NativeLayer(self._kernels, layer, pool) for layer in layers]

    def __call__(self, texts: Texts) -> mx.array:
        step = NativeStep(self._kernels, texts)
        x: mx.array = self._trunk.embeddings(texts)[:, None]
        for layer in self._layers:
            x = layer(x, step)
        x = x.squeeze(1)
        if isinstance(self._trunk, ModernBert):
            x = self._trunk.final_norm(x)
        return x


def native_trunk(native: Native, trunk: PlainTrunk, max_tokens: int, max_texts: int) -> NativeTrunk:
    """Return a trunk on the kernels, which was found to return what the plain one does; that loses its layers.

    Raises:
        ValueError: it returns something else, or the kernels do not take it.
    """
    fast = NativeTrunk(native, trunk, max_tokens, max_texts)
    longest = min(_PROBE_TOKENS, trunk.context, max_tokens - _SHORT_TOKENS)
    lengths = (_SHORT_TOKENS, longest) if longest > _SHORT_TOKENS else (longest,)
    tokens = np.arange(sum(lengths)) * 31 % trunk.sizes.vocabulary
    texts = [part.tolist() for part in np.split(tokens, lengths[:-1])]
    probe = Texts.of(texts, [None] * len(lengths))
    plain, computed = trunk(probe), fast(probe)
    difference = float(mx.abs(plain - computed).max() / mx.abs(plain).max())
    if not difference < _TOLERANCE:
        raise ValueError(f"its hidden states would be off by {difference:.1g}")
    if isinstance(trunk, Bert):
        trunk.encoder.layer = []
    else:
        trunk.layers = []
    return fast
