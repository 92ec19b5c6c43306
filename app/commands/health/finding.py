"""One line of what `doctor` has found."""

from typing import NamedTuple


class Finding(NamedTuple):
    """What a check has found.

    verdict: `ok`; `note` if something is missing that need not be there; `bad`.
    text: what there is, or what to do.
    """

    name: str
    verdict: str
    text: str

    @property
    def is_good(self) -> bool:
        return self.verdict != "bad"


def ok(name: str, text: str) -> Finding:
    return Finding(name, "ok", text)


def note(name: str, text: str) -> Finding:
    return Finding(name, "note", text)


def bad(name: str, text: str) -> Finding:
    return Finding(name, "bad", text)
