"""How far servers are from a reference, over HTTP."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.bench import accuracy
from scripts.bench.accuracy import compare
from tests.support.fake_server import Body, Reply, fake_server

NUMBERS = ("num_tokens", "mean", "error", "p99", "largest")


def choices(choice: Body) -> Reply:
    return Reply((json.dumps({"choices": [choice]}),))


def scorer(*, off: float = 0.0, completion: Sequence[int] = (7,)) -> Callable[[Body], Reply]:
    """Complete with two words; a token is a word's length, or the seed, which the last word is.

    A token's score is the number itself, off by a number on every second text.
    """

    def answer(body: Body) -> Reply:
        if "seed" in body:
            return choices({"text": f" seed {body['seed']}"})
        if "echo" not in body:
            *words, seed = body["prompt"].split()
            return Reply((json.dumps({"tokens": [*map(len, words), int(seed)]}),))
        error = off * (body["prompt"][-1] % 2)
        scores = [None, *(-token - error for token in [*body["prompt"][1:], *completion])]
        return choices({"logprobs": {"token_logprobs": scores}})

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
        written = [body for body in exact.bodies if "seed" in body]
        assert [body["seed"] for body in written] == [0, 1, 2, 3]
        assert {body["max_tokens"] for body in written} == {2}
    same, off = json.loads(report.read_text("utf-8"))["servers"]
    assert same["mean"] == same["largest"] == 0
    num_tokens = [len(body["prompt"]) - 1 for body in other.bodies]
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
        (lambda _: choices({"logprobs": {"token_logprobs": [None, -1]}}), "other gives no log"),
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


@pytest.mark.parametrize(
    "words",
    [["--texts", "0"], ["--max-tokens", "0"], ["--url", "no url"], ["--json", "no/folder/x.json"]],
)
def test_a_wrong_command_line_ends_it(words: list[str]) -> None:
    with pytest.raises(SystemExit) as status:
        accuracy.main(words)
    assert status.value.code == 2


def test_one_text_has_no_error() -> None:
    alone = compare("x", [[-1.0]], [[-1.0]])
    assert alone.error is None
    assert accuracy.table([alone]).endswith("0.0000         -  0.0000   0.0000")
