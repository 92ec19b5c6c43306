"""The matrices of an adapter: which tensors of its file are A and B of which layer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batching.adapters.files.adapter_config import AdapterConfig
from batching.adapters.files.numbers import DTYPE_BYTES
from batching.adapters.files.tensor_names import part_of
from batching.model_files.safetensors_header import PlacedTensor


class LayerSizes(NamedTuple):
    """The sizes of A, `[inputs, rank]`, and of B, `[rank, outputs]`."""

    inputs: int
    outputs: int
    rank: int


@dataclass(frozen=True, slots=True)
class Matrices:
    """A and B of a layer, as they are in the file.

    scale: what x A B is multiplied with.
    is_transposed: whether A is `[rank, inputs]` and B `[outputs, rank]`.
    """

    a: PlacedTensor
    b: PlacedTensor
    sizes: LayerSizes
    scale: float
    is_transposed: bool


def check_places(placed: Sequence[PlacedTensor], size: int) -> None:
    """Check that tensors have types that are read, and lie behind each other up to the end of the file.

    size: of the file in bytes.

    Raises:
        ValueError: they do not; the text follows the file's name.
    """
    end = None
    for tensor, start in sorted(placed, key=lambda each: (each.start, each.tensor.num_bytes)):
        if tensor.type_name not in DTYPE_BYTES:
            kinds = ", ".join(DTYPE_BYTES)
            raise ValueError(f"has {tensor.name} in {tensor.type_name}; only {kinds} are read")
        if tensor.num_bytes != math.prod(tensor.shape) * DTYPE_BYTES[tensor.type_name]:
            raise ValueError(
                f"has {tensor.name} in {tensor.num_bytes} bytes, which are not those of its shape"
            )
        if end not in (None, start):
            raise ValueError(f"has {tensor.name} not right behind the tensor before")
        end = start + tensor.num_bytes
    if end != size:
        raise ValueError("has bytes behind its last tensor")


def matrices_of(placed: Sequence[PlacedTensor], config: AdapterConfig) -> Mapping[str, Matrices]:
    """Return the matrices by the layers' paths.

    Raises:
        ValueError: there is something that is not served, or does not go together; the text follows the file's name.
    """
    if not placed:
        raise ValueError("has no tensors")
    found: dict[str, dict[str, PlacedTensor]] = {}
    for each in placed:
        part = part_of(each.tensor.name, config.names)
        layer = found.setdefault(part.layer, {})
        if part.matrix in layer:
            raise ValueError(f"has {part.matrix.upper()} of {part.layer} twice")
        layer[part.matrix] = each
    return {path: _joined(path, layer, config) for path, layer in found.items()}


def _joined(path: str, layer: Mapping[str, PlacedTensor], config: AdapterConfig) -> Matrices:
    for one, other in ("ab", "ba"):
        if one not in layer:
            raise ValueError(f"has {other.upper()} of {path} without {one.upper()}")
    a, b = layer["a"], layer["b"]
    for each in a, b:
        if len(shape := each.tensor.shape) != 2:
            raise ValueError(f"has {each.tensor.name} of shape {[*shape]}, which is no matrix")
    of_a, of_b = (each.tensor.shape[:: -1 if config.is_transposed else 1] for each in (a, b))
    if of_a[1] != of_b[0]:
        raise ValueError(f"has A of {path} with rank {of_a[1]}, and B with rank {of_b[0]}")
    sizes = LayerSizes(inputs=of_a[0], outputs=of_b[1], rank=of_a[1])
    if not all(sizes):
        raise ValueError(
            f"has {path} with {sizes.inputs} inputs, {sizes.outputs} outputs and rank {sizes.rank}"
        )
    return Matrices(a, b, sizes, config.scale(path, sizes.rank), config.is_transposed)
