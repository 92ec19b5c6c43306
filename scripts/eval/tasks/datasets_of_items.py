"""Items in the form of the harness, which asks for a data set by the function's name in a task's file."""

from typing import Any

from datasets import Dataset

from scripts.eval.tasks import items


def facts(**_: Any) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(list(items.facts()))}


def cloze(**_: Any) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(list(items.cloze()))}


def strings(**_: Any) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(list(items.strings()))}


def prose(**_: Any) -> dict[str, Dataset]:
    return {"test": Dataset.from_list(list(items.prose()))}
