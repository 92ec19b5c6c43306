"""The kernels: constants, names and shapes of inputs and outputs, and how each is launched.

Dimensions in shapes: T tokens, R rows (one query each), Hq and Hkv heads, S splits, W blocks of a table.

The pools are `[Hkv * num_slots, dim]`, heads first, and are written through inputs, of which MLX knows
nothing: a `token`, uint32 `[8]`, orders the kernels.  Each that writes returns the next token, a copy, and so does
the one that ends the reading; what must come after it takes that token.

Dims are multiples of 8; ValueError names what a kernel cannot do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from batching.backend.platforms.gpu.kernels.sources import (
    DType,
    KernelSource,
    Launch,
    Target,
    kernel_source,
)

# A simdgroup of Metal, a warp of CUDA.
_LANES: Final = 32
# Every GPU of either kind has this much for a group.
MAX_SHARED_BYTES: Final = 32 * 1024
# Elements that a thread holds for its heads at once, of queries and then of values; more would spill.
_MAX_HELD: Final = 96
_TOKEN: Final[Mapping[str, DType]] = {"token": DType.UINT32}
_NEXT_TOKEN: Final[Mapping[str, DType]] = {"next_token": DType.UINT32}


@dataclass(frozen=True)
class PoolShape:
    """A layer's pool: keys `[num_kv_heads * num_slots, key_dim]`, values with value_dim, of any number of slots.

    dtype: that of the arrays.  With int8 two more follow them, key_scales and value_scales, float32
    `[num_kv_heads * num_slots]`, by which the integers of a row are multiplied.
    values_in_keys: the values are the first dims of the keys (latent attention), and there is no value_pool.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: DType
    values_in_keys: bool = False

    def __post_init__(self) -> None:
        for name in ("key_dim", "value_dim"):
            if getattr(self, name) % 8:
                raise ValueError(f"{name} {getattr(self, name)} is not a multiple of 8")
        if self.values_in_keys and self.is_quantized:
            raise ValueError("latents are not kept in 8 bits")
        if self.values_in_keys and self.value_dim > self.key_dim:
            raise ValueError(f"{self.value_dim} dims of values in keys of {self.key_dim}")

    @property
    def is_quantized(self) -> bool:
        return self.dtype is DType.INT8

    @property
    def arrays(self) -> Mapping[str, DType]:
        names = ("key_pool",) if self.values_in_keys else ("key_pool", "value_pool")
        scales = ("key_scales", "value_scales") if self.is_quantized else ()
        return {**dict.fromkeys(names, self.dtype), **dict.fromkeys(scales, DType.FLOAT32)}

    @property
    def constants(self) -> Mapping[str, int | DType]:
        return {
            "Pool": self.dtype,
            "NUM_KV_HEADS": self.num_kv_heads,
            "KEY_DIM": self.key_dim,
            "VALUE_DIM": self.value_dim,
            "VALUES_IN_KEYS": self.values_in_keys,
            "QUANTIZED": self.is_quantized,
        }


@dataclass(frozen=True)
class KVWrite:
    """Writes a step's keys and values into their slots.

    In: keys `[T, Hkv, Dk]`, values `[T, Hkv, Dv]` (both `dtype`), slots uint32 `[max(T, 8)]`, the pool's arrays,
    token; no values where they are in the keys.  Out: next_token.  A slot beyond the pool's is padding, and is not written.

    A pool of 8 bits rounds them.  If `dtype` is int8, they are rounded already, and copied bit by bit: after the values come
    their scales, new_key_scales and new_value_scales, float32 `[max(T * Hkv, 8)]`.
    """

    pool: PoolShape
    dtype: DType
    threads: int = 256

    def __post_init__(self) -> None:
        if self.dtype is DType.INT8 and not self.pool.is_quantized:
            raise ValueError("integers are written to a pool of 8 bits only")

    def source(self, target: Target) -> KernelSource:
        names = ("keys",) if self.pool.values_in_keys else ("keys", "values")
        is_rounded = self.dtype is DType.INT8
        scales = ("new_key_scales", "new_value_scales") if is_rounded else ()
        rows = {**dict.fromkeys(names, self.dtype), **dict.fromkeys(scales, DType.FLOAT32)}
        return kernel_source(
            "kv_write_8bit" if self.pool.is_quantized and not is_rounded else "kv_write",
            target,
            {**rows, "slots": DType.UINT32, **self.pool.arrays, **_TOKEN},
            _NEXT_TOKEN,
            {**self.pool.constants, "Model": self.dtype, "THREADS": self.threads},
        )

    def launch(self, num_tokens: int) -> Launch:
        return Launch.of_groups(self.threads, num_tokens)


