"""What the types of GGUF's tensors become: MLX's formats, and those that only the native kernels have."""

from dataclasses import dataclass
from typing import Final

# Bytes of a number.
FLOATS: Final = {"F32": 4, "F16": 2, "BF16": 2}
# MLX and the kernels have groups of these sizes; some types of GGUF have groups of 16, and MLX has none.
_GROUP_SIZES: Final = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Format:
    """A quantization of MLX."""

    bits: int
    group_size: int = 32
    mode: str = "affine"

    @property
    def mlx_group_size(self) -> int:
        """Return the groups that MLX can quantize in; it has no affine ones of 16."""
        return max(self.group_size, 32) if self.mode == "affine" else self.group_size

    @property
    def stored_bits(self) -> float:
        """Return the bits of a weight with its part of a scale and a bias, 16 bits each."""
        of_group = 32 if self.mode == "affine" else 8
        return self.bits + of_group / self.group_size

    def __str__(self) -> str:
        return f"{self.bits} bits" if self.mode == "affine" else self.mode


EIGHT_BITS: Final = Format(8)
FORMATS: Final = {
    "Q4_0": Format(4),
    "Q4_1": Format(4),
    "Q5_0": Format(5),
    "Q5_1": Format(5),
    "Q8_0": EIGHT_BITS,
    "Q4_K": Format(4),
    "Q5_K": Format(5),
    "IQ1_S": EIGHT_BITS,
    "IQ2_XXS": EIGHT_BITS,
    "IQ3_XXS": EIGHT_BITS,
    "IQ3_S": EIGHT_BITS,
    "IQ4_NL": EIGHT_BITS,
    "IQ4_XS": EIGHT_BITS,
    "TQ1_0": Format(2, 128),
    "TQ2_0": Format(2, 128),
    "MXFP4": Format(4, 32, "mxfp4"),
    "NVFP4": Format(4, 16, "nvfp4"),
}
# MLX has no groups of 16.
KERNEL_FORMATS: Final = FORMATS | {
    "Q2_K": Format(4, 16),
    "Q3_K": Format(4, 16),
    "Q6_K": Format(8, 16),
    "IQ1_M": Format(8, 16),
    "IQ2_XS": Format(8, 16),
    "IQ2_S": Format(8, 16),
}
# Their scales are products, which float16 would round.  The kernels keep a factor of 16 bits for
# eight groups and 8 bits for each, and as many of the biases if these are no multiples of the scales.
OF_PRODUCTS: Final = {
    **dict.fromkeys(("Q2_K", "Q4_K", "Q5_K"), 2),
    **dict.fromkeys(("Q3_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S"), 1),
    **dict.fromkeys(("IQ3_XXS", "IQ3_S", "IQ4_XS"), 1),
}


def format_of(type_name: str, *, has_kernels: bool = False) -> Format | None:
    """Return what a type of tensor is kept as; None for floats."""
    if type_name in FLOATS:
        return None
    return (KERNEL_FORMATS if has_kernels else FORMATS).get(type_name, EIGHT_BITS)


def loses_bits(type_name: str, *, has_kernels: bool = False) -> bool:
    """Tell whether a type has no format of MLX, or the kernels, that holds the same weights."""
    known = KERNEL_FORMATS if has_kernels else FORMATS
    return type_name not in FLOATS and type_name not in known


def parameter_bits(type_name: str, kept: Format) -> float:
    """Return a weight's part of what the kernels keep of its group."""
    if type_name not in OF_PRODUCTS:
        return kept.stored_bits - kept.bits
    return OF_PRODUCTS[type_name] * (8 + 16 / 8) / kept.group_size


def kernel_bits(mode: str, bits: int, group_size: int) -> int | None:
    """Return in how many bits the kernels keep a quantized weight; None if they do not know it."""
    if mode == "mxfp4":
        return 4
    if mode != "affine" or group_size not in _GROUP_SIZES:
        return None
    return 4 if bits <= 4 else 8
