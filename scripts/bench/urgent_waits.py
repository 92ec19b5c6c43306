"""How long a chat waits that arrives behind agents and a batch, and what it costs the agents.

`python -m scripts.bench.urgent_waits [--agents 8] [--words 5200] [--two-models]` starts this server three times, each with as
many agents as are asked for, which send one long prompt each with low priority, and the lines of a batch
in the background: without a chat; with a chat of high priority that asks again and again, and
MLX_SERVER_MAX_URGENT_WAIT_MS=off; and the same with that setting's default.  The chat's time to the first token is
compared with the published bound (batching/admission/urgency.py).  Exits with 1 if it is missed.  Linux only:
it reads /proc.  With two models the chat has one of its own.  Other settings come from the environment: with MLX_SERVER_MAX_NUM_SEQS=4 agents fill the slots, too.
"""

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np

from batching.admission.urgency import MIN_RUN
from batching.config import BatchLimits
from scripts.bench.load.client import ChatClient, RequestRecord
from scripts.bench.load.workload import Writer
from scripts.server_process import MODEL, Server, environment_settings

_TIMEOUT: Final = 3600.0
_AGENT_TOKENS: Final = 32
_CHAT_WORDS: Final = 20
_CHAT_TOKENS: Final = 16
_NUM_LINES: Final = 500
# Seconds from an answer to the next question.
_PAUSE: Final = 1.0
# Of a step's prompt tokens, those that the first prompt of the highest class gets on a CPU.
_MIN_SHARE: Final = 16
_LONGEST: Final = re.compile(
    r'^mlx_server:step_duration_seconds_bucket\{.*le="([^"]+)".*\} (\S+)', re.MULTILINE
)
_STOPS: Final = re.compile(r"^mlx_server:urgent_preemptions_total\{.*\} (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """What one server did.

    cpu_seconds: of the server, until the last agent had ended.
    longest_step: in seconds, rounded up to a bucket of the histogram.
    num_stops: running requests that made way.
    """

    agents: Sequence[RequestRecord]
    chats: Sequence[RequestRecord]
    cpu_seconds: float
    longest_step: float
    num_stops: float

    @property
    def num_tokens(self) -> int:
        """Of the agents, prompts and outputs together."""
        return sum((r.num_prompt_tokens or 0) + r.num_output_tokens for r in self.agents)

    @property
    def seconds(self) -> float:
        """From the first agent's request to the last one's end."""
        return max(r.ended for r in self.agents) - min(r.sent for r in self.agents)

    @property
    def efficiency(self) -> float:
        """Tokens of the agents for a second of a processor, which says more than time on a busy machine."""
        return self.num_tokens / self.cpu_seconds

    @property
    def bound(self) -> float:
        """The seconds within which the first token of a chat comes, if one chats at a time."""
        num_tokens = max((r.num_prompt_tokens or 0 for r in self.chats), default=0)
        num_steps = 3 + -(-num_tokens // _MIN_SHARE)
        return BatchLimits().max_urgent_wait + MIN_RUN + num_steps * self.longest_step

    def ttft(self, percent: float) -> float:
        waits = [r.ttft for r in self.chats if r.ttft is not None]
        return float(np.percentile(waits, percent, method="inverted_cdf"))


async def start_batch(url: str) -> None:
    """Have the server serve lines in the background."""
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": MODEL,
                "messages": [{"role": "user", "content": Writer(f"line {i}").question(200)}],
                "max_tokens": 64,
            },
        }
        for i in range(_NUM_LINES)
    ]
    file = "\n".join(map(json.dumps, lines)).encode()
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        answer = await client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", file)}
        )
        body = {
            "input_file_id": answer.raise_for_status().json()["id"],
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
        }
        (await client.post("/v1/batches", json=body)).raise_for_status()


def cpu_seconds(pid: int) -> float:
    """Return how long a process has computed."""
    times = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


async def load(
    server: Server, label: str, num_agents: int, num_words: int, chat_model: str | None
) -> Run:
    """Send the agents' prompts all at once, and the chat's questions until the last agent has ended."""

    def client(priority: str, model: str = MODEL) -> ChatClient:
        options = {"priority": priority, "ignore_eos": True}
        return ChatClient(url, model, _TIMEOUT, options)

    def asked(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    async def chat() -> None:
        await asyncio.sleep(3 * _PAUSE)
        while True:
            text = Writer(f"{label} chat {len(chats)}").question(_CHAT_WORDS)
            chats.append(await high.ask(asked(text), _CHAT_TOKENS))
            await asyncio.sleep(_PAUSE)

    url = server.url
    chats: list[RequestRecord] = []
    before = cpu_seconds(server.pid)
    async with client("low") as low, client("high", chat_model or MODEL) as high:
        if chat_model is not None:
            # It is loaded before.
            await high.ask(asked("Hi"), 1)
        await start_batch(url)
        texts = [Writer(f"{label} agent {i}").question(num_words) for i in range(num_agents)]
        chatting = None if chat_model is None else asyncio.create_task(chat())
        agents = await asyncio.gather(*(low.ask(asked(text), _AGENT_TOKENS) for text in texts))
        computed = cpu_seconds(server.pid) - before
        if chatting is not None:
            chatting.cancel()
    async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
        page = (await http.get("/metrics")).text
    durations = [(float(le), float(num)) for le, num in _LONGEST.findall(page)]
    longest = min(le for le, num in durations if num == durations[-1][1])
    stops = _STOPS.search(page)
    return Run(agents, chats, computed, longest, float(stops[1]) if stops else 0.0)


def measure(
    label: str, num_agents: int, num_words: int, chat_model: str | None, **settings: Any
) -> Run:
    """Load a server of its own, and print what it did."""
    if chat_model != MODEL and chat_model is not None:
        settings["models"] = f"{chat_model}={MODEL}"
    with Server(**{"max_queued_tokens": "1000000"} | environment_settings() | settings) as server:
        run = asyncio.run(load(server, label, num_agents, num_words, chat_model))
    errors = [r.error for r in (*run.agents, *run.chats) if r.error is not None]
    assert not errors, errors[0]
    num_tokens = sum(r.num_prompt_tokens or 0 for r in run.agents) / len(run.agents)
    print(
        f"{label}: {num_agents} agents with {num_tokens:.0f} tokens each, "
        f"{run.num_tokens / run.seconds:.1f} tokens/s, {run.efficiency:.1f} tokens/CPU-s, "
        f"{run.num_stops:.0f} stops, steps up to {run.longest_step:g} s"
    )
    if chat_model is not None:
        print(
            f"  {len(run.chats)} chats: first token p50 {run.ttft(50):.2f} s, p99 {run.ttft(99):.2f} s, "
            f"longest {run.ttft(100):.2f} s"
        )
    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Run all three and print them; return 1 if the bound is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.urgent_waits", description=__doc__
    )
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--words", type=int, default=5200, help="of an agent's prompt")
    parser.add_argument("--two-models", action="store_true", help="the chat has its own")
    args = parser.parse_args(argv)
    chat_model = "chat" if args.two_models else MODEL
    alone = measure("no chat", args.agents, args.words, None)
    off = measure("off", args.agents, args.words, chat_model, max_urgent_wait_ms="off")
    on = measure("on", args.agents, args.words, chat_model)
    print(
        f"bound {on.bound:.2f} s; of the agents' tokens/CPU-s without the chat: "
        f"{off.efficiency / alone.efficiency:.0%} off, {on.efficiency / alone.efficiency:.0%} on"
    )
    return 0 if on.ttft(99) <= on.bound else 1


if __name__ == "__main__":
    sys.exit(main())
