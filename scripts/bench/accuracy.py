"""`python -m scripts.bench.accuracy`: by how much servers miss the log probabilities of an exact one.

The reference writes texts, sampled with temperature 1, so that all tokens of the model come with the
frequency that it gives them.  Every server then reads the same token ids as a prompt, and their log
probabilities are compared: nothing depends on which of two nearly equal tokens comes first, or on how a
server splits a text.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from scripts.bench.load.servers import (
    ServerSpec,
    Target,
    fleet,
    our_server,
    server_at,
    server_by_command,
)
from scripts.bench.load.signals import ended_by_signals
from scripts.machine import describe, in_words
from scripts.server_process import ServerFailed

_OPENINGS: Final = (
    "The history of the city begins with",
    "To make a good soup, first",
    "def main(argv):\n    ",
    "Once upon a time there was a",
    "Water boils at a lower temperature when",
    "Dear Sir or Madam,\n\n",
    "The three most important causes are:\n1.",
    "Q: What is a prime number?\nA:",
)
_EPILOG: Final = """\
The first server is this project's with the MLX_SERVER_* settings of the environment.  Each server must
take token ids, `echo` and `logprobs` in /v1/completions, the reference also have /tokenize.
"""


class CannotCompare(Exception):
    """A server gives no log probabilities of the tokens that it was sent."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Absolute differences of log probabilities.

    error: the standard error of the mean, over texts; None of a single one.
    """

    server: str
    num_tokens: int
    mean: float
    error: float | None
    p99: float
    largest: float


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print a table.

    Return 1 if a server cannot be compared, 2 if it does not start, 130 if it is interrupted.
    """
    args = _arguments(argv)
    try:
        with ended_by_signals(), fleet(args.servers) as (reference, *others):
            with reference.awake():
                prompts = write_prompts(reference, args.texts, args.max_tokens)
                expected = [logprobs_of(reference, prompt) for prompt in prompts]
            found = list(_compared(others, prompts, expected))
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 2
    except CannotCompare as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the servers that were started have ended", file=sys.stderr)
        return 130
    print(in_words(machine := describe()), "", table(found), sep="\n")
    if args.json is not None:
        rows = [{name: getattr(each, name) for name in Accuracy.__slots__} for each in found]
        args.json.write_text(json.dumps({"machine": machine, "servers": rows}, indent=2), "utf-8")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.accuracy", description=__doc__, epilog=_EPILOG
    )
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument(
        "--max-tokens", type=int, default=96, help="of each text, beside its opening"
    )
    parser.add_argument("--json", type=Path, help="write the results")
    what = "default: this project's in exact mode"
    parser.add_argument("--reference", type=server_at, metavar="[NAME=]URL[#MODEL]", help=what)
    parser.add_argument("--url", type=server_at, help="measure this server instead of starting one")
    peers: dict[str, Any] = {"action": "append", "default": []}
    parser.add_argument(
        "--vs", type=server_at, help="a peer that runs already; repeatable", **peers
    )
    what = "a peer to start, with {port} where the port belongs; repeatable"
    parser.add_argument("--vs-command", type=server_by_command, help=what, **peers)
    args = parser.parse_args(argv)
    if args.texts < 1 or args.max_tokens < 1:
        parser.error("--texts and --max-tokens are at least 1")
    if args.json is not None and not args.json.parent.is_dir():
        parser.error(f"there is no directory {args.json.parent}")
    first = args.url or our_server()
    args.servers = [args.reference or _exact(), first, *args.vs, *args.vs_command]
    return args


def _exact() -> ServerSpec:
    ours = our_server()
    exact = {
        "MLX_SERVER_CPU_PRECISION": "exact",
        "MLX_SERVER_KV_CACHE_DTYPE": "auto",
        "MLX_SERVER_DTYPE": "auto",
    }
    return replace(ours, name="exact", environment={**ours.environment, **exact})


def write_prompts(server: Target, num_texts: int, max_tokens: int) -> list[list[int]]:
    """Return the tokens of openings with what the server makes of them, each with a seed of its own.

    Raises:
        CannotCompare: it does not complete them, or has no /tokenize.
    """
    prompts = []
    for seed in range(num_texts):
        opening = _OPENINGS[seed % len(_OPENINGS)]
        sampling = {"temperature": 1, "top_p": 1, "seed": seed}
        reply = _post(server, "/v1/completions", opening, max_tokens=max_tokens, **sampling)
        try:
            text = opening + reply["choices"][0]["text"]
        except (LookupError, TypeError):
            raise CannotCompare(f"{server.name} completes no prompt") from None
        try:
            prompts.append([int(token) for token in _post(server, "/tokenize", text)["tokens"]])
        except (LookupError, TypeError, ValueError):
            raise CannotCompare(f"{server.name} says no tokens of a text") from None
    return prompts


def logprobs_of(server: Target, prompt: Sequence[int]) -> list[float]:
    """Return the log probabilities of a prompt's tokens but for the first, which has none.

    Raises:
        CannotCompare: the server does not give them.
    """
    scored = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    reply = _post(server, "/v1/completions", prompt, **scored)
    try:
        # What completes the prompt follows, unless the server hides it.
        given = reply["choices"][0]["logprobs"]["token_logprobs"][1 : len(prompt)]
        logprobs = [float(each) for each in given]
    except (LookupError, TypeError, ValueError):
        logprobs = []
    if len(logprobs) != len(prompt) - 1:
        raise CannotCompare(f"{server.name} gives no log probabilities of a prompt's tokens")
    return logprobs


def _post(server: Target, path: str, prompt: str | Sequence[int], **parameters: Any) -> Any:
    body = {"model": server.model, "prompt": prompt, **parameters}
    try:
        response = httpx.post(f"{server.url}{path}", json=body, timeout=120, trust_env=False)
    except httpx.HTTPError as error:
        raise CannotCompare(server.premature_end() or f"{server.name}: {error}") from None
    if not response.is_success:
        raise CannotCompare(f"{server.name}: HTTP {response.status_code}: {response.text[:300]}")
    try:
        return response.json()
    except ValueError:
        raise CannotCompare(f"{server.name}: no JSON: {response.text[:300]}") from None


def _compared(
    servers: Sequence[Target], prompts: Sequence[list[int]], expected: Sequence[list[float]]
) -> Iterator[Accuracy]:
    for server in servers:
        with server.awake():
            found = [logprobs_of(server, prompt) for prompt in prompts]
        yield compare(server.name, found, expected)


def compare(
    name: str, found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]
) -> Accuracy:
    """Compare the log probabilities of the same tokens, text by text."""
    by_text = [
        [abs(mine - other) for mine, other in zip(*pair, strict=True)]
        for pair in zip(found, expected, strict=True)
    ]
    differences = sorted(each for text in by_text for each in text)
    # Tokens of one text are off together, so that texts are what is independent.
    means = [statistics.fmean(text) for text in by_text if text]
    error = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None
    return Accuracy(
        server=name,
        num_tokens=len(differences),
        mean=statistics.fmean(differences),
        error=error,
        p99=differences[math.ceil(0.99 * len(differences)) - 1],
        largest=differences[-1],
    )


def table(found: Sequence[Accuracy]) -> str:
    """Return a line for each server."""
    width = max(len(each.server) for each in found)
    lines = [f"{'server':<{width}}  tokens    mean  +- error     p99  largest"]
    for each in found:
        error = "     -" if each.error is None else f"{each.error:.4f}"
        numbers = f"{each.mean:.4f}    {error}  {each.p99:.4f}   {each.largest:.4f}"
        lines.append(f"{each.server:<{width}}  {each.num_tokens:6}  {numbers}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
