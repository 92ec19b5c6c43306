"""The items of the evaluation, and what becomes of the harness's results."""

import json
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final

import pytest

from scripts.eval.__main__ import main, too_far
from scripts.eval.results import METRICS, TASKS, Run, table
from scripts.eval.tasks import items
from scripts.eval.tasks.items import Item

MAKERS: Final = (items.facts, items.cloze, items.strings, items.prose)
FOLDER: Final = Path(items.__file__).parent

# Says nothing right over HTTP, and everything without the server.
STAND_IN = f"""#!{sys.executable}
import json, sys
from pathlib import Path
from typing import Final
from urllib.request import urlopen

if sys.argv[1] == "-c":
    sys.exit()
words = dict(zip(sys.argv[4:], sys.argv[5:]))
args = dict(pair.split("=", 1) for pair in words["--model_args"].split(","))
is_right = "base_url" not in args
if not is_right:
    with urlopen(args["base_url"].removesuffix("completions") + "models") as response:
        assert json.load(response)["data"][0]["id"] == args["model"] == "scored"
    assert (Path(args["tokenizer"]) / "tokenizer.json").is_file()
folder = Path(words["--output_path"]) / args["model"].replace("/", "__")
folder.mkdir()
scores = dict.fromkeys(["acc,none", "perplexity,none", "word_perplexity,none"], 1.0)
scores["exact_match,stripped"] = 1.0
results = dict.fromkeys(words["--tasks"].split(","), scores)
(folder / "results_1.json").write_text(
    json.dumps({{"results": results, "total_evaluation_time_seconds": "2.5"}})
)
for task in results:
    item = {{"doc_id": 0, "acc": float(is_right), "exact_match": float(is_right)}}
    (folder / f"samples_{{task}}_1.jsonl").write_text(json.dumps(item) + "\\n")
"""


def test_the_items_are_those_that_published_scores_are_of() -> None:
    """After a change the table in docs/benchmarks.md has to be measured again."""
    made = json.dumps([list(make()) for make in MAKERS])
    assert sha256(made.encode()).hexdigest()[:16] == "77b0d3fb7da414e8"


@pytest.mark.parametrize("make", MAKERS)
def test_no_item_comes_twice(make: Callable[[], Iterator[Item]]) -> None:
    made = [json.dumps(item) for item in make()]
    assert len(made) == len(set(made))


def test_a_fact_has_four_choices_of_which_one_is_right() -> None:
    made = list(items.facts())
    assert len(made) > 200
    assert all(len(set(item["choices"])) == 4 for item in made)
    assert {item["answer"] for item in made} == {0, 1, 2, 3}
    france = next(item for item in made if "France is the city" in item["question"])
    assert france["choices"][france["answer"]] == "Paris"


def test_what_is_continued_has_no_space_at_its_end() -> None:
    """Such a space would be a token of its own, which no model expects."""
    made = [*items.facts(), *items.cloze(), *items.strings(), *items.prose()]
    texts = [text for item in made for text in item.values() if isinstance(text, str)]
    assert all(text == text.strip() != "" for text in texts)
    assert not any(item["text"].endswith(".") for item in items.prose())


def test_each_task_has_a_file_that_names_its_items() -> None:
    files = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml"))]
    expected = sorted(
        f"task: {task}\ncustom_dataset: !function datasets_of_items.{task.partition('_')[2]}\n"
        for task in TASKS
    )
    assert [file[: len(start)] for file, start in zip(files, expected, strict=True)] == expected


def run(name: str, outcomes: list[bool], perplexity: float) -> Run:
    scores = {metric.key: sum(outcomes) / len(outcomes) for metric in METRICS if metric.is_share}
    scores |= {metric.key: perplexity for metric in METRICS if not metric.is_share}
    with_errors = scores | {"acc_stderr,none": 0.125}
    tasks = {metric.task for metric in METRICS if metric.is_share}
    return Run(name, 61.4, dict.fromkeys(TASKS, with_errors), dict.fromkeys(tasks, outcomes))


def test_a_table_has_scores_and_how_many_items_come_out_otherwise() -> None:
    plain = run("mlx-lm", [True, False], 12.0)
    other = run("default", [False, True], 12.5)
    *_, line = table([plain, other])
    right = "0.500 ± 0.125"
    assert line == f"| default | {right} | {right} | 0.500 | 12.50 | 12.50 | 6 | 61 |"


@pytest.mark.parametrize(
    ("outcomes", "perplexity", "off"),
    [
        ([True] * 200, 10.04, []),
        ([True] * 199 + [False], 10.04, []),
        ([True] * 198 + [False] * 2, 10.0, ["exact: 1.00% off, 0.5% at most"]),
        ([True] * 200, 9.9, ["exact: 1.00% off, 0.5% at most"]),
    ],
)
def test_a_mode_that_is_too_far_from_plain_mlx_lm_is_named(
    outcomes: list[bool], perplexity: float, off: list[str]
) -> None:
    plain, peer = run("mlx-lm", [True] * 200, 10.0), run("llama.cpp", [False] * 200, 99.0)
    assert list(too_far([plain, run("exact", outcomes, perplexity), peer])) == off


def stand_in(folder: Path, program: str) -> str:
    path = folder / "python"
    path.write_text(program)
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_the_harness_asks_a_server_that_runs_and_its_results_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLX_SERVER_MODEL_ID", "scored")
    python = stand_in(tmp_path, STAND_IN)
    assert main([python, str(tmp_path / "results"), "--mode", "exact", "--limit", "1"]) == 1
    said = capsys.readouterr()
    assert [line.split(" | ")[0] for line in said.out.splitlines()[4:]] == [
        "| mlx-lm",
        "| exact",
        "| llama.cpp",
    ]
    assert "exact: 100.00% off, 0.5% at most" in said.err


def test_a_harness_that_fails_ends_it_with_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = stand_in(tmp_path, "#!/bin/sh\necho no such task\nexit 3\n")
    assert main([python, str(tmp_path / "results")]) == 2
    assert "mlx-lm: no such task" in capsys.readouterr().err
