"""The Markdown report."""

from collections.abc import Iterator, Mapping, Sequence

from scripts.gpu_check.processes import Outcome
from scripts.gpu_check.record import GOOD, Cell, Record


def markdown(facts: Mapping[str, str], outcomes: Sequence[Outcome], num_checks: int) -> str:
    """Return the report of what has run so far, of so many checks."""
    return "\n".join(_lines(facts, outcomes, num_checks)) + "\n"


def verdict(outcomes: Sequence[Outcome], num_checks: int) -> str:
    """Return the whole in a sentence."""
    bad = [o.check.name for o in outcomes if o.status not in GOOD]
    left = num_checks - len(outcomes)
    rest = f" {left} of {num_checks} checks have not run." if left else ""
    if bad:
        return (
            f"**{len(bad)} of {num_checks} checks found something wrong: {', '.join(bad)}.**{rest}"
        )
    gates = [o for o in outcomes if not o.check.is_bench]
    passed = sum(o.status == "pass" for o in gates)
    others = [f"{o.check.name} ({o.status})" for o in outcomes if o.status == "skipped"]
    without = f" Without a result: {', '.join(others)}." if others else ""
    return f"Nothing wrong was found: {passed} of {len(gates)} gates passed.{without}{rest}"


def _lines(facts: Mapping[str, str], outcomes: Sequence[Outcome], num_checks: int) -> Iterator[str]:
    yield from ("# GPU check", "", verdict(outcomes, num_checks), "")
    yield from _table(["", ""], list(facts.items()))
    yield from ("", "## Summary", "")
    rows = [
        (o.check.name, o.check.title, str(o.status), f"{o.seconds:.0f}", _summary(o.record))
        for o in outcomes
    ]
    yield from _table(["check", "what", "result", "seconds", "first finding"], rows)
    for title, is_bench in (("Gates: what is right", False), ("Benches: how fast it is", True)):
        yield from ("", f"## {title}")
        for outcome in outcomes:
            if outcome.check.is_bench == is_bench:
                yield from _section(outcome)
    yield from ("", "## Sending this report", "")
    yield (
        "Open an issue and attach this file as it is. It names the device, the system and the versions; lines of a "
        "crash are quoted as they were, but for the paths of the checkout and of the home directory."
    )


def _summary(record: Record) -> str:
    """Return a line: what failed first, or why there is nothing."""
    first = record.failures[:1] or ([] if record.rows else record.notes[:1])
    return first[0].splitlines()[0] if first else ""


def _section(outcome: Outcome) -> Iterator[str]:
    record = outcome.record
    yield from ("", f"### {outcome.check.title}: {outcome.status}")
    for failure in record.failures:
        first, *others = failure.splitlines()
        yield from ("", f"- {first}")
        if others:
            yield from ("", "```text", *others, "```")
    if record.rows:
        yield ""
        yield from _table(record.header, record.rows)
    for note in record.notes:
        yield from ("", note)


def _table(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> Iterator[str]:
    yield _row(header)
    yield _row(["---"] * len(header))
    yield from map(_row, rows)


def _row(cells: Sequence[Cell]) -> str:
    texts = [str(cell).replace("|", r"\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(texts)} |"