@dataclass(frozen=True)
class NormRopeWrite:
    """Norms and rotates queries and keys, and writes keys and values into their slots.

    In: queries `[T, Hq, Dk]`, keys `[T, Hkv, Dk]`, values `[T, Hkv, Dv]`, with a norm q_weight and k_weight
    `[Dk]` (all `dtype`), inv_freq float32 `[max(rotary_dim / 2, 8)]`, positions int32 `[max(T, 8)]`, slots
    uint32 `[max(T, 8)]`, the pool's arrays, token.  Out: queries_out `[T, Hq, Dk]`, next_token.

    norm_eps: of the RMS norm over each head; None for no norm.
    rotary_dim: the first dims are rotated, in float32, by position * inv_freq, and multiplied by rotary_scale.
    traditional: pairs are neighbours, and not one of each half.
    Between norm and rotation nothing is rounded to `dtype`, as separate operations would.
    """

    pool: PoolShape
    dtype: DType
    num_heads: int
    rotary_dim: int
    traditional: bool = False
    norm_eps: float | None = None
    rotary_scale: float = 1.0
    threads: int = 128

    def __post_init__(self) -> None:
        if self.pool.values_in_keys:
            raise ValueError("norm and rotation of latent attention are not those of its heads")
        if self.pool.is_quantized:
            raise ValueError("rotated keys are not rounded to 8 bits: KVWrite does that")
        if self.rotary_dim % 2 or self.rotary_dim > self.pool.key_dim:
            raise ValueError(f"{self.rotary_dim} of {self.pool.key_dim} dims cannot be rotated")

    def source(self, target: Target) -> KernelSource:
        weights = ("q_weight", "k_weight") if self.norm_eps is not None else ()
        model = ("queries", "keys", "values", *weights)
        return kernel_source(
            "norm_rope_write",
            target,
            {
                **dict.fromkeys(model, self.dtype),
                "inv_freq": DType.FLOAT32,
                "positions": DType.INT32,
                "slots": DType.UINT32,
                **self.pool.arrays,
                **_TOKEN,
            },
            {"queries_out": self.dtype, **_NEXT_TOKEN},
            {
                **self.pool.constants,
                "Model": self.dtype,
                "NUM_HEADS": self.num_heads,
                "ROTARY_DIM": self.rotary_dim,
                "ROTARY_SCALE": float(self.rotary_scale),
                "TRADITIONAL": self.traditional,
                "HAS_NORM": self.norm_eps is not None,
                "NORM_EPS": float(self.norm_eps or 0.0),
                "THREADS": self.threads,
            },
        )

    def launch(self, num_tokens: int) -> Launch:
        num_heads = self.num_heads + self.pool.num_kv_heads
        return Launch.of_groups(
            self.threads, num_tokens, _ceil_div(num_heads, self.threads // _LANES)
        )


@dataclass(frozen=True)
class PagedDecode:
    """Attention of rows with one query each, in splits of their keys; `MergeSplits` joins them.

    In: queries `[R, Hq, Dk]` (`dtype`), the pool's arrays, block_tables uint32 `[R, W]`, ranges int32
    `[R, 2]` (first visible position, how many), token; pad tables and ranges to 8 elements.
    Out: partials float32 `[R, Hq, S, Dv]`, stats float32 `[R, Hq, S, 2]` (largest score, sum of weights).

    S splits of `split_keys` must cover the longest range.  A split beyond a row's range has statistics of
    minus infinity and 0, and its partials are not written.
    scores are `scale * query . key`, then `soft_cap * tanh(score / soft_cap)` where there is one.
    Each thread group reads a key once for the query heads that share it, up to eight.
    """

    pool: PoolShape
    dtype: DType
    num_heads: int
    block_size: int
    scale: float
    soft_cap: float = 0.0
    split_keys: int = 512
    threads: int = 256

    def __post_init__(self) -> None:
        if self.num_heads % self.pool.num_kv_heads:
            raise ValueError(f"{self.pool.num_kv_heads} KV heads for {self.num_heads} heads")
        if self.shared_bytes > MAX_SHARED_BYTES:
            raise ValueError(f"{self.shared_bytes} bytes of shared memory are too many")

    @property
    def heads_at_once(self) -> int:
        """The number of query heads of a KV head that one thread group computes."""
        group_size = self.num_heads // self.pool.num_kv_heads
        most = min(8, max(_MAX_HELD // self._held, 1))
        return max(heads for heads in range(1, most + 1) if group_size % heads == 0)

    @property
    def _held(self) -> int:
        """Elements of a head that a thread has, of a query and then of the values."""
        return 8 * max(_vectors(self.pool.key_dim), _vectors(self.pool.value_dim))

    @property
    def shared_bytes(self) -> int:
        sums = self.threads // _team(self.pool.value_dim) * self.pool.value_dim
        return 4 * (self.split_keys * (1 + self.heads_at_once) + sums)

    def source(self, target: Target) -> KernelSource:
        heads = self.heads_at_once
        keys_at_once = 4 if heads * self._held <= _MAX_HELD // 3 else 2
        dots, lanes = _power_of_two(keys_at_once * heads), _team(self.pool.key_dim)
        return kernel_source(
            "paged_decode",
            target,
            {
                "queries": self.dtype,
                **self.pool.arrays,
                "block_tables": DType.UINT32,
                "ranges": DType.INT32,
                **_TOKEN,
            },
            {"partials": DType.FLOAT32, "stats": DType.FLOAT32},
            {
                **self.pool.constants,
                "NUM_HEADS": self.num_heads,
                "BLOCK_SIZE": self.block_size,
                "SCALE": float(self.scale),
                "SOFT_CAP": float(self.soft_cap),
                "SPLIT_KEYS": self.split_keys,
                "THREADS": self.threads,
                "HEADS": heads,
                "HEAD_TILES": self.num_heads // self.pool.num_kv_heads // heads,
                "KEYS_AT_ONCE": keys_at_once,
                "DOTS": dots,
                "DOTS_EACH": max(dots // lanes, 1),
                "LANES_A_DOT": max(lanes // dots, 1),
                "KEY_LANES": lanes,
                "KEY_TEAMS": self.threads // lanes,
                "KEY_STEPS": _vectors(self.pool.key_dim),
                "VALUE_LANES": _team(self.pool.value_dim),
                "VALUE_TEAMS": self.threads // _team(self.pool.value_dim),
                "VALUE_STEPS": _vectors(self.pool.value_dim),
                "VALUE_STRIDE": self.pool.key_dim
                if self.pool.values_in_keys
                else self.pool.value_dim,
            },
        )

    def num_splits(self, longest: int) -> int:
        """Return how many splits the longest range of a step has."""
        return max(_ceil_div(longest, self.split_keys), 1)

    def launch(self, num_rows: int, num_splits: int) -> Launch:
        return Launch.of_groups(
            self.threads, self.num_heads // self.heads_at_once, num_rows, num_splits
        )


@dataclass(frozen=True)
class MergeSplits:
    """Joins the splits of `PagedDecode`.

    In: partials float32 `[R, Hq, S, Dv]`, stats float32 `[R, Hq, S, 2]`, with sinks float32 `[max(Hq, 8)]`,
    token.  Out: out `[R, Hq, Dv]` (`dtype`), next_token.  A row without keys gives 0.
    """

    dtype: DType
    num_heads: int
    value_dim: int
    has_sinks: bool = False

    def source(self, target: Target) -> KernelSource:
        sinks = ("sinks",) if self.has_sinks else ()
        return kernel_source(
            "merge_splits",
            target,
            {**dict.fromkeys(("partials", "stats", *sinks), DType.FLOAT32), **_TOKEN},
            {"out": self.dtype, **_NEXT_TOKEN},
            {
                "Model": self.dtype,
                "NUM_HEADS": self.num_heads,
                "VALUE_DIM": self.value_dim,
                "HAS_SINKS": self.has_sinks,
            },
        )

    def launch(self, num_rows: int) -> Launch:
        threads = _ceil_div(self.value_dim, _LANES) * _LANES
        return Launch.of_groups(threads, self.num_heads, num_rows)


def _team(dim: int) -> int:
    """Return how many threads read a row, eight elements each: a power of two, up to 32."""
    return min(_power_of_two(_ceil_div(dim, 8)), _LANES)


def _power_of_two(number: int) -> int:
    """Return the next one."""
    return 1 << (number - 1).bit_length()


def _vectors(dim: int) -> int:
    """Return how many times eight elements each thread of a team reads."""
    return _ceil_div(dim, 8 * _LANES)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
