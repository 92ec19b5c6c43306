"""What becomes of the types of GGUF's tensors."""

from batching.model_files.gguf_formats import (
    EIGHT_BITS,
    FORMATS,
    Format,
    format_of,
    kernel_bits,
    loses_bits,
    parameter_bits,
)
from tests.support.rows import rows


@rows(
    ("type_name", "has_kernels", "kept", "is_lossy"),
    [
        ("Q4_0", False, Format(4), False),
        ("Q6_K", False, EIGHT_BITS, True),
        ("Q6_K", True, Format(8, 16), False),
        ("BF16", True, None, False),
    ],
)
def test_a_type_is_kept_as_it_is_where_there_is_a_format(
    type_name: str, has_kernels: bool, kept: Format | None, is_lossy: bool
) -> None:
    assert format_of(type_name, has_kernels=has_kernels) == kept
    assert loses_bits(type_name, has_kernels=has_kernels) is is_lossy


def test_a_format_says_what_it_takes() -> None:
    assert (Format(4).stored_bits, str(Format(4)), Format(8, 16).mlx_group_size) == (
        5,
        "4 bits",
        32,
    )
    fp4 = FORMATS["NVFP4"]
    assert (fp4.stored_bits, str(fp4), fp4.mlx_group_size) == (4.5, "nvfp4", 16)
    assert (parameter_bits("Q4_0", Format(4)), parameter_bits("Q4_K", Format(4))) == (1, 0.625)


@rows(
    ("mode", "bits", "group_size", "kept"),
    [
        ("affine", 3, 64, 4),
        ("affine", 6, 64, 8),
        ("affine", 4, 48, None),
        ("mxfp4", 4, 32, 4),
        ("nvfp4", 4, 16, None),
    ],
)
def test_the_kernels_have_4_and_8_bits(
    mode: str, bits: int, group_size: int, kept: int | None
) -> None:
    assert kernel_bits(mode, bits, group_size) == kept
