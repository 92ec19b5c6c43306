"""What the clients of a trace send and count, and what is reported; the servers are canned."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench.replicas.__main__ import Run, as_json, main, report
from scripts.bench.replicas.clients import RequestFailed, serve
from scripts.bench.replicas.machines import NUM_BLOCKS, SETTINGS
from scripts.simulation.__main__ import main as simulate
from scripts.simulation.records import Summary
from scripts.simulation.simulate import Setup
from scripts.simulation.traces import Session, Trace, Turn, make_trace
from tests.support.fake_server import Body, Reply, canned, fake_server, usage_chunk

SUMMARY = Summary(
    num_requests=24,
    requests_per_second=1.0,
    output_per_second=100.0,
    first_p50=0.5,
    first_p99=1.0,
    num_prompt=1000,
    num_computed=500,
    num_rejections=0,
)
SESSION = Session((0, 1), (Turn((2, 3, 4), 2), Turn((5,), 3)))
TRACE = Trace("some", ((SESSION,), (SESSION, SESSION)), NUM_BLOCKS)


def whole(body: Body) -> Reply:
    """Answer with all at once, and say so."""
    num_tokens = body["max_tokens"]
    usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
    message = {"role": "assistant", "content": "word " * num_tokens}
    return Reply((json.dumps({"choices": [{"message": message}], "usage": usage}),))


@pytest.mark.anyio
@pytest.mark.parametrize("streams", [True, False])
async def test_each_turn_is_sent_with_all_that_was_said(streams: bool) -> None:
    with fake_server(canned if streams else whole) as server:
        served = await serve(TRACE, server.url, streams=streams)
    assert sorted(each.num_output for each in served) == [2, 2, 2, 3, 3, 3]
    assert all(each.sent < each.first <= each.ended for each in served)
    assert streams or all(each.first == each.ended for each in served)
    last = max(server.bodies, key=lambda body: len(body["messages"]))
    roles = [message["role"] for message in last["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert last["messages"][0]["content"] == "apple arch"
    assert last["messages"][2]["content"].split()
    assert last["ignore_eos"] is True


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("reply", "streams", "said"),
    [
        (Reply(("full",), status=429), False, "HTTP 429: full"),
        (Reply(("full",), status=429), True, "HTTP 429: full"),
        (Reply(("cut",), num_missing=9), False, "RemoteProtocolError"),
    ],
)
async def test_a_request_that_fails_ends_the_run(reply: Reply, streams: bool, said: str) -> None:
    with fake_server(lambda body: reply) as server:
        with pytest.raises(RequestFailed, match=said):
            await serve(TRACE, server.url, streams=streams)


@pytest.mark.anyio
async def test_an_answer_of_another_length_ends_the_run() -> None:
    def short(body: Body) -> Reply:
        *lines, _, done = canned(body).lines
        return Reply((*lines, usage_chunk(9, 1), done))

    with fake_server(short) as server:
        with pytest.raises(RequestFailed, match=r"1 tokens instead of \d"):
            await serve(TRACE, server.url, streams=True)


def runs(rates: Sequence[float], computed: Sequence[int]) -> list[Run]:
    """Return a round with one replica and one with both, and one of each policy."""
    of_answers = [
        Run(
            Setup(trace="answers", policy="prefix-aware", num_replicas=count),
            replace(SUMMARY, output_per_second=rate),
            900,
            0.01,
        )
        for count, rate in zip((1, 2), rates, strict=True)
    ]
    return of_answers + [
        Run(Setup(trace="tenants", policy=policy, num_replicas=2), SUMMARY, count, 0.02)
        for policy, count in zip(("prefix-aware", "round robin"), computed, strict=True)
    ]


def test_the_report_has_the_medians_and_the_two_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        *runs([100, 190], [300, 1000]),
        *runs([100, 250], [500, 1000]),
        *runs([200, 200], [400, 2000]),
    ]
    text = report(found, 123.4)
    assert "| answers | prefix-aware | 2        | 200.0           | -               | 900" in text
    assert "two replicas: 1.90 times the throughput of one (1.90, 2.50, 1.00)" in text
    assert "cache_aware: 0.30 of the tokens that round_robin computes (0.30, 0.50, 0.20)" in text
    assert "smg: 123 us of a core for a request; the clients: up to 2.0% of one" in text
    path = tmp_path / "results.json"
    path.write_text(json.dumps(as_json(found, 123.4)), encoding="utf-8")
    assert simulate(["compare", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "| tenants | round robin  | 2        | computed           | 1,000    |" in printed
    answers = [line for line in printed.splitlines() if line.startswith("| answers")]
    assert answers and not any("first token" in line for line in answers)


def test_the_servers_have_the_pool_that_is_simulated() -> None:
    pools = {make_trace(name, 2, 0).num_blocks for name in ("answers", "tenants")}
    assert pools == {NUM_BLOCKS} == {int(SETTINGS["num_blocks"])}


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--json", "no-such-folder/file"]])
def test_options_that_make_no_sense_are_rejected(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
