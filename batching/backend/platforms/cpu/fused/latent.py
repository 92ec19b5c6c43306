"""Latent attention (MLA, DeepSeek-V2 2024) as one operation of the kernels; see `halves.py`."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from batching.backend.paged.layout import LayerShape
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.cpu.fused.parts import (
    AS_CACHED,
    HEADS,
    NOTHING,
    OUTPUT,
    TOLERANCE,
    Around,
    OfRows,
    Parts,
    UnknownPart,
    layers_of,
    norm_of,
)
from batching.backend.platforms.cpu.layers.per_head import HeadLinear
from batching.backend.platforms.cpu.layers.rotary import RoPE
from batching.backend.platforms.cpu.pools.cache import NativeLayerCache

_LATENT: Final = "kv_a_proj_with_mqa"
_Q: Final = (("q_a_proj", "q_a_layernorm", "q_b_proj"), ("q_proj",))
_SCALE: Final = ("scale", "softmax_scale")
_NO_CHUNKS: Final = "latents are attended to without chunks"


def is_latent(attention: nn.Module) -> bool:
    return _LATENT in attention


class LatentHalf:
    """Attention to latents, or to keys and values of each head that are made of them."""

    def __init__(self, kernels: Any, attention: nn.Module, around: Around = NOTHING) -> None:
        parts = Parts(attention)
        [latent, latent_norm] = parts.any_of((_LATENT, "kv_a_layernorm"))
        q, *more_of_q = parts.any_of(*_Q)
        (output,) = parts.any_of(*OUTPUT)
        heads = parts.maybe_all("embed_q", "unembed_out")
        expand = [] if heads else parts.any_of(("kv_b_proj",))
        rope = parts.maybe((("rope",),))
        parts.end()
        num_heads = int(parts.number(HEADS))
        self._rope = rope if isinstance(rope, RoPE) else None
        self.rotates = True
        self.tolerance = TOLERANCE[32]
        self._kernels = kernels
        inputs = layers_of([q, latent])
        self.size = inputs[0][0].shape[1]
        q_norm, q_layers = None, []
        if more_of_q:
            q_norm, last_of_q = more_of_q
            q_layers = layers_of([last_of_q])
        latent_dim = (layers_of(expand)[0][0] if expand else _packed(heads[1])).shape[1]
        query_dim = (q_layers or inputs)[0][0].shape[0] // num_heads
        rotated_dim = inputs[1][0].shape[0] - latent_dim
        outputs = layers_of([output])
        self.shape = LayerShape(1, latent_dim + rotated_dim, 0, mx.float32, latent_dim=latent_dim)
        if expand:
            value_dim = outputs[0][0].shape[1] // num_heads
            self.shape = LayerShape(num_heads, query_dim, value_dim, mx.float32)
        q_factor = parts.number(("mla_scale_q_lora",), 1.0)
        weight, *of_norm = norm_of(latent_norm, latent_dim)
        factor = parts.number(("mla_scale_kv_lora",), 1.0)
        self.half = kernels.latent(
            inputs,
            q_layers,
            [_packed(head) for head in heads],
            layers_of(expand) + outputs,
            [
                norm_of(around.norm, self.size),
                norm_of(q_norm, inputs[0][0].shape[0]),
                ([factor * value for value in weight], *of_norm),
                norm_of(around.output_norm, self.size),
            ],
            num_heads,
            q_factor * parts.number(_SCALE, query_dim**-0.5),
            around.residual,
        )

    def takes(self, x: mx.array | None, cache: Any) -> bool:
        return (
            isinstance(cache, NativeLayerCache)
            and x is not None
            and not cache.shape.is_shared
            and cache.shape.latent_dim == self.shape.latent_dim
            and not cache.shape.soft_cap
            and x.ndim == 3
            and x.shape[1] == 1
        )

    def __call__(
        self, x: mx.array, mask: Any, cache: NativeLayerCache, rows: OfRows = AS_CACHED
    ) -> mx.array:
        rope = self._rope if self.rotates else None
        positions = cache.offset if rows.positions is None else rows.positions
        angles = (None, None) if rope is None else rope.angles(positions)

        def run(pool: object, step: object, window: SlidingWindow) -> mx.array:
            if window.is_chunked:
                raise TypeError(_NO_CHUNKS)
            is_traditional = rope is not None and rope.is_traditional
            attended: mx.array = self._kernels.run_latent(
                x,
                *angles,
                is_traditional,
                self.half,
                pool,
                step,
                window.size,
                None if rows.factors is None else rows.factors.flatten(),
            )
            return attended

        return cache.run_attention(run, mask)


def _packed(head: nn.Module) -> Any:
    if type(head) is not HeadLinear:
        raise UnknownPart(f"{type(head).__name__} has no matrix for each head")
    return head.packed
