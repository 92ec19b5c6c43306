"""`python -m scripts.bench.batches`: what a batch brings, and what it costs others.

Starts this server with the MLX_SERVER_* settings of the environment.  First lines are computed by the
engine alone, and such lines are served as a batch, as requests of clients that send the next one when
they have the response, and by `run-batch` and other such commands, whose time has the load of the
model in it; in alternating rounds.  Then live requests arrive at random, without a batch and beside
one.
"""

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, Final

import httpx

from scripts.bench.load.client import ChatClient, Messages, RequestRecord
from scripts.bench.load.metrics import latencies
from scripts.bench.load.plan import open_loop, poisson_gaps
from scripts.bench.load.scenarios import SCENARIOS, Scenario
from scripts.bench.load.signals import ended_by_signals, run_until_signal
from scripts.bench.load.workload import Writer
from scripts.machine import describe, in_words
from scripts.server_process import ROOT, Server, environment_settings

_ENDPOINT: Final = "/v1/chat/completions"
# Seconds: asking for a batch takes the server as long as a tenth of a line.
_POLL_INTERVAL: Final = 0.5
_ENGINE: Final = f"{shlex.quote(sys.executable)} -m scripts.bench.engine {{input}}"
_RUN_BATCH: Final = f"{shlex.quote(sys.executable)} -m app run-batch {{input}} {{output}}"
_TIMEOUT: Final = 600.0
# Seconds: after live requests the server keeps room for others for a while.
_SETTLING: Final = 6.0
_SHOWN: Final = ("ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "e2e_p50_ms", "e2e_p99_ms")


@dataclass(frozen=True, slots=True)
class Options:
    """commands: what serves `{input}` into `{output}`, by name."""

    num_lines: int
    num_words: int
    max_tokens: int
    num_clients: int
    rounds: int
    num_live: int
    rate: float
    live: Scenario
    commands: dict[str, str]
    json: str | None


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    print(in_words(describe()), flush=True)
    settings = {"generation_config": "openai"} | environment_settings()
    with ended_by_signals(), TemporaryDirectory() as folder, Server(**settings) as server:
        measurement = Measurement(options, server.url, Path(folder))
        try:
            report = run_until_signal(measurement.run())
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    if options.json is not None:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


class Measurement:
    """Measures one server."""

    def __init__(self, options: Options, url: str, folder: Path) -> None:
        self._options = options
        self._folder = folder
        self._http = httpx.AsyncClient(base_url=url, timeout=None, trust_env=False)
        self._url = url
        self._model = ""

    async def run(self) -> dict[str, Any]:
        async with self._http:
            self._model = (await self._http.get("/v1/models")).json()["data"][0]["id"]
            seconds = await self._throughput()
            live = await self._live()
        return {"seconds": seconds, "live": live}

    async def _throughput(self) -> dict[str, list[float]]:
        """Return the seconds of each way to serve the lines, in each round."""
        seconds: dict[str, list[float]] = {}
        for number in range(self._options.rounds):
            for name in ("engine", "http", "batch", *self._options.commands):
                # Other prompts each time: the prefix cache must find nothing.
                bodies = list(self._bodies(f"{name} {number}"))
                await asyncio.sleep(_SETTLING)
                seconds.setdefault(name, []).append(await self._serve(name, bodies))
        for name, values in seconds.items():
            rate = self._options.num_lines / median(values)
            pairs = zip(seconds["engine"], values, strict=True)
            ratio = median(alone / served for alone, served in pairs)
            print(f"{name:<12} {rate:8.1f} lines/s, {ratio:.2f} of the engine", flush=True)
        return seconds

    async def _serve(self, name: str, bodies: Sequence[dict[str, Any]]) -> float:
        """Return the seconds that serving the lines took."""
        began = perf_counter()
        if name == "engine":
            return float(await asyncio.to_thread(self._execute, _ENGINE, bodies))
        if name == "http":
            await self._send(bodies)
        elif name == "batch":
            await self._wait(await self._begin(bodies))
        else:
            await asyncio.to_thread(self._execute, self._options.commands[name], bodies)
        return perf_counter() - began

    async def _send(self, bodies: Sequence[dict[str, Any]]) -> None:
        rest = iter(bodies)

        async def client() -> None:
            for body in rest:
                (await self._http.post(_ENDPOINT, json=body)).raise_for_status()

        await asyncio.gather(*(client() for _ in range(self._options.num_clients)))

    async def _begin(self, bodies: Sequence[dict[str, Any]]) -> str:
        """Begin a batch; return its id."""
        file = await self._post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", _lines(bodies))}
        )
        fields = {"input_file_id": file["id"], "endpoint": _ENDPOINT, "completion_window": "24h"}
        batch_id: str = (await self._post("/v1/batches", json=fields))["id"]
        return batch_id

    async def _wait(self, batch_id: str) -> None:
        while True:
            batch = (await self._http.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] in ("completed", "failed"):
                assert batch["request_counts"]["completed"] == self._options.num_lines, batch
                return
            await asyncio.sleep(_POLL_INTERVAL)

    def _execute(self, command: str, bodies: Sequence[dict[str, Any]]) -> str:
        """Return what the command writes to its standard output."""
        source, target = self._folder / "in.jsonl", self._folder / "out.jsonl"
        source.write_bytes(_lines(bodies))
        words = [word.format(input=source, output=target) for word in shlex.split(command)]
        ended = subprocess.run(
            words,
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        target.unlink(missing_ok=True)
        return ended.stdout

    async def _live(self) -> dict[str, dict[str, float]]:
        """Return the latencies of live requests, without a batch and beside one."""
        records: dict[str, list[RequestRecord]] = {"alone": [], "beside a batch": []}
        for number in range(self._options.rounds):
            records["alone"] += await self._arrive(number, f"alone {number}")
            batch_id = await self._begin(list(self._bodies(f"beside {number}")))
            records["beside a batch"] += await self._arrive(number, f"beside {number}")
            await self._end(batch_id)
        found = {name: latencies(values) for name, values in records.items()}
        for key in _SHOWN:
            alone, beside = (values.get(key, 0.0) for values in found.values())
            ratio = beside / alone if alone else 0.0
            print(f"{key:<12} {alone:8.1f} alone, {beside:8.1f} beside a batch: {ratio:.2f}")
        return found

    async def _end(self, batch_id: str) -> None:
        """End a batch, which should have been there for all live requests."""
        batch = (await self._http.get(f"/v1/batches/{batch_id}")).json()
        num_done = batch["request_counts"]["completed"]
        print(f"{num_done} lines were served meanwhile, of {self._options.num_lines}", flush=True)
        if batch["status"] != "completed":
            await self._post(f"/v1/batches/{batch_id}/cancel")
        while batch["status"] not in ("cancelled", "completed"):
            await asyncio.sleep(_POLL_INTERVAL)
            batch = (await self._http.get(f"/v1/batches/{batch_id}")).json()

    async def _arrive(self, number: int, run: str) -> list[RequestRecord]:
        """Send the live requests of a round.

        Those that overlap are slow, so all runs of a round have the same moments; their texts differ.
        """
        options = self._options
        gaps = poisson_gaps(options.rate, str(number))
        conversations = options.live.conversations(run, 0, options.num_live)
        async with ChatClient(self._url, self._model, _TIMEOUT, {"ignore_eos": True}) as client:

            async def ask(messages: Messages, priority: str | None) -> RequestRecord:
                return await client.ask(messages, options.max_tokens, priority)

            records = await open_loop(conversations, gaps, ask)
        failed = [record.error for record in records if record.error is not None]
        assert not failed, failed[0]
        return records

    def _bodies(self, label: str) -> Iterator[dict[str, Any]]:
        writer = Writer(label)
        for _ in range(self._options.num_lines):
            content = writer.question(self._options.num_words)
            yield {
                "model": self._model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": self._options.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }

    async def _post(self, path: str, **content: Any) -> Any:
        return (await self._http.post(path, **content)).raise_for_status().json()


def _lines(bodies: Sequence[dict[str, Any]]) -> bytes:
    rows = [
        {"custom_id": f"line {number}", "method": "POST", "url": _ENDPOINT, "body": body}
        for number, body in enumerate(bodies, 1)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def _parse(argv: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.batches",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--lines", type=int, default=1000, metavar="N", help="of a batch")
    add("--words", type=int, default=32, metavar="N", help="of each prompt")
    add("--max-tokens", type=int, default=32, metavar="N", help="of each completion")
    add("--clients", type=int, default=12, metavar="N", help="that send lines over HTTP")
    add("--rounds", type=int, default=3, metavar="N", help="of everything")
    add("--requests", type=int, default=100, metavar="N", help="live ones, in each round")
    add("--rate", type=float, default=1.0, metavar="R", help="live requests a second")
    add("--scenario", choices=sorted(SCENARIOS), default="short", help="of the live requests")
    words = "COMMAND with {input} and {output} that serves the lines, too; repeatable"
    add("--vs-command", action="append", default=[], metavar="NAME=COMMAND", help=words)
    add("--json", metavar="FILE", help="write all results")
    args = parser.parse_args(argv)
    peers = dict(command.split("=", 1) for command in args.vs_command)
    return Options(
        num_lines=args.lines,
        num_words=args.words,
        max_tokens=args.max_tokens,
        num_clients=args.clients,
        rounds=args.rounds,
        num_live=args.requests,
        rate=args.rate,
        live=SCENARIOS[args.scenario],
        commands={"run-batch": _RUN_BATCH} | peers,
        json=args.json,
    )


if __name__ == "__main__":
    sys.exit(main())
