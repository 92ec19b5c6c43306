"""What an operator can watch: read back from the page as Prometheus reads it."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from hypothesis import given, strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.samples import Sample

from app.observability.metrics.registry import Metrics
from batching import (
    EngineThread,
    Priority,
    SchedulerStats,
    SequenceStats,
    StepRecord,
)
from batching.blocks.block_ages import NO_AGES, BlockAges
from batching.config import SchedulerConfig
from batching.observer import EngineObserver
from tests.support.fakes import ByteTokenizer, loaded_engine

MODEL: Final = "fake/model"

# As Prometheus 3 sends it.
ACCEPT: Final = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)

# Of a Linux process; elsewhere the library knows nothing of it.
PROCESS: Final = {"process_resident_memory_bytes", "process_open_fds", "process_cpu_seconds_total"}

GAUGES: Final = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
}
COUNTERS: Final = {
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:prompt_tokens_cached",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions",
    "vllm:request_success",
    "vllm:admission_rejections",
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
}
HISTOGRAMS: Final = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:iteration_tokens_total",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens",
    "vllm:request_params_n",
    "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_idle_before_evict_seconds",
    "vllm:kv_block_reuse_gap_seconds",
}

STATS: Final = SchedulerStats(
    num_waiting=5,
    num_running=3,
    num_prefilling=1,
    num_awaiting_prefix=2,
    block_size=32,
    num_blocks=64,
    num_free_blocks=48,
    num_cached_blocks=8,
    num_preemptions=4,
    num_evictions=6,
    num_queried_tokens=100,
    num_hit_tokens=60,
    num_aged_admissions=7,
    num_prefix_waits=9,
    num_drafts=10,
    num_draft_tokens=40,
    num_accepted_tokens=30,
)


class Page:
    """What a scrape brings home; every sample has the model's name."""

    def __init__(self, metrics: Metrics) -> None:
        text = metrics.render(None)[0].decode()
        self.families = {family.name: family.type for family in parse_text(text)}
        self.samples: list[Sample] = [s for f in parse_text(text) for s in f.samples]

    def __call__(self, name: str, **labels: str) -> float | None:
        """Return a sample's value; None if there is none with just these labels."""
        wanted = {"model_name": MODEL, **labels}
        found = [s.value for s in self.samples if s.name == name and s.labels == wanted]
        assert len(found) < 2, f"{name} is there twice"
        return found[0] if found else None

    def seen(self, name: str, **labels: str) -> tuple[float | None, float | None]:
        """Return how often a histogram was fed, and with how much in all."""
        return self(f"{name}_count", **labels), self(f"{name}_sum", **labels)


def answer(**fields: Any) -> SequenceStats:
    """Return an answer that has ended; one that read, and one that wrote, for some time."""
    facts: dict[str, Any] = {
        "num_prompt_tokens": 20,
        "max_tokens": 16,
        "num_choices": 1,
        "priority": Priority.NORMAL,
        "arrival_time": 100.0,
        "scheduled_time": 102.0,
        "first_token_time": 105.0,
        "last_token_time": 113.0,
        "end_time": 114.0,
        "num_cached_tokens": 8,
        "num_output_tokens": 5,
        "finish_reason": "stop",
    }
    return SequenceStats(**facts | fields)


def step(**fields: Any) -> StepRecord:
    facts: dict[str, Any] = {
        "ended": 1.0,
        "duration": 0.25,
        "num_tokens": 12,
        "stats": STATS,
        "block_ages": NO_AGES,
    }
    return StepRecord(**facts | fields)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(MODEL, rejection_reasons=("queue_full", "rate_limit_exceeded"))


def test_the_names_and_types_are_vllms(metrics: Metrics) -> None:
    metrics.set_cache_config(block_size=32, num_blocks=1024, enable_prefix_cache=True)
    found = {name: kind for name, kind in Page(metrics).families.items() if "vllm:" in name}
    assert found == (
        dict.fromkeys(GAUGES, "gauge")
        | dict.fromkeys(COUNTERS, "counter")
        | dict.fromkeys(HISTOGRAMS, "histogram")
    )


def test_everything_of_the_engine_carries_the_models_name(metrics: Metrics) -> None:
    ours = [s for s in Page(metrics).samples if s.name.startswith(("vllm:", "mlx_server:"))]
    assert {s.labels["model_name"] for s in ours} == {MODEL}


