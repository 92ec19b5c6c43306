"""Metrics, parsed from the page as Prometheus parses them."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open_metrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.observability.metrics.registry import EngineMetrics, Metrics
from batching import (
    AsyncEngine,
    NewTokens,
    Priority,
    SchedulerStats,
    SequenceStats,
    StepRecord,
)
from batching.blocks.block_ages import NO_AGES, BlockAges
from batching.config import SchedulerConfig
from batching.steps.observer import EngineObserver
from batching.steps.stats import StoreUse
from tests.support.fakes import ByteTokenizer, loaded_engine
from tests.support.metrics_page import MODEL, PROCESS, MetricsPage as Page
from tests.support.requests import specs

# As Prometheus 3 sends it.
ACCEPT: Final = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)

VLLM_METRICS: Final = Path(__file__).parents[2] / "data" / "vllm_metrics.txt"

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
    num_urgent_preemptions=11,
)


def ended(**fields: Any) -> SequenceStats:
    """Return the statistics of a choice that has ended."""
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
        "num_prompt_tokens": 8,
        "stats": STATS,
        "block_ages": NO_AGES,
    }
    return StepRecord(**facts | fields)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics([MODEL], rejection_reasons=("queue_full", "rate_limit_exceeded"))


@pytest.fixture
def engine(metrics: Metrics) -> EngineMetrics:
    return metrics.engines[MODEL]


def test_names_and_types_are_those_of_vllm(metrics: Metrics, engine: EngineMetrics) -> None:
    engine.state.set_cache_config(block_size=32, num_blocks=1024, enable_prefix_cache=True)
    lines = VLLM_METRICS.read_text(encoding="utf-8").splitlines()
    documented = {tuple(line.split()) for line in lines if not line.startswith("#")}
    exported = {item for item in Page(metrics).families.items() if item[0].startswith("vllm:")}
    assert len(exported) == 32
    assert exported - documented == set()


def test_all_metrics_carry_the_name_of_the_model_if_there_is_one(metrics: Metrics) -> None:
    ours = [s for s in Page(metrics).samples if s.name.startswith(("vllm:", "mlx_server:"))]
    assert {s.labels["model_name"] for s in ours} == {MODEL}


def test_a_model_may_have_any_name() -> None:
    name = 'a "model"\\with\nlines'
    text = Metrics([name]).render(None)[0].decode()
    [running] = [f for f in parse_text(text) if f.name == "vllm:num_requests_running"]
    assert running.samples[0].labels == {"model_name": name}


def test_the_metrics_of_a_new_engine_are_zero(metrics: Metrics) -> None:
    page = Page(metrics)
    assert page("vllm:kv_cache_usage_perc") == 0
    assert page("vllm:num_preemptions_total") == 0
    assert page("vllm:request_success_total", finished_reason="timeout") == 0
    assert page("vllm:admission_rejections_total", reason="queue_full") == 0
    assert page("vllm:time_to_first_token_seconds_bucket", le="0.25") == 0


def test_gauges_show_the_last_statistics_of_the_scheduler(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_stats(STATS)
    page = Page(metrics)
    assert page("vllm:num_requests_running") == 3
    assert page("vllm:num_requests_waiting") == 5
    assert page("vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert page("vllm:num_requests_waiting_by_reason", reason="deferred") == 2
    assert page("vllm:kv_cache_usage_perc") == 0.25
    assert page("vllm:num_preemptions_total") == 4
    assert page("mlx_server:urgent_preemptions_total") == 11
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


def test_a_model_with_recurrent_state_shows_what_became_of_its_checkpoints(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_stats(STATS)
    assert not [name for name in Page(metrics).families if name.startswith("mlx_server:state_")]
    engine.observe_stats(
        STATS._replace(
            num_checkpoints=5,
            num_checkpoints_stored=11,
            num_checkpoints_hit=12,
            num_checkpoints_evicted=13,
            num_checkpoints_skipped=14,
            num_state_missed_tokens=15,
        )
    )
    page = Page(metrics)
    assert page("mlx_server:state_checkpoints") == 5
    assert page("mlx_server:state_checkpoint_stores_total") == 11
    assert page("mlx_server:state_checkpoint_hits_total") == 12
    assert page("mlx_server:state_checkpoint_evictions_total") == 13
    assert page("mlx_server:state_checkpoint_skips_total") == 14
    assert page("mlx_server:state_missed_tokens_total") == 15


def test_a_model_with_windows_shows_how_full_their_blocks_are(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_stats(STATS)
    assert not [name for name in Page(metrics).families if name.startswith("mlx_server:window_")]
    engine.observe_stats(
        STATS._replace(num_window_blocks=16, num_free_window_blocks=12, num_window_missed_tokens=64)
    )
    page = Page(metrics)
    assert page("mlx_server:window_cache_usage_perc") == 0.25
    assert page("mlx_server:window_missed_tokens_total") == 64


def test_a_model_with_a_store_shows_what_is_there_and_what_became_of_it(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_stats(STATS)
    assert not [name for name in Page(metrics).families if name.startswith("mlx_server:kv_store_")]
    use = StoreUse._make([*range(21, 32), {"queue_full": 32, "evicted": 33}])
    engine.observe_stats(STATS._replace(store=use))
    page = Page(metrics)
    gauges = ("entries", "bytes", "unsaved", "host_bytes")
    counters = ("hit_tokens", "reads", "read_bytes", "writes", "written_bytes", "lost", "damaged")
    names = [*gauges, *(f"{name}_total" for name in counters)]
    assert [page(f"mlx_server:kv_store_{name}") for name in names] == [*range(21, 32)]
    assert page("mlx_server:kv_store_skips_total", reason="queue_full") == 32
    assert page("mlx_server:kv_store_skips_total", reason="evicted") == 33


def test_the_statistics_of_an_idle_engine_replace_those_of_its_last_step(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_step(step())
    engine.observe_stats(STATS._replace(num_running=0))
    assert Page(metrics)("vllm:num_requests_running") == 0


def test_a_prompt_counts_once_it_has_been_prefilled(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_tokens([NewTokens(ended(), 1, None)])
    engine.observe_tokens([NewTokens(ended(), 3, 0.5)])
    page = Page(metrics)
    assert page("vllm:prompt_tokens_total") == 20
    assert page("vllm:prompt_tokens_cached_total") == 8
    assert page("vllm:generation_tokens_total") == 4
    assert page.histogram("vllm:time_to_first_token_seconds") == (1, 5.0)
    # The tokens of one step are one observation, as in vLLM.
    assert page.histogram("vllm:inter_token_latency_seconds") == (1, 0.5)


def test_the_phases_of_a_request_add_up(metrics: Metrics, engine: EngineMetrics) -> None:
    engine.observe_end(ended())
    page = Page(metrics)
    assert page.histogram("vllm:request_queue_time_seconds") == (1, 2.0)
    assert page.histogram("vllm:request_prefill_time_seconds") == (1, 3.0)
    assert page.histogram("vllm:request_decode_time_seconds") == (1, 8.0)
    assert page.histogram("vllm:request_inference_time_seconds") == (1, 11.0)
    assert page.histogram("vllm:e2e_request_latency_seconds") == (1, 14.0)
    assert page.histogram("vllm:request_time_per_output_token_seconds") == (1, 2.0)
    assert page("vllm:request_success_total", finished_reason="stop") == 1


def test_sizes_are_observed_when_a_request_ends(metrics: Metrics, engine: EngineMetrics) -> None:
    engine.observe_end(ended())
    page = Page(metrics)
    assert page.histogram("vllm:request_prompt_tokens") == (1, 20)
    assert page.histogram("vllm:request_generation_tokens") == (1, 5)
    assert page.histogram("vllm:request_params_max_tokens") == (1, 16)
    assert page("vllm:request_prompt_tokens_bucket", le="20.0") == 1
    assert page("vllm:request_prompt_tokens_bucket", le="10.0") == 0


def test_a_single_token_has_no_time_per_output_token(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_end(ended(num_output_tokens=1, last_token_time=105.0))
    page = Page(metrics)
    assert page.histogram("vllm:request_decode_time_seconds") == (1, 0)
    assert page.histogram("vllm:request_time_per_output_token_seconds") == (0, 0)


def test_a_request_that_ends_in_the_queue_has_only_a_queue_wait(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_end(
        ended(
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
    assert page.histogram("vllm:e2e_request_latency_seconds") == (1, 14.0)
    assert page.histogram("mlx_server:queue_wait_seconds", priority="low") == (1, 14.0)
    for phase in ("queue", "prefill", "decode", "inference"):
        assert page.histogram(f"vllm:request_{phase}_time_seconds") == (0, 0)


def test_the_queue_wait_is_observed_once_at_the_first_token(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    urgent = ended(priority=Priority.HIGH)
    engine.observe_tokens([NewTokens(urgent, 1, None)])
    assert Page(metrics).histogram("mlx_server:queue_wait_seconds", priority="high") == (1, 2.0)
    engine.observe_end(urgent)
    page = Page(metrics)
    assert page.histogram("mlx_server:queue_wait_seconds", priority="high") == (1, 2.0)
    assert page.histogram("mlx_server:queue_wait_seconds", priority="normal") == (0, 0)


def test_a_prompt_with_several_choices_is_one_prompt(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    for num_choices in (3, 1, 3, 1, 3):
        engine.observe_end(ended(num_choices=num_choices))
    page = Page(metrics)
    assert page.histogram("vllm:request_params_n") == (3, 1 + 1 + 3)
    assert page.histogram("vllm:request_generation_tokens") == (5, 25)


def test_a_step_is_observed_with_its_tokens_and_duration(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_step(step())
    page = Page(metrics)
    assert page.histogram("vllm:iteration_tokens_total") == (1, 12)
    assert page("vllm:iteration_tokens_total_bucket", le="16.0") == 1
    assert page.histogram("mlx_server:step_duration_seconds") == (1, 0.25)
    assert page("mlx_server:failed_steps_total") == 0


def test_a_failed_step_has_processed_nothing(metrics: Metrics, engine: EngineMetrics) -> None:
    engine.observe_step(step(has_failed=True))
    page = Page(metrics)
    assert page("mlx_server:failed_steps_total") == 1
    assert page.histogram("vllm:iteration_tokens_total") == (0, 0)


def test_the_ages_of_blocks_are_observed(metrics: Metrics, engine: EngineMetrics) -> None:
    engine.observe_step(step(block_ages=BlockAges([9.0, 11.0], [2.0, 3.0], [0.5])))
    page = Page(metrics)
    assert page.histogram("vllm:kv_block_lifetime_seconds") == (2, 20.0)
    assert page.histogram("vllm:kv_block_idle_before_evict_seconds") == (2, 5.0)
    assert page.histogram("vllm:kv_block_reuse_gap_seconds") == (1, 0.5)


def test_rejections_are_counted_by_reason(metrics: Metrics) -> None:
    for reason in ("queue_full", "shutting_down", "queue_full"):
        metrics.count_rejection(reason)
    page = Page(metrics)
    assert page("vllm:admission_rejections_total", reason="queue_full") == 2
    assert page("vllm:admission_rejections_total", reason="shutting_down") == 1
    assert page("vllm:admission_rejections_total", reason="rate_limit_exceeded") == 0


def test_the_health_of_the_engine_is_a_gauge(metrics: Metrics, engine: EngineMetrics) -> None:
    assert Page(metrics)("mlx_server:engine_healthy") == 1
    engine.state.is_healthy, engine.state.seconds_since_step = False, 130.0
    page = Page(metrics)
    assert page("mlx_server:engine_healthy") == 0
    assert page("mlx_server:seconds_since_step") == 130


def test_the_lag_of_the_event_loop_is_observed(metrics: Metrics) -> None:
    metrics.observe_loop_lag(0.075)
    page = Page(metrics)
    assert page("mlx_server:event_loop_lag_seconds_bucket", le="0.05") == 0
    assert page("mlx_server:event_loop_lag_seconds_bucket", le="0.1") == 1


def test_the_kv_cache_is_described_once_it_is_known(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    assert "vllm:cache_config_info" not in Page(metrics).families
    engine.state.set_cache_config(block_size=32, num_blocks=1024, enable_prefix_cache=True)
    page = Page(metrics)
    facts = {"block_size": "32", "num_gpu_blocks": "1024", "enable_prefix_caching": "True"}
    assert page("vllm:cache_config_info", **facts) == 1


def test_the_process_and_the_build_are_described(metrics: Metrics) -> None:
    page = Page(metrics)
    names = {s.name for s in page.samples}
    assert "python_info" in names
    assert sys.platform != "linux" or names > PROCESS
    [build] = [s for s in page.samples if s.name == "mlx_server:build_info"]
    assert build.labels.keys() == {"model_name", "mlx", "mlx_lm"}
    assert (page("mlx_server:peak_resident_memory_bytes") or 0) > 1 << 20


def test_the_metrics_of_two_servers_are_separate(metrics: Metrics) -> None:
    other = Metrics([MODEL])
    other.count_rejection("queue_full")
    assert Page(metrics)("vllm:admission_rejections_total", reason="queue_full") == 0


def test_each_engine_counts_under_the_name_of_its_model() -> None:
    metrics = Metrics(["a", "b"])
    metrics.engines["b"].observe_step(step())
    metrics.engines["b"].observe_tokens([NewTokens(ended(), 3, None)])
    metrics.engines["b"].state.is_healthy = False
    a, b = Page(metrics, "a"), Page(metrics, "b")
    assert (a("vllm:generation_tokens_total"), b("vllm:generation_tokens_total")) == (0, 3)
    assert (a("vllm:num_requests_running"), b("vllm:num_requests_running")) == (0, 3)
    assert (a("vllm:num_preemptions_total"), b("vllm:num_preemptions_total")) == (0, 4)
    assert (a("mlx_server:engine_healthy"), b("mlx_server:engine_healthy")) == (1, 0)
    step_times = [page.histogram("mlx_server:step_duration_seconds") for page in (a, b)]
    assert step_times == [(0, 0), (1, 0.25)]
    waits = [page("vllm:num_requests_waiting_by_reason", reason="capacity") for page in (a, b)]
    assert waits == [0, 3]


def test_of_several_models_none_is_named_for_what_concerns_the_server() -> None:
    metrics = Metrics(["a", "b"], rejection_reasons=["queue_full"])
    metrics.count_rejection("queue_full")
    metrics.observe_loop_lag(0.5)
    page = Page(metrics, "")
    assert page("vllm:admission_rejections_total", reason="queue_full") == 1
    assert page.histogram("mlx_server:event_loop_lag_seconds") == (1, 0.5)
    assert (page("mlx_server:peak_resident_memory_bytes") or 0) > 1 << 20
    for model in ("a", "b"):
        assert Page(metrics, model)("vllm:admission_rejections_total", reason="queue_full") is None


def test_there_are_no_creation_times(metrics: Metrics) -> None:
    assert [s.name for s in Page(metrics).samples if s.name.endswith("_created")] == []


def test_prometheus_gets_the_same_samples_as_open_metrics(
    metrics: Metrics, engine: EngineMetrics
) -> None:
    engine.observe_step(step())
    engine.observe_tokens([NewTokens(ended(), 1, None)])
    engine.observe_end(ended())
    body, content_type = metrics.render(ACCEPT)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    moving = ("process_", "mlx_server:peak_")
    families = parse_open_metrics(body.decode())  # type: ignore[no-untyped-call]
    samples = [s for f in families for s in f.samples]
    still = [s for s in samples if not s.name.startswith(moving)]
    assert still == [s for s in Page(metrics).samples if not s.name.startswith(moving)]


@pytest.mark.parametrize("accept", [None, "", "*/*", "text/html", "text/plain;version=0.0.4"])
def test_other_clients_get_text(metrics: Metrics, accept: str | None) -> None:
    assert metrics.render(accept)[1] == "text/plain; version=0.0.4; charset=utf-8"


@given(
    st.lists(
        st.sampled_from(
            ["application/openmetrics-text", "text/plain", ";", ",", "version=", "1.0.0", "x", "="]
        )
        | st.text(max_size=3)
    ).map("".join)
)
def test_any_accept_header_gets_a_page(accept: str) -> None:
    body, content_type = Metrics([MODEL]).render(accept)
    assert body.startswith(b"# HELP")
    assert "charset=utf-8" in content_type


CONFIG: Final = SchedulerConfig(
    num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=16
)


@asynccontextmanager
async def running(observer: EngineObserver) -> AsyncIterator[AsyncEngine]:
    thread = AsyncEngine(lambda _: loaded_engine(CONFIG, ByteTokenizer()))
    thread.observer = observer
    thread.start()
    try:
        yield thread
    finally:
        thread.stop()


@pytest.mark.anyio
async def test_what_an_engine_does_is_counted(metrics: Metrics, engine: EngineMetrics) -> None:
    prompt = list(range(12))
    async with running(engine) as thread:
        for priority in Priority:
            stream = await thread.submit(specs([prompt], max_tokens=6, priority=priority))
            num_tokens = sum([len(output.token_ids) async for _, output in stream])
            assert num_tokens == 6
        stream = await thread.submit(specs([prompt], max_tokens=6, num_choices=2))
        assert sum([len(output.token_ids) async for _, output in stream]) == 12
        stats = await thread.stats()
    page = Page(metrics)
    assert page("vllm:prompt_tokens_total") == 5 * 12
    # All but the first find the blocks of the first, except the last one.
    assert page("vllm:prompt_tokens_cached_total") == 4 * 8
    assert page("vllm:generation_tokens_total") == 5 * 6
    assert page("vllm:prefix_cache_queries_total") == stats.num_queried_tokens == 4 * 12
    assert page("vllm:prefix_cache_hits_total") == stats.num_hit_tokens == 3 * 8
    assert page("vllm:request_success_total", finished_reason="length") == 5
    assert page.histogram("vllm:request_params_n") == (4, 1 + 1 + 1 + 2)
    waits = [page.histogram("mlx_server:queue_wait_seconds", priority=p) for p in ("high", "low")]
    assert [count for count, _ in waits] == [1, 1]
    assert page.histogram("vllm:time_to_first_token_seconds")[0] == 5
    # The model processes each output token but the last, and prompt tokens that are not cached;
    # the prompt of the second choice is not processed again.
    assert page.histogram("vllm:iteration_tokens_total")[1] == 12 + 3 * 4 + 5 * 5
