"""The extension module; src/primitives/primitives.h says what each function computes."""

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]

class PackedWeights:
    @property
    def nbytes(self) -> int: ...
    @property
    def bytes(self) -> npt.NDArray[np.uint8]: ...
    @property
    def layout(self) -> dict[str, int]: ...
    def num_matrices(self) -> int: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def map(self, file: int, offset: int) -> None: ...
    @property
    def can_scale_inputs(self) -> bool: ...

class Pool:
    @property
    def regions(self) -> list[tuple[int, int]]: ...

class Step: ...

class ExpertLayer:
    # Of its weights.
    @property
    def nbytes(self) -> int: ...

class AttentionHalf: ...
class LatentHalf: ...
class MlpHalf: ...
class Experts: ...
class Router: ...
class MixtureHalf: ...

class Adapter:
    """Changes of packed weights, W + (A B)^T, of a LoRA adapter; keeps these weights."""

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices, padded to vectors and cache lines."""

    def touched(self) -> list[int]:
        """Return the indices of the layers, as they were given to `adapter`, that an evaluated operation has changed
        the products of."""

class AdaptedRows:
    """The adapter of each row of a step."""

    @property
    def num_rows(self) -> int: ...

class StatePool:
    def cell(self, index: int) -> tuple[int, int]:
        """Return the address and the size in bytes of a cell, which is made if it is not there."""

class StateStep: ...

class Mixer:
    def pool(self) -> StatePool: ...

# Weights and a bias; an empty one is none.
Layer = tuple[PackedWeights, Sequence[float]]
# A weight, empty for none, eps, whether it is LayerNorm, and then a bias, empty for none.
Norm = tuple[Sequence[float], float, bool, Sequence[float]]

def min_input_bits() -> int: ...
def supports_bfloat16() -> bool: ...
def isa() -> str: ...
def missing_isa() -> str: ...
def num_threads() -> int: ...
def weight_bytes() -> int: ...
def release_freed() -> None: ...
def set_num_threads(num_threads: int, nodes: Sequence[Sequence[int]] = ...) -> None: ...
def pack(
    weight: mx.array,
    scales: mx.array | None = None,
    biases: mx.array | None = None,
    bits: int = 0,
    input_bits: int = 32,
) -> PackedWeights: ...
def stored_weights(
    layout: Mapping[str, int], size: int, file: int, offset: int
) -> PackedWeights: ...
def use_bfloat16(weights: Sequence[PackedWeights]) -> None: ...
def scale_inputs(weights: Sequence[PackedWeights], shifts: bytes) -> None: ...
def adapter(layers: Sequence[tuple[PackedWeights, mx.array, mx.array]]) -> Adapter:
    """Copy an adapter: weights as operations have them, A `[inputs, rank]`, and B `[rank, outputs]`, which has the
    adapter's scale.

    Kept in bfloat16 if both are, else in float32; ranks are from 1 to 512. Evaluates the arrays; does not hold
    the interpreter's lock.

    Raises:
        ValueError: shapes do not fit to the weights, or weights are those of experts or given twice.
    """

def adapted_rows(segments: Sequence[tuple[int, Adapter | None]]) -> AdaptedRows:
    """Give successive rows of a step an adapter, or none: a number of rows, from 1 on, and theirs.

    Raises:
        ValueError: a segment has no rows.
    """

def use_adapters(rows: AdaptedRows | None) -> AdaptedRows | None:
    """Give operations that this thread builds from now on these adapters, or none; return those before.

    These are `linear`, and the `run_` of halves and mixers, but not experts and the matrices of heads of latent
    attention. Products of weights that an adapter changes have B (A x) added at once, of x as it is before it is
    rounded. Such an operation raises ValueError when it is built if x has not one row, or as many more, for each
    row of `rows`.
    """

def linear(
    x: mx.array, weights: Sequence[PackedWeights], biases: Sequence[mx.array | None]
) -> list[mx.array]: ...
def expert_layer(weights: PackedWeights, bias: mx.array | None = None) -> ExpertLayer: ...
def switch_linear(x: mx.array, indices: mx.array, layer: ExpertLayer) -> mx.array: ...
def gated_experts(
    gate: ExpertLayer,
    up: ExpertLayer,
    down: ExpertLayer,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> Experts: ...
def experts(x: mx.array, indices: mx.array, experts: Experts) -> mx.array: ...
def arg_max(logits: mx.array) -> tuple[mx.array, mx.array]: ...
def sample(
    logits: mx.array,
    rows: Sequence[tuple[float, int, float, float, float, int]],
    edits: Sequence[
        tuple[Int32s, Float32s, Float32s, tuple[int, float, float, Float32s, Float32s] | None]
        | None
    ],
    before: mx.array | None = None,
) -> mx.array: ...
def embed(tokens: mx.array, weights: PackedWeights) -> mx.array: ...
def rms_norm(x: mx.array, weight: mx.array | None, eps: float) -> mx.array: ...
def layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float
) -> mx.array: ...
def swiglu(gate: mx.array, up: mx.array) -> mx.array: ...
def silu(x: mx.array) -> mx.array: ...
def gelu(x: mx.array) -> mx.array: ...

class Frequencies:
    def __init__(self, radians: Sequence[float], factor: float) -> None: ...

def angles(positions: mx.array, frequencies: Frequencies) -> tuple[mx.array, mx.array]: ...
def rope(x: mx.array, cosines: mx.array, sines: mx.array, traditional: bool) -> mx.array: ...
def delta_rule(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    decay: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    is_additive: bool = False,
) -> tuple[mx.array, mx.array]: ...
def convolve(x: mx.array, taps: mx.array, bias: mx.array | None = None) -> mx.array: ...
def step(slices: Int32s, tables: Int32s, slots: Int32s) -> Step:
    """slices: `[num_slices, 5]`: first row, number of rows, position of the first, where its blocks begin in `tables`, and
    the position before which all its rows attend to what follows them, too."""

def pool(
    num_blocks: int,
    block_size: int,
    num_heads: int,
    key_dim: int,
    value_dim: int,
    bits: int = 32,
    rounds_inputs: bool = False,
    is_latent: bool = False,
) -> Pool: ...
def copy_blocks(pools: Sequence[Pool], sources: Int32s, targets: Int32s) -> None: ...
def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    pool: Pool,
    step: Step,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: mx.array | None = None,
    is_chunked: bool = False,
) -> mx.array: ...
def attention(
    layers: Sequence[Layer],
    norms: Sequence[Norm],
    num_heads: int,
    scale: float,
    sinks: Sequence[float] = (),
    residual: float = 0.0,
    is_gated: bool = False,
    norms_last: bool = False,
) -> AttentionHalf: ...
def run_attention(
    x: mx.array,
    cosines: mx.array | None,
    sines: mx.array | None,
    traditional: bool,
    half: AttentionHalf,
    pool: Pool,
    step: Step,
    window: int = 0,
    is_chunked: bool = False,
    soft_cap: float = 0.0,
    query_factors: mx.array | None = None,
) -> mx.array: ...
def latent(
    inputs: Sequence[Layer],
    q: Sequence[Layer],
    heads: Sequence[PackedWeights],
    output: Sequence[Layer],
    norms: Sequence[Norm],
    num_heads: int,
    scale: float,
    residual: float = 0.0,
) -> LatentHalf: ...
def run_latent(
    x: mx.array,
    cosines: mx.array | None,
    sines: mx.array | None,
    traditional: bool,
    half: LatentHalf,
    pool: Pool,
    step: Step,
    window: int = 0,
    query_factors: mx.array | None = None,
) -> mx.array: ...
def mlp(
    layers: Sequence[Layer], norms: Sequence[Norm], activation: int = 0, residual: float = 0.0
) -> MlpHalf: ...
def run_mlp(x: mx.array, half: MlpHalf, residual: mx.array | None = None) -> mx.array: ...
def router(
    num_experts: int,
    top_k: int,
    is_sigmoid: bool,
    correction: Sequence[float] = (),
    num_groups: int = 1,
    top_groups: int = 1,
    is_normalized: bool = False,
    epsilon: float = 0.0,
    factor: float = 1.0,
) -> Router: ...
def route(router: Router, logits: Sequence[float]) -> list[tuple[int, float]]: ...
def mixture(
    router_layer: Layer,
    router: Router,
    experts: Experts,
    norms: Sequence[Norm],
    shared: MlpHalf | None = None,
    shared_gate: Layer | None = None,
    residual: float = 0.0,
) -> MixtureHalf: ...
def run_mixture(x: mx.array, half: MixtureHalf) -> mx.array: ...
def state_step(pieces: Int32s) -> StateStep: ...
def mixer(
    layers: Sequence[Layer],
    norms: Sequence[Norm],
    recurrence: str,
    columns: Sequence[tuple[int, int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    taps: Sequence[float],
    tap_bias: Sequence[float] = (),
    decay: Sequence[float] = (),
    dt_bias: Sequence[float] = (),
    step_limits: tuple[float, float] = ...,
    skip: Sequence[float] = (),
    scales: tuple[float, float] = ...,
    eps: float = 0.0,
    norm_width: int = 0,
    gates_first: bool = False,
    residual: float = 0.0,
) -> Mixer: ...
def run_mixer(x: mx.array, mixer: Mixer, pool: StatePool, step: StateStep) -> mx.array: ...
def host_kernel(
    run: Callable[[Sequence[int], Sequence[int]], None],
    inputs: Sequence[mx.array],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
) -> list[mx.array]: ...
