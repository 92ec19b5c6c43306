"""What a run has to show: values, the bounds they are held to, and the table of both."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table; without a bound it is for information."""

    name: str
    value: str
    bound: str = ""
    is_met: bool = True


def at_most(name: str, value: float, bound: float, unit: str, digits: int = 0) -> Check:
    told, limit = f"{value:.{digits}f} {unit}", f"at most {bound:g} {unit}"
    return Check(name, told.strip(), limit.strip(), value <= bound)


def none_of(name: str, faults: Sequence[str]) -> Check:
    """Demand that there are no faults, and show the first one."""
    value = f"{len(faults)}: {faults[0]}" if faults else "0"
    return Check(name, value, "0", not faults)


def equal(name: str, value: object, wanted: object) -> Check:
    return Check(name, str(value), str(wanted), value == wanted)


def lines(checks: Iterable[Check]) -> list[str]:
    """Return the table, with a mark at each bound that is missed."""
    checks = list(checks)
    name_width = max(len(check.name) for check in checks)
    value_width = max(len(check.value) for check in checks)
    return [
        f"  {c.name:<{name_width}}  {c.value:<{value_width}}  {c.bound}"
        f"{'' if c.is_met else '  MISSED'}".rstrip()
        for c in checks
    ]
