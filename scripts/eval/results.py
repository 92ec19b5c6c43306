"""What the harness has written of a run, and the table of several."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self


class Metric(NamedTuple):
    """A score of a task: `key` is the harness's name of it, with the filter's."""

    task: str
    key: str
    title: str
    is_share: bool


METRICS: Final = (
    Metric("server_facts", "acc,none", "facts, right", True),
    Metric("server_cloze", "acc,none", "last word, right", True),
    Metric("server_strings", "exact_match,stripped", "strings, right", True),
    Metric("server_cloze", "perplexity,none", "last word, perplexity", False),
    Metric("server_prose", "word_perplexity,none", "prose, perplexity", False),
)
TASKS: Final = tuple(dict.fromkeys(metric.task for metric in METRICS))


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all tasks.

    scores: of each task, by the harness's names.
    outcomes: of each task with right answers, whether each item's is right.
    """

    name: str
    seconds: float
    scores: Mapping[str, Mapping[str, Any]]
    outcomes: Mapping[str, Sequence[bool]]

    @classmethod
    def read(cls, name: str, folder: Path) -> Self:
        """Read the one run in a folder.

        Raises:
            ValueError: the folder has no results, or those of several runs.
        """
        (file,) = folder.rglob("results_*.json")
        results = json.loads(file.read_text(encoding="utf-8"))
        return cls(
            name,
            float(results["total_evaluation_time_seconds"]),
            results["results"],
            {metric.task: _outcomes(folder, metric) for metric in METRICS if metric.is_share},
        )

    def change(self, reference: "Run") -> float:
        """Return how far a run is from another one.

        That is the share of items that are right in one of them only, or the largest change of a
        perplexity, whichever is more.
        """
        num_items = sum(map(len, self.outcomes.values()))
        changes = [
            abs(_score(self, metric) / _score(reference, metric) - 1)
            for metric in METRICS
            if not metric.is_share
        ]
        return max(self.num_other(reference) / num_items, *changes)

    def num_other(self, reference: "Run") -> int:
        """Return how many items are right in one of both runs only."""
        return sum(
            mine != other
            for task, outcomes in self.outcomes.items()
            for mine, other in zip(outcomes, reference.outcomes[task], strict=True)
        )


def _outcomes(folder: Path, metric: Metric) -> list[bool]:
    (file,) = folder.rglob(f"samples_{metric.task}_*.jsonl")
    items = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    name = metric.key.partition(",")[0]
    return [bool(item[name]) for item in sorted(items, key=lambda item: int(item["doc_id"]))]


def _score(run: Run, metric: Metric) -> float:
    return float(run.scores[metric.task][metric.key])


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the lines of a table in Markdown; the first run is what the others are compared with."""
    titles = [metric.title for metric in METRICS]
    yield _line(["", *titles, "other outcomes", "s"])
    yield _line(["---", *("--:" for _ in titles), "--:", "--:"])
    for run in runs:
        cells = [_cell(run, metric) for metric in METRICS]
        yield _line([run.name, *cells, str(run.num_other(runs[0])), f"{run.seconds:.0f}"])


def _cell(run: Run, metric: Metric) -> str:
    """Return a score with its standard error, where the harness gives one."""
    score, error = _score(run, metric), run.scores[metric.task].get(_error_key(metric))
    digits = 3 if metric.is_share else 2
    shown = f"{score:.{digits}f}"
    return f"{shown} ± {error:.{digits}f}" if isinstance(error, float) else shown


def _error_key(metric: Metric) -> str:
    name, _, with_filter = metric.key.partition(",")
    return f"{name}_stderr,{with_filter}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
