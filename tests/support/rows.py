"""A table of cases as one test: as a test of its own each costs more than most of them take.

    @rows(("text", "value"), [("1", 1), ("x", None)])
    def test_numbers_are_read(text: str, value: int | None) -> None: ...

It is written as `pytest.mark.parametrize` is.  All rows are tried, and the failure names those that fail.  Fixtures
are those of the one test: what a row changes in them is there for the next.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

Test = Callable[..., Any]
Row = dict[str, Any]


def rows(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Make one test of all cases: values of a parameter, or tuples of those of several."""
    if isinstance(names, str):
        table = [{names: case} for case in cases]
    else:
        table = [dict(zip(names, case, strict=True)) for case in cases]

    def decorate(test: Test) -> Test:
        tried = (
            _tried_awaited(test, table)
            if inspect.iscoroutinefunction(test)
            else _tried(test, table)
        )
        # Pytest looks for fixtures of the parameters that are left.
        signature = inspect.signature(test)
        others = [p for p in signature.parameters.values() if p.name not in table[0]]
        vars(tried)["__signature__"] = signature.replace(parameters=others)
        return tried

    return decorate


def _tried(test: Test, table: Sequence[Row]) -> Test:
    @wraps(test)
    def try_all(*args: Any, **fixtures: Any) -> None:
        failures: list[Exception] = []
        for row in table:
            try:
                test(*args, **fixtures, **row)
            except Exception as error:
                failures.append(_named(error, row))
        _raise_all(failures, table)

    return try_all


def _tried_awaited(test: Test, table: Sequence[Row]) -> Test:
    @wraps(test)
    async def try_all(*args: Any, **fixtures: Any) -> None:
        failures: list[Exception] = []
        for row in table:
            try:
                await test(*args, **fixtures, **row)
            except Exception as error:
                failures.append(_named(error, row))
        _raise_all(failures, table)

    return try_all


def _named(error: Exception, row: Row) -> Exception:
    error.add_note(f"in the row {row!r:.500}")
    return error


def _raise_all(failures: Sequence[Exception], table: Sequence[Row]) -> None:
    if failures:
        raise ExceptionGroup(f"{len(failures)} of {len(table)} rows", failures)