def test_a_model_may_have_any_name() -> None:
    name = 'a "model"\\with\nlines'
    text = Metrics(name).render(None)[0].decode()
    [running] = [f for f in parse_text(text) if f.name == "vllm:num_requests_running"]
    assert running.samples[0].labels == {"model_name": name}


def test_an_engine_that_has_done_nothing_is_all_zeros(metrics: Metrics) -> None:
    page = Page(metrics)
    assert page("vllm:kv_cache_usage_perc") == 0
    assert page("vllm:num_preemptions_total") == 0
    assert page("vllm:request_success_total", finished_reason="timeout") == 0
    assert page("vllm:admission_rejections_total", reason="queue_full") == 0
    assert page("vllm:time_to_first_token_seconds_bucket", le="0.25") == 0


def test_what_the_scheduler_knows_is_read_off_its_last_statistics(metrics: Metrics) -> None:
    metrics.observe_stats(STATS)
    page = Page(metrics)
    assert page("vllm:num_requests_running") == 3
    assert page("vllm:num_requests_waiting") == 5
    assert page("vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert page("vllm:num_requests_waiting_by_reason", reason="deferred") == 2
    assert page("vllm:kv_cache_usage_perc") == 0.25
    assert page("vllm:num_preemptions_total") == 4
    assert page("vllm:prefix_cache_queries_total") == 100
    assert page("vllm:prefix_cache_hits_total") == 60
    assert page("vllm:spec_decode_num_drafts_total") == 10
    assert page("vllm:spec_decode_num_draft_tokens_total") == 40
    assert page("vllm:spec_decode_num_accepted_tokens_total") == 30
    assert page("mlx_server:num_requests_prefilling") == 1
    assert page("mlx_server:cached_blocks") == 8
    assert page("mlx_server:block_evictions_total") == 6
    assert page("mlx_server:aged_admissions_total") == 7
    assert page("mlx_server:prefix_waits_total") == 9


def test_the_statistics_of_an_idle_engine_replace_those_of_its_last_step(metrics: Metrics) -> None:
    metrics.observe_step(step())
    metrics.observe_stats(STATS._replace(num_running=0))
    assert Page(metrics)("vllm:num_requests_running") == 0


def test_a_prompt_counts_once_it_has_been_read(metrics: Metrics) -> None:
    metrics.observe_tokens(answer(), 1, None)
    metrics.observe_tokens(answer(), 3, 0.5)
    page = Page(metrics)
    assert page("vllm:prompt_tokens_total") == 20
    assert page("vllm:prompt_tokens_cached_total") == 8
    assert page("vllm:generation_tokens_total") == 4
    assert page.seen("vllm:time_to_first_token_seconds") == (1, 5.0)
    # Tokens that come together are one wait, as at vLLM.
    assert page.seen("vllm:inter_token_latency_seconds") == (1, 0.5)


def test_the_phases_of_an_answer_add_up(metrics: Metrics) -> None:
    metrics.observe_end(answer())
    page = Page(metrics)
    assert page.seen("vllm:request_queue_time_seconds") == (1, 2.0)
    assert page.seen("vllm:request_prefill_time_seconds") == (1, 3.0)
    assert page.seen("vllm:request_decode_time_seconds") == (1, 8.0)
    assert page.seen("vllm:request_inference_time_seconds") == (1, 11.0)
    assert page.seen("vllm:e2e_request_latency_seconds") == (1, 14.0)
    assert page.seen("vllm:request_time_per_output_token_seconds") == (1, 2.0)
    assert page("vllm:request_success_total", finished_reason="stop") == 1


def test_the_sizes_of_an_answer_are_told_at_its_end(metrics: Metrics) -> None:
    metrics.observe_end(answer())
    page = Page(metrics)
    assert page.seen("vllm:request_prompt_tokens") == (1, 20)
    assert page.seen("vllm:request_generation_tokens") == (1, 5)
    assert page.seen("vllm:request_params_max_tokens") == (1, 16)
    assert page("vllm:request_prompt_tokens_bucket", le="20.0") == 1
    assert page("vllm:request_prompt_tokens_bucket", le="10.0") == 0


def test_one_token_has_no_time_for_the_next(metrics: Metrics) -> None:
    metrics.observe_end(answer(num_output_tokens=1, last_token_time=105.0))
    page = Page(metrics)
    assert page.seen("vllm:request_decode_time_seconds") == (1, 0)
    assert page.seen("vllm:request_time_per_output_token_seconds") == (0, 0)


def test_an_answer_that_ends_in_the_queue_has_waited_and_nothing_else(metrics: Metrics) -> None:
    metrics.observe_end(
        answer(
            scheduled_time=None,
            first_token_time=None,
            last_token_time=None,
            num_output_tokens=0,
            priority=Priority.LOW,
            finish_reason="timeout",
        )
    )
    page = Page(metrics)
    assert page("vllm:request_success_total", finished_reason="timeout") == 1
    assert page.seen("vllm:e2e_request_latency_seconds") == (1, 14.0)
    assert page.seen("mlx_server:queue_wait_seconds", priority="low") == (1, 14.0)
    for phase in ("queue", "prefill", "decode", "inference"):
        assert page.seen(f"vllm:request_{phase}_time_seconds") == (0, 0)


def test_the_wait_in_the_queue_is_told_at_the_first_token_and_only_once(metrics: Metrics) -> None:
    urgent = answer(priority=Priority.HIGH)
    metrics.observe_tokens(urgent, 1, None)
    assert Page(metrics).seen("mlx_server:queue_wait_seconds", priority="high") == (1, 2.0)
    metrics.observe_end(urgent)
    page = Page(metrics)
    assert page.seen("mlx_server:queue_wait_seconds", priority="high") == (1, 2.0)
    assert page.seen("mlx_server:queue_wait_seconds", priority="normal") == (0, 0)


def test_a_prompt_with_several_answers_is_one_prompt(metrics: Metrics) -> None:
    for num_choices in (3, 1, 3, 1, 3):
        metrics.observe_end(answer(num_choices=num_choices))
    page = Page(metrics)
    assert page.seen("vllm:request_params_n") == (3, 1 + 1 + 3)
    assert page.seen("vllm:request_generation_tokens") == (5, 25)


def test_a_step_tells_how_much_it_read_and_how_long_it_took(metrics: Metrics) -> None:
    metrics.observe_step(step())
    page = Page(metrics)
    assert page.seen("vllm:iteration_tokens_total") == (1, 12)
    assert page("vllm:iteration_tokens_total_bucket", le="16.0") == 1
    assert page.seen("mlx_server:step_duration_seconds") == (1, 0.25)
    assert page("mlx_server:failed_steps_total") == 0


def test_a_step_that_failed_has_read_nothing(metrics: Metrics) -> None:
    metrics.observe_step(step(has_failed=True))
    page = Page(metrics)
    assert page("mlx_server:failed_steps_total") == 1
    assert page.seen("vllm:iteration_tokens_total") == (0, 0)


def test_the_ages_of_blocks_are_told(metrics: Metrics) -> None:
    metrics.observe_step(step(block_ages=BlockAges([9.0, 11.0], [2.0, 3.0], [0.5])))
    page = Page(metrics)
    assert page.seen("vllm:kv_block_lifetime_seconds") == (2, 20.0)
    assert page.seen("vllm:kv_block_idle_before_evict_seconds") == (2, 5.0)
    assert page.seen("vllm:kv_block_reuse_gap_seconds") == (1, 0.5)


def test_refusals_are_counted_by_reason(metrics: Metrics) -> None:
    for reason in ("queue_full", "shutting_down", "queue_full"):
        metrics.refused(reason)
    page = Page(metrics)
    assert page("vllm:admission_rejections_total", reason="queue_full") == 2
    assert page("vllm:admission_rejections_total", reason="shutting_down") == 1
    assert page("vllm:admission_rejections_total", reason="rate_limit_exceeded") == 0


def test_the_engines_health_is_told(metrics: Metrics) -> None:
    assert Page(metrics)("mlx_server:engine_healthy") == 1
    metrics.set_health(False, 130.0)
    page = Page(metrics)
    assert page("mlx_server:engine_healthy") == 0
    assert page("mlx_server:seconds_since_step") == 130


def test_how_late_the_event_loop_is_is_told(metrics: Metrics) -> None:
    metrics.observe_loop_lag(0.075)
    page = Page(metrics)
    assert page("mlx_server:event_loop_lag_seconds_bucket", le="0.05") == 0
    assert page("mlx_server:event_loop_lag_seconds_bucket", le="0.1") == 1


def test_the_kv_cache_is_told_once_it_is_known(metrics: Metrics) -> None:
    assert "vllm:cache_config_info" not in Page(metrics).families
    metrics.set_cache_config(block_size=32, num_blocks=1024, enable_prefix_cache=True)
    page = Page(metrics)
    facts = {"block_size": "32", "num_gpu_blocks": "1024", "enable_prefix_caching": "True"}
    assert page("vllm:cache_config_info", **facts) == 1


def test_the_process_and_the_build_are_told(metrics: Metrics) -> None:
    page = Page(metrics)
    names = {s.name for s in page.samples}
    assert "python_info" in names
    assert sys.platform != "linux" or names > PROCESS
    [build] = [s for s in page.samples if s.name == "mlx_server:build_info"]
    assert build.labels.keys() == {"model_name", "mlx", "mlx_lm"}
    assert (page("mlx_server:peak_resident_memory_bytes") or 0) > 1 << 20


def test_the_metrics_of_two_models_do_not_meet(metrics: Metrics) -> None:
    other = Metrics(MODEL)
    other.refused("queue_full")
    assert Page(metrics)("vllm:admission_rejections_total", reason="queue_full") == 0


def test_there_are_no_series_that_say_when_others_began(metrics: Metrics) -> None:
    assert [s.name for s in Page(metrics).samples if s.name.endswith("_created")] == []


def test_prometheus_gets_open_metrics_and_reads_the_same_from_it(metrics: Metrics) -> None:
    metrics.observe_step(step())
    metrics.observe_tokens(answer(), 1, None)
    metrics.observe_end(answer())
    body, content_type = metrics.render(ACCEPT)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    moving = ("process_", "mlx_server:peak_")
    families = parse_open_metrics(body.decode())  # type: ignore[no-untyped-call]
    samples = [s for f in families for s in f.samples]
    still = [s for s in samples if not s.name.startswith(moving)]
    assert still == [s for s in Page(metrics).samples if not s.name.startswith(moving)]


@pytest.mark.parametrize("accept", [None, "", "*/*", "text/html", "text/plain;version=0.0.4"])
def test_others_get_text(metrics: Metrics, accept: str | None) -> None:
    assert metrics.render(accept)[1] == "text/plain; version=0.0.4; charset=utf-8"


@given(
    st.lists(
        st.sampled_from(
            ["application/openmetrics-text", "text/plain", ";", ",", "version=", "1.0.0", "x", "="]
        )
        | st.text(max_size=3)
    ).map("".join)
)
def test_a_page_comes_whatever_is_asked_for(accept: str) -> None:
    body, content_type = Metrics(MODEL).render(accept)
    assert body.startswith(b"# HELP")
    assert "charset=utf-8" in content_type


CONFIG: Final = SchedulerConfig(num_blocks=24, block_size=4, max_num_seqs=4, max_batched_tokens=16)


@asynccontextmanager
async def running(observer: EngineObserver) -> AsyncIterator[EngineThread]:
    thread = EngineThread(lambda: loaded_engine(CONFIG, ByteTokenizer()))
    thread.observer = observer
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


@pytest.mark.anyio
async def test_what_an_engine_does_is_counted(metrics: Metrics) -> None:
    prompt = list(range(12))
    async with running(metrics) as engine:
        for priority in Priority:
            stream = await engine.submit([prompt], max_tokens=6, priority=priority)
            num_tokens = sum([len(output.token_ids) async for _, output in stream])
            assert num_tokens == 6
        stream = await engine.submit([prompt], max_tokens=6, num_choices=2)
        assert sum([len(output.token_ids) async for _, output in stream]) == 12
        stats = await engine.stats()
    page = Page(metrics)
    assert page("vllm:prompt_tokens_total") == 5 * 12
    # All but the first find what the first one left, less the last block.
    assert page("vllm:prompt_tokens_cached_total") == 4 * 8
    assert page("vllm:generation_tokens_total") == 5 * 6
    assert page("vllm:prefix_cache_queries_total") == stats.num_queried_tokens == 4 * 12
    assert page("vllm:prefix_cache_hits_total") == stats.num_hit_tokens == 3 * 8
    assert page("vllm:request_success_total", finished_reason="length") == 5
    assert page.seen("vllm:request_params_n") == (4, 1 + 1 + 1 + 2)
    waits = [page.seen("mlx_server:queue_wait_seconds", priority=p) for p in ("high", "low")]
    assert [count for count, _ in waits] == [1, 1]
    assert page.seen("vllm:time_to_first_token_seconds")[0] == 5
    # The model reads each token but the last of an answer, and of prompts what was not cached;
    # the second choice's prompt is not read at all.
    assert page.seen("vllm:iteration_tokens_total")[1] == 12 + 3 * 4 + 5 * 5
