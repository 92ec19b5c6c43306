"""What an operator sees: probes, metrics, the watchdog, and log lines."""

import asyncio
import json
import logging
import re
from io import StringIO

import pytest
from pydantic import SecretStr

from app.observability.logs import JsonLines, configure, logfmt, print_stderr
from app.observability.throughput_log import INTERVAL, ThroughputLogger
from app.server.watchdog import Watchdog
from batching import NewTokens, Priority, RankLost, SequenceStats, StepRecord
from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.scheduler import ContinuousBatchingScheduler
from scripts.sse import chunks_in
from tests.support.busy_threads import busy
from tests.support.fakes import TokenRunner
from tests.support.requests import make_request
from tests.support.rows import rows
from tests.support.speaker import Breaking, Served, served, served_endlessly

pytestmark = pytest.mark.anyio


async def probe(server: Served, path: str) -> tuple[int, str]:
    """Return the status and the message of a probe."""
    response = await server.client.get(path)
    body = response.json()
    return response.status_code, body.get("status") or body["error"]["message"]


async def test_probes_load_nothing_and_a_shutdown_is_healthy_and_not_ready() -> None:
    async with served() as server:
        assert await probe(server, "/health") == (200, "ok")
        assert await probe(server, "/ready") == (200, "ready")
        page = (await server.client.get("/metrics")).text
        assert 'model_state{model_name="fake/speaker",state="unloaded"} 1.0' in page
        assert server.manager.engines.loaded == ()
        server.service.admission.is_draining = True
        assert await probe(server, "/ready") == (503, "the server is shutting down")
        assert await probe(server, "/health") == (200, "ok")


async def test_a_server_with_a_full_queue_is_not_ready_and_says_when_to_retry() -> None:
    async with served(max_queued_requests=0, max_num_seqs=1) as server:
        await probe(server, "/health")
        admitted = server.admitted()
        assert await probe(server, "/ready") == (503, "the queue is full")
        response = await server.chat()
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "queue_full"
        assert 1 <= int(response.headers["Retry-After"]) <= 120
        assert (await server.post("/tokenize", {"prompt": "Hi"})).status_code == 503
        admitted.ticket.release()
        assert (await server.chat()).status_code == 200
        assert server.service.admission.num_requests == 0
        page = (await server.client.get("/metrics")).text
    assert 'admission_rejections_total{model_name="fake/speaker",reason="queue_full"} 2.0' in page


async def test_a_client_with_too_many_requests_is_rejected() -> None:
    async with served(requests_per_minute=2) as server:
        statuses = [(await server.chat()).status_code for _ in range(3)]
        response = await server.complete()
    assert statuses == [200, 200, 429]
    assert response.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(response.headers["Retry-After"]) <= 30


async def test_a_rejected_request_is_logged_and_a_probe_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="app")
    async with served(api_keys=SecretStr("key")) as server:
        server.client.headers["X-Request-Id"] = "mine"
        server.service.admission.is_draining = True
        assert (await server.client.get("/ready")).status_code == 503
        server.service.admission.is_draining = False
        assert (await server.chat()).status_code == 401
        server.client.headers["Authorization"] = "Bearer key"
        assert (await server.chat(n=0)).status_code == 400
    route = "/v1/chat/completions"
    assert [record.getMessage() for record in caplog.records] == [
        "request_id=mine method=POST route=- status=401 code=invalid_api_key param=-",
        f"request_id=mine method=POST route={route} status=400 code=invalid_request_error param=n",
    ]


