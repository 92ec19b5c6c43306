"""The model's forward pass for a batch, over the layers of mlx-vlm's model.

The library's own attends to each picture by itself, and computes activations by functions that take the
CPU several times as long.  `test_the_batched_forward_is_the_librarys` holds both beside each other.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Final, cast

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx

from tests.support.seeing.batches import Batch, Grid, Pictures

# tanh(x) / x in Eigen, by powers of the square of x: within a rounding or two of tanh.
_ABOVE: Final = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_BELOW: Final = (
    1.19825839466702e-06,
    1.18534705686654e-04,
    2.26843463243900e-03,
    4.89352518554385e-03,
)


def logits(model: Any, batch: Batch, places: mx.array) -> mx.array:
    """Return the logits at places of the flat tokens."""
    trunk = model.language_model.model
    h = trunk.embed_tokens(batch.ids)
    added: list[mx.array] = []
    if batch.pictures.where:
        seen = batch.pictures.levels or with_zeros(see(model.vision_tower, batch.pictures))
        h = mx.where(batch.rows[..., None] > 0, seen[0][batch.rows], h)
        added = [level[batch.rows] for level in seen[1:]]
    turn = trunk.layers[0].self_attn.rotary_emb(h, batch.positions)
    for i, layer in enumerate(trunk.layers):
        h = h + layer.self_attn(layer.input_layernorm(h), "causal", None, batch.positions, turn)
        x = layer.post_attention_layernorm(h)
        h = h + layer.mlp.down_proj(_silu(layer.mlp.gate_proj(x)) * layer.mlp.up_proj(x))
        if i < len(added):
            h = h + added[i]
    said = trunk.norm(h.reshape(-1, h.shape[-1])[places])
    made: mx.array = model.language_model.lm_head(said)
    return made


def with_zeros(levels: Sequence[mx.array]) -> list[mx.array]:
    """Return them with a row for what is no picture."""
    return [mx.pad(level, [(1, 0), (0, 0)]) for level in levels]


def see(tower: Any, pictures: Pictures) -> list[mx.array]:
    """Return rows for all tokens: the embeddings, then what is added behind each of the first layers."""
    levels = zip(*(_see(tower, *alike) for alike in pictures.by_grid), strict=True)
    return [mx.concatenate(list(level)) for level in levels]


def _see(tower: Any, grid: Grid, pixels: mx.array) -> list[mx.array]:
    project = tower.patch_embed.proj
    # Channels come last in the library's weights.
    x = pixels.reshape(*pixels.shape[:2], project.weight.shape[-1], -1).swapaxes(2, 3)
    h = x.reshape(pixels.shape) @ project.weight.reshape(len(project.weight), -1).T + project.bias
    size = mx.array([[1, *grid]])
    h = h + tower.fast_pos_embed_interpolate(size)
    angles = mx.tile(tower.rot_pos_emb(size), (1, 2))
    cos, sin = mx.cos(angles), mx.sin(angles)
    added: list[mx.array] = []
    for i, block in enumerate(tower.blocks):
        h = h + _attend(block.attn, block.norm1(h), cos, sin)
        h = h + block.mlp.linear_fc2(_gelu(block.mlp.linear_fc1(block.norm2(h))))
        if i in tower.deepstack_visual_indexes:
            added.append(tower.deepstack_merger_list[len(added)](h))
    return [tower.merger(h), *added]


def _attend(layer: Any, x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    parts = layer.qkv(x).reshape(*x.shape[:2], 3, layer.num_heads, -1)
    q, k, v = parts.transpose(2, 0, 3, 1, 4)
    half = q.shape[-1] // 2
    q, k = (z * cos + mx.concatenate([-z[..., half:], z[..., :half]], -1) * sin for z in (q, k))
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=layer.scale)
    attended: mx.array = layer.proj(out.swapaxes(1, 2).reshape(x.shape))
    return attended


@mx.custom_function
def _custom_tanh(x: mx.array) -> mx.array:
    x = mx.clip(x, -9, 9)
    square = x * x
    above, below = (
        reduce(lambda total, c: total * square + c, rest, mx.array(first))
        for first, *rest in (_ABOVE, _BELOW)
    )
    return x * above / below


@_custom_tanh.vjp
def _slope(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * (1 - output * output)


# MLX's stubs take it for an object.
_tanh: Final[Callable[[mx.array], mx.array]] = cast(Any, _custom_tanh)


def _gelu(x: mx.array) -> Any:
    return 0.5 * x * (1 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


def _silu(x: mx.array) -> Any:
    return 0.5 * x * (1 + _tanh(0.5 * x))
