"""Tables and sizes."""

from app.commands.output import size_text, table
from tests.support.rows import rows


def test_columns_are_aligned() -> None:
    assert table(("A", "B", "C"), [("long", "x", ""), ("y", "longer", "z")]) == (
        "A     B       C\nlong  x\ny     longer  z"
    )


@rows(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (22 << 10, "22 KiB"),
        (94 << 20, "94 MiB"),
        ((1 << 30) * 4.34, "4.3 GiB"),
    ],
)
def test_a_size_has_the_unit_that_fits(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text