async def test_the_line_of_a_rejected_request_has_no_text_of_its_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The ids of paths, the keys of maps and paths that are no route are what a client writes."""
    caplog.set_level("INFO", logger="app.http.request_context")
    secret = "my-diary"
    async with served(cors_origins="https://chat.example") as server:
        server.client.headers["X-Request-Id"] = "mine"
        await server.client.get(f"/v1/responses/{secret}")
        await server.client.get(f"/{secret}")
        await server.chat(logit_bias={secret: "x"})
        await server.post("/v1/messages", {"model": secret, "messages": [], "max_tokens": -1})
        await server.client.post("/v1/files", files={secret: (None, "x" * 5000)})
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition("route=")[2] for line in lines] == [
        "/v1/responses/{response_id} status=404 code=not_found param=-",
        "- status=404 code=unknown_url param=-",
        "/v1/chat/completions status=400 code=invalid_request_error param=logit_bias",
        "/v1/messages status=400 code=invalid_request_error param=-",
        "/v1/files status=400 code=invalid_request_error param=file",
    ]
    assert secret not in "".join(lines)


async def test_clients_with_different_keys_do_not_share_cached_prompts() -> None:
    prompt = "x" * 100

    async def cached(server: Served, key: str) -> int:
        server.client.headers["Authorization"] = f"Bearer {key}"
        usage = (await server.complete(prompt, max_tokens=1)).json()["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    async with served(api_keys=SecretStr("ours,theirs")) as server:
        assert [await cached(server, key) for key in ("ours", "ours", "theirs")] == [0, 96, 0]
    async with served(api_keys=SecretStr("ours,theirs"), share_prefix_cache=True) as server:
        assert [await cached(server, key) for key in ("ours", "theirs")] == [0, 96]


async def test_an_engine_that_fails_repeatedly_is_unhealthy() -> None:
    async with served(b"ok", runner=Breaking) as server:
        for _ in range(3):
            assert (await server.chat()).status_code == 500
        message = "3 steps failed since a completion was finished"
        assert await probe(server, "/health") == (503, message)
        assert await probe(server, "/ready") == (503, message)
        page = (await server.client.get("/metrics")).text
    assert 'mlx_server:engine_healthy{model_name="fake/speaker"} 0.0' in page


async def test_the_metrics_count_what_was_served() -> None:
    async with served(b"ok") as server:
        await server.chat(n=2)
        page = (await server.client.get("/metrics")).text
        assert server.service.admission.num_waiting_tokens == 0
    assert 'vllm:generation_tokens_total{model_name="fake/speaker"} 6.0' in page
    assert 'vllm:num_requests_running{model_name="fake/speaker"} 0.0' in page
    assert 'num_gpu_blocks="64"' in page


async def test_each_model_has_its_own_metrics() -> None:
    async with served(b"ok", model_ids=("a", "b")) as server:
        body = {"model": "b", "prompt": "Hi"}
        assert (await server.post("/v1/completions", body)).status_code == 200
        page = (await server.client.get("/metrics")).text
    assert 'vllm:generation_tokens_total{model_name="a"} 0.0' in page
    assert 'vllm:generation_tokens_total{model_name="b"} 3.0' in page
    assert 'admission_rejections_total{model_name="",reason="queue_full"} 0.0' in page


async def test_the_page_describes_the_models_that_are_loaded() -> None:
    async with served(model_ids=("a", "b")) as server:
        server.manager.get("a")
        page = (await server.client.get("/metrics")).text
        server.manager.unload("a")
        assert server.manager.engines.loaded == ()
        after = (await server.client.get("/metrics")).text
    assert 'model_state{model_name="a",state="loaded"} 1.0' in page
    assert 'model_state{model_name="a",state="loaded"} 0.0' in after
    [line] = [line for line in page.splitlines() if line.startswith("vllm:cache_config_info")]
    assert 'model_name="a"' in line


class TestDeadlines:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_request_beyond_its_timeout_ends_with_an_error(self, stream: bool) -> None:
        async with served_endlessly() as server:
            response = await server.chat(stream=stream, timeout=2)
            assert await server.num_unfinished() == 0
            assert server.service.admission.num_requests == 0
        assert "deadline_exceeded" in response.text
        assert response.status_code == (200 if stream else 504)
        assert response.headers.get("X-Should-Retry") == (None if stream else "false")

    async def test_the_header_means_the_same_and_the_shorter_time_counts(self) -> None:
        async with served_endlessly() as server:
            assert server.engine.is_alive
            server.client.headers["X-Request-Timeout"] = "0.05"
            assert (await server.complete(timeout=1000.0)).status_code == 504
            assert (await server.complete()).status_code == 504
            server.client.headers["X-Request-Timeout"] = "1000"
            assert (await server.complete(timeout=0.05)).status_code == 504

    @rows("value", ["soon", "0", "-1", "nan", "inf"])
    async def test_an_invalid_timeout_header_is_a_400(self, value: str) -> None:
        async with served() as server:
            server.client.headers["X-Request-Timeout"] = value
            response = await server.chat()
            assert server.service.admission.num_requests == 0
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "X-Request-Timeout"

    async def test_a_request_whose_timeout_has_passed_is_not_queued(self) -> None:
        async with served() as server:
            server.client.headers["X-Request-Timeout"] = "1e-9"
            assert (await server.chat()).status_code == 504
            assert server.service.admission.num_requests == 0

    async def test_the_time_also_counts_while_a_request_is_prepared(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with served() as server, busy(server.service.threads.grammars):
            response = await server.chat(response_format={"type": "json_object"}, timeout=0.02)
            assert response.status_code == 504
            assert server.service.admission.num_requests == 0

    async def test_beam_search_has_a_timeout_too(self) -> None:
        async with served_endlessly() as server:
            assert server.engine.is_alive
            response = await server.complete(
                use_beam_search=True, best_of=1, max_tokens=1000, timeout=0.05
            )
            assert await server.num_unfinished() == 0
        assert response.status_code == 504


async def test_the_output_tokens_of_one_request_are_bounded() -> None:
    async with served(max_output_tokens=100) as server:
        response = await server.chat(n=4, max_tokens=26)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "max_tokens"
        assert error["message"].startswith("4 choices of 26 tokens are more than the 100 ")
        assert (await server.chat(n=4, max_tokens=25)).status_code == 200
        assert (await server.complete(["a", "b"], n=2, max_tokens=26)).status_code == 400


async def test_many_prompts_are_bounded_together_and_a_single_one_by_the_context() -> None:
    async with served(max_queued_tokens=100) as server:
        response = await server.complete(["x" * 60, "y" * 60])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        assert (await server.complete(["x" * 50, "y" * 50])).status_code == 200
        assert (await server.complete("x" * 200)).status_code == 200


async def test_without_a_number_the_bound_is_the_number() -> None:
    async with served(None, num_blocks=64, max_output_tokens=12) as server:
        body = (await server.chat(n=4)).json()
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length"] * 4
    assert body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
async def test_timings_are_returned_on_request(stream: bool) -> None:
    async with served(b"Hello") as server:
        for path in ("chat", "complete"):
            response = await getattr(server, path)("Hi" * 40, stream=stream, return_timings=True)
            if stream:
                body = chunks_in(response.content)[-1]
                assert body["choices"] == []
                assert "usage" not in body
            else:
                body = response.json()
            timings = body["timings"]
            assert timings["predicted_n"] == 6
            assert timings["prompt_n"] >= 80
            assert timings["cache_n"] == 0
            assert timings["queue_ms"] >= 0
            assert timings["prompt_per_second"] > 0
            assert timings["predicted_per_second"] > 0
            for part, number in (("prompt", timings["prompt_n"]), ("predicted", 5)):
                assert timings[f"{part}_per_token_ms"] == pytest.approx(
                    timings[f"{part}_ms"] / number, abs=0.001
                )
        assert "timings" not in (await server.chat("Hi")).text


async def test_a_single_token_takes_no_time_after_the_prompt() -> None:
    async with served(b"") as server:
        timings = (await server.chat(return_timings=True)).json()["timings"]
    assert timings["predicted_n"] == 1
    assert timings["predicted_ms"] == timings["predicted_per_second"] == 0


class TestWatchdog:
    async def test_a_stalled_engine_fails_its_streams_and_is_logged_once(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        failures: list[None] = []
        async with served_endlessly() as server:
            watchdog = Watchdog(server.service, on_failure=lambda: failures.append(None))
            await probe(server, "/health")
            watchdog.check()
            assert caplog.text == ""
            waiting = asyncio.create_task(server.chat())
            await asyncio.to_thread(server.gate.reached.wait)
            server.engine.health.step_timeout = 0.0
            watchdog.check()
            watchdog.check()
            response = await waiting
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_stalled"
            assert (await server.chat()).status_code == 503
            server.engine.health.step_timeout = 60.0
            watchdog.check()
        assert len(failures) == 1
        first, second = [
            record.getMessage()
            for record in caplog.records
            if "engine" in record.name or "watchdog" in record.name
        ]
        assert "has not ended" in first
        assert second == "the engine is healthy again"

    async def test_a_step_that_does_not_end_fails_the_streams_of_all_models(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One thread runs all of them: the default is not even loaded."""
        async with served_endlessly(model_ids=("a", "b")) as server:
            watchdog = Watchdog(server.service, on_failure=lambda: None)
            waiting = asyncio.create_task(server.chat(model="b"))
            await asyncio.to_thread(server.gate.reached.wait)
            engines = server.manager.engines.loaded
            assert [engine.model.model_id for engine in engines] == ["b"]
            engines[0].health.step_timeout = 0.0
            watchdog.check()
            response = await waiting
            health = await server.client.get("/health")
        assert response.json()["error"]["code"] == "engine_stalled"
        assert health.status_code == 503
        assert health.json()["error"]["message"].startswith("b: a step of the model has not ended")

    async def test_a_lost_rank_fails_all_streams_and_is_named_by_the_probes(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The MLX thread waits for that rank, and for ever."""
        failures: list[None] = []
        lost: list[RankLost] = []
        async with served_endlessly() as server:
            server.manager.health._lost = lambda: lost[0] if lost else None
            watchdog = Watchdog(server.service, on_failure=lambda: failures.append(None))
            running = asyncio.create_task(server.chat())
            await asyncio.to_thread(server.gate.reached.wait)
            # The engine cannot accept it.
            waiting = asyncio.create_task(server.chat())
            while not server.engine._acceptance._failures:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
            watchdog.check()
            assert not failures
            lost.append(RankLost(1, "(mac1) has not answered for 5 s"))
            watchdog.check()
            watchdog.check()
            for response in (await running, await waiting):
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "rank_lost"
                assert response.json()["error"]["message"] == str(lost[0])
            # Nor does it accept any more.
            assert (await server.chat()).json()["error"]["code"] == "rank_lost"
            for path in ("/health", "/ready"):
                response = await server.client.get(path)
                assert (response.status_code, response.json()["error"]["message"]) == (
                    503,
                    str(lost[0]),
                )
        assert len(failures) == 1
        # It is said when it is found.
        assert "rank 1 (mac1)" not in caplog.text

    async def test_it_checks_every_second_and_reports_the_lag_of_the_loop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("app.server.watchdog._INTERVAL", 0.01)
        ticks: asyncio.Queue[float] = asyncio.Queue()
        async with served() as server:
            await probe(server, "/health")
            watchdog = Watchdog(
                server.service,
                on_failure=lambda: None,
                on_tick=lambda now, lag: ticks.put_nowait(lag),
            )
            looking = asyncio.create_task(watchdog.run())
            await ticks.get()
            assert await ticks.get() < 5
            looking.cancel()

    async def test_it_goes_on_after_a_tick_that_failed(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("app.server.watchdog._INTERVAL", 0.001)
        faults, has_gone_on = [ValueError("a bug")], asyncio.Event()

        def tick(now: float, lag: float) -> None:
            if faults:
                raise faults.pop()
            has_gone_on.set()

        async with served() as server:
            watchdog = Watchdog(server.service, on_failure=lambda: None, on_tick=tick)
            looking = asyncio.create_task(watchdog.run())
            await has_gone_on.wait()
            looking.cancel()
        assert "a tick of the watchdog failed" in caplog.text

    async def test_time_in_which_the_process_did_not_run_is_not_the_engines(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The gap shows in its own ticks, as when the process was stopped or its container paused."""
        ticks: list[float] = []
        async with served_endlessly() as server:
            watchdog = Watchdog(
                server.service, on_failure=lambda: None, on_tick=lambda now, lag: ticks.append(lag)
            )
            waiting = asyncio.create_task(server.chat(max_tokens=2))
            await asyncio.to_thread(server.gate.reached.wait)
            stopwatch = server.engine._thread._stopwatch
            clock = stopwatch._clock
            monkeypatch.setattr(stopwatch, "_clock", lambda: clock() + 1000)
            assert server.engine.health.is_stalled
            watchdog.tick(0.0, 1000)
            assert not server.engine.health.is_stalled
            server.gate.open()
            assert (await waiting).status_code == 200
        assert ticks == [1000]


def test_the_throughput_is_logged_every_ten_seconds_with_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="app.observability.throughput_log")
    stats = ContinuousBatchingScheduler(SchedulerConfig(num_blocks=4)).stats()
    stats = stats._replace(
        num_running=3, num_free_blocks=1, num_queried_tokens=10, num_hit_tokens=5
    )
    sequence = SequenceStats(
        num_prompt_tokens=100,
        max_tokens=9,
        num_choices=1,
        priority=Priority.NORMAL,
        arrival_time=0.0,
    )
    log = ThroughputLogger()
    log.log_if_due(1000.0)
    log.observe_stats(stats)
    log.log_if_due(1000.0 + INTERVAL)
    assert caplog.records == []
    log.observe_step(StepRecord(1011.0, 0.1, 107, 100, stats))
    log.observe_tokens([NewTokens(sequence, 20, None)])
    log.observe_tokens([NewTokens(sequence, 30, 0.1)])
    log.observe_end(sequence)
    log.log_if_due(1019.0)
    log.log_if_due(1020.0)
    log.log_if_due(1030.0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "running=3 waiting=0 prompt=10.0/s output=5.0/s kv_cache=75% prefix_hits=50% preemptions=0"
    )


