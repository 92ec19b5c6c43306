"""How far servers are from a reference, over HTTP."""

import json
import math
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.bench import accuracy
from scripts.bench.accuracy import CannotCompare, Scores, compare
from tests.support.fake_server import Body, Reply, fake_server

NUMBERS = ("num_tokens", "mean", "error", "p99", "largest")


def choices(choice: Body, num_prompt: int = 0) -> Reply:
    usage = {"prompt_tokens": num_prompt}
    return Reply((json.dumps({"choices": [choice], "usage": usage}),))


def scorer(
    *, off: float = 0.0, tokens: str = "words", completion: Sequence[str] = ("next",)
) -> Callable[[Body], Reply]:
    """Complete with two words; score a word by its length, off by a number on every second text."""

    def answer(body: Body) -> Reply:
        if not body.get("echo"):
            return choices({"text": f" seed {body['seed']}"})
        prompt = body["prompt"].split()
        words = [*prompt, *completion]
        error = off * (int(prompt[-1]) % 2)
        scores = [None, *(-float(len(word)) - error for word in words[1:])]
        shown = words if tokens == "words" else [word.upper() for word in words]
        return choices({"logprobs": {"tokens": shown, "token_logprobs": scores}}, len(prompt))

    return answer


def run(reference: str, *words: str) -> int:
    return accuracy.main(["--texts", "4", "--max-tokens", "2", "--reference", reference, *words])


def test_servers_are_compared_token_by_token(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "accuracy.json"
    with fake_server(scorer()) as exact, fake_server(scorer(off=0.5, completion=())) as other:
        servers = ["--url", f"same={exact.url}", "--vs", f"off={other.url}"]
        assert run(f"exact={exact.url}", *servers, "--json", str(report)) == 0
        written = [body for body in exact.bodies if "echo" not in body]
        assert [body["seed"] for body in written] == [0, 1, 2, 3]
        assert {body["max_tokens"] for body in written} == {2}
    same, off = json.loads(report.read_text("utf-8"))["servers"]
    assert same["mean"] == same["largest"] == 0
    texts = [body["prompt"] for body in other.bodies]
    num_tokens = [len(text.split()) - 1 for text in texts]
    assert off["num_tokens"] == sum(num_tokens)
    assert off["mean"] == pytest.approx(0.5 * sum(num_tokens[1::2]) / sum(num_tokens))
    # Means of texts are 0 and 0.5, two each.
    assert off["error"] == pytest.approx(math.sqrt(4 * 0.25**2 / 3) / 2)
    assert off["p99"] == off["largest"] == 0.5
    shown = capsys.readouterr().out.splitlines()[-1].split()
    assert shown == [
        "off",
        *(f"{off[n]:.4f}" if n != "num_tokens" else str(off[n]) for n in NUMBERS),
    ]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (scorer(tokens="others"), "other splits texts into other tokens than the reference"),
        (lambda _: Reply(('{"choices": [{"text": "a"}]}',)), "other gives no log probabilities"),
        (lambda _: Reply(("<html>",)), "other: no JSON: <html>"),
        (lambda _: Reply(("no echo here",), status=400), "other: HTTP 400: no echo here"),
        (lambda _: Reply(("{",), num_missing=9), "other: "),
    ],
)
def test_what_cannot_be_compared_is_said(
    capsys: pytest.CaptureFixture[str], reply: Callable[[Body], Reply], reason: str
) -> None:
    with fake_server(scorer()) as exact, fake_server(reply) as other:
        assert run(f"exact={exact.url}", "--url", f"other={other.url}") == 1
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("reply", ["[]", '{"choices": []}'])
def test_a_reference_that_completes_nothing_is_said(
    capsys: pytest.CaptureFixture[str], reply: str
) -> None:
    with fake_server(lambda _: Reply((reply,))) as exact:
        assert run(f"exact={exact.url}", "--url", exact.url) == 1
    assert "exact completes no prompt" in capsys.readouterr().err


def test_an_interrupt_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: Body) -> Reply:
        signal.raise_signal(signal.SIGTERM)
        return choices({"text": "too late"})

    with fake_server(interrupt) as exact:
        assert run(exact.url, "--url", exact.url) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_server_that_is_not_there_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(scorer()) as exact:
        assert run(exact.url, "--url", "gone=http://127.0.0.1:9") == 2
    assert "gone at http://127.0.0.1:9 cannot be asked for its models" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--texts", "0"], ["--max-tokens", "0"], ["--url", "no url"], ["--json", "no/folder/x.json"]],
)
def test_a_wrong_command_line_ends_it(words: list[str]) -> None:
    with pytest.raises(SystemExit) as status:
        accuracy.main(words)
    assert status.value.code == 2


def test_one_text_has_no_error() -> None:
    scores = [Scores(["a"], [-1.0])]
    alone = compare("x", scores, scores)
    assert alone.error is None
    assert accuracy.table([alone]).endswith("0.0000         -  0.0000   0.0000")
    with pytest.raises(CannotCompare):
        compare("x", scores, [Scores(["b"], [-1.0])])
