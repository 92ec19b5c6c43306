"""Numbers that were computed by hand."""

import pytest

from scripts.bench.load.client import RequestRecord
from scripts.bench.load.metrics import Summary, latencies, medians, summarise

# Sent at 0, first token after 100 ms, then gaps of 20, 20 and 60 ms: 100 ms for 3 more tokens.
QUICK = RequestRecord(
    sent=0.0,
    ended=0.2,
    chunk_times=[0.1, 0.12, 0.14, 0.2],
    usage={
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 4},
    },
)
# Sent at 1, first token after 500 ms, one gap of 300 ms, the end 200 ms later.
SLOW = RequestRecord(
    sent=1.0,
    ended=2.0,
    chunk_times=[1.5, 1.8],
    usage={
        "prompt_tokens": 30,
        "completion_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    },
)
FAILED = RequestRecord(sent=0.5, ended=4.0, error="HTTP 500: it broke")


def test_latencies_of_one_request() -> None:
    assert QUICK.ttft == pytest.approx(0.1)
    assert QUICK.e2e == pytest.approx(0.2)
    assert QUICK.tpot == pytest.approx(0.1 / 3)
    assert QUICK.gaps == pytest.approx([0.02, 0.02, 0.06])


def test_what_a_request_does_not_have() -> None:
    single = RequestRecord(sent=0, ended=1, chunk_times=[0.5])
    assert (single.tpot, single.gaps) == (None, [])
    assert FAILED.ttft is None


def test_percentiles_are_in_milliseconds_and_of_all_requests() -> None:
    values = latencies([QUICK, SLOW])
    assert values["ttft_p50_ms"] == pytest.approx(100)
    assert values["ttft_p99_ms"] == pytest.approx(500)
    assert values["tpot_p50_ms"] == pytest.approx(100 / 3)
    assert values["tpot_p90_ms"] == pytest.approx(100)
    # The gaps in order: 20, 20, 60, 300.
    assert values["itl_p50_ms"] == pytest.approx(20)
    assert values["itl_p90_ms"] == pytest.approx(300)
    assert values["e2e_p50_ms"] == pytest.approx(200)
    assert values["e2e_p99_ms"] == pytest.approx(1000)


def test_throughput_counts_good_requests_over_the_whole_time() -> None:
    summary = summarise([QUICK, SLOW])
    assert (summary.num_requests, summary.num_failed, summary.first_error) == (2, 0, None)
    assert summary.values["duration_s"] == pytest.approx(2.0)
    assert summary.values["prompt_tokens"] == 40
    assert summary.values["cached_tokens"] == 4
    assert summary.values["output_throughput"] == pytest.approx(10 / 2)
    assert summary.values["total_throughput"] == pytest.approx(50 / 2)
    assert summary.values["request_throughput"] == pytest.approx(2 / 2)


def test_a_failed_request_takes_time_and_gives_nothing() -> None:
    summary = summarise([QUICK, FAILED])
    assert (summary.num_failed, summary.first_error) == (1, "HTTP 500: it broke")
    assert summary.values["duration_s"] == pytest.approx(4.0)
    assert summary.values["output_throughput"] == pytest.approx(4 / 4)
    assert summary.values["e2e_p99_ms"] == pytest.approx(200)


def test_nothing_that_succeeded_has_no_numbers() -> None:
    assert summarise([FAILED]) == Summary(1, 1, "HTTP 500: it broke", {})
    assert summarise([]) == Summary(0, 0, None, {})


def test_counts_that_a_server_does_not_send_are_left_out() -> None:
    mute = RequestRecord(sent=0, ended=1, chunk_times=[0.5, 1])
    values = summarise([mute]).values
    assert values["output_throughput"] == 2
    assert not {"prompt_tokens", "cached_tokens", "total_throughput"} & set(values)


def test_rounds_give_medians_of_values_and_sums_of_counts() -> None:
    rounds = [
        Summary(4, 0, None, {"e2e_p50_ms": 1.0, "itl_p50_ms": 9.0}),
        Summary(4, 1, "lost", {"e2e_p50_ms": 5.0}),
        Summary(4, 1, "late", {"e2e_p50_ms": 2.0, "itl_p50_ms": 7.0}),
    ]
    assert medians(rounds) == Summary(12, 2, "lost", {"e2e_p50_ms": 2.0, "itl_p50_ms": 8.0})