def test_the_throughput_of_a_prefill_is_logged_before_its_first_token(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="app.observability.throughput_log")
    scheduler = ContinuousBatchingScheduler(SchedulerConfig(prefill_chunk=256))
    engine = BatchInferenceEngine(scheduler, TokenRunner(scheduler.config))
    engine.add(make_request(0, [1] * 600, max_tokens=2))
    log = ThroughputLogger()
    log.log_if_due(0.0)
    for now in (10.0, 20.0, 30.0, 40.0):
        engine.step()
        log.observe_step(engine.last_step)
        log.log_if_due(now)
    rates = [re.search(r"prompt=\S+", record.getMessage()) for record in caplog.records]
    shown = ["prompt=25.6/s", "prompt=25.6/s", "prompt=8.8/s", "prompt=0.0/s"]
    assert [rate and rate[0] for rate in rates] == shown


class TestLogs:
    @pytest.fixture(autouse=True)
    def _as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        root = logging.getLogger()
        monkeypatch.setattr(root, "handlers", list(root.handlers))
        monkeypatch.setattr(root, "level", root.level)
        monkeypatch.setattr(logging, "raiseExceptions", True)
        for name in ("uvicorn", "sse_starlette"):
            monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)

    def test_json_lines_have_the_fields_beside_the_message(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configure("info", "json")
        fields = {"id": "cmpl-1", "output": 3}
        logging.getLogger("a").info("%s", logfmt(fields), extra={"fields": fields})
        logging.getLogger("a").debug("not this")
        line = json.loads(capsys.readouterr().err)
        assert line.pop("time").endswith("+00:00")
        assert line == {
            "level": "info",
            "logger": "a",
            "message": "id=cmpl-1 output=3",
            "id": "cmpl-1",
            "output": 3,
        }

    def test_json_lines_contain_exceptions(self) -> None:
        try:
            raise ValueError("two\nlines")
        except ValueError as error:
            record = logging.LogRecord("a", 40, "", 0, "bad", (), (type(error), error, None))
        line = JsonLines().format(record)
        assert "\n" not in line
        assert json.loads(line)["exception"] == "ValueError: two\nlines"

    def test_text_lines_have_time_level_and_logger(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configure("warning", "text")
        logging.getLogger("a.b").warning("so %d", 1)
        logging.getLogger("a.b").info("not this")
        assert capsys.readouterr().err.endswith(" WARNING a.b: so 1\n")

    @pytest.mark.parametrize("level", ["debug", "critical"])
    def test_lines_for_the_operator_are_json_if_the_log_is(
        self, level: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configure(level, "json")
        print_stderr("serving m; try:\n  curl")
        print_stderr("there are no API keys", logging.WARNING)
        print_stderr("no", logging.ERROR)
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [(line["level"], line["message"]) for line in lines] == [
            ("info", "serving m; try:"),
            ("info", "  curl"),
            ("warning", "there are no API keys"),
            ("error", "no"),
        ]

    def test_lines_for_the_operator_are_text_for_people(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        configure("critical", "text")
        print_stderr("serving m; try:\n  curl")
        print_stderr("there are no API keys", logging.WARNING)
        print_stderr("no", logging.ERROR)
        lines = ["serving m; try:", "  curl", "warning: there are no API keys", "no"]
        assert capsys.readouterr().err.splitlines() == lines

    def test_what_cannot_be_written_is_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class FullDisk(StringIO):
            def write(self, text: str) -> int:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("sys.stderr", FullDisk())
        configure("info", "text")
        logging.getLogger("a").error("this is dropped")
        print_stderr("this as well")
        monkeypatch.setattr("sys.stderr", None)
        print_stderr("this as well")
