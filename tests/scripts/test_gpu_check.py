"""`make gpu-check` without a GPU: a dry run, and what becomes of gates that end badly."""

import re
from pathlib import Path
from typing import Final

import mlx.core as mx
import pytest

from batching.steps.token_output import TokenLogprobs
from scripts.gpu_check.__main__ import main
from scripts.gpu_check.checks import CHECKS, Check
from scripts.gpu_check.gates import invariance, kernels, recovery
from scripts.gpu_check.models import Served, serve_tiny
from scripts.gpu_check.processes import run_all, run_check
from scripts.gpu_check.record import Options, Record, Status
from scripts.gpu_check.serving import Agreement, Answer

QUICK: Final = Options(device="cpu", is_quick=True)
DRY_RUN: Final = ("--device", "cpu", "--quick")
FAULTS: Final = "tests.support.gpu_check_faults"


def fault(name: str, *, is_bench: bool = False) -> Check:
    return Check(name, f"A gate that is {name}", f"{FAULTS}:{name}", 30, is_bench)


@pytest.fixture(autouse=True)
def _on_the_cpu() -> None:
    mx.set_default_device(mx.Device(mx.cpu))


@pytest.mark.slow
def test_a_dry_run_has_every_section_and_finds_nothing_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "report.md"
    assert main([*DRY_RUN, "--out", str(out)]) == 0, out.read_text(encoding="utf-8")
    report = out.read_text(encoding="utf-8")
    assert "Nothing wrong was found" in report
    for fact in ("device", "chip", "memory for arrays", "MLX", "OS", "commit", "began", "duration"):
        assert re.search(rf"^\| {fact} \| .+ \|$", report, re.MULTILINE), fact
    for check in CHECKS:
        assert re.search(rf"^### {re.escape(check.title)}: ", report, re.MULTILINE), check.title
        assert f"\n| {check.name} | {check.title} | " in report
    for column in ("prompt tokens/s", "tokens/s", "peak, GiB"):
        assert f"| {column} |" in report
    assert "nothing here says how fast" in report
    assert "The report is" in capsys.readouterr().out


def test_all_checks_fit_into_25_minutes() -> None:
    assert sum(check.seconds for check in CHECKS) <= 25 * 60


@pytest.mark.slow
def test_what_crashes_hangs_or_is_wrong_is_reported_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.md"
    checks = [*map(fault, ("wrong", "crash", "fail", "right"))]
    assert main([*DRY_RUN, "--out", str(out)], checks) == 1
    report = out.read_text(encoding="utf-8")
    assert "3 of 4 checks found something wrong: wrong, crash, fail" in report
    assert "### A gate that is wrong: FAIL" in report
    assert "- row 0 is off by 1" in report
    assert "### A gate that is crash: CRASHED\n\n- ended with signal SIGABRT" in report
    assert "| found before |" in report
    assert "RuntimeError: planted in ./tests/support/gpu_check_faults.py" in report
    assert "### A gate that is right: pass" in report


def test_what_hangs_is_stopped() -> None:
    outcome = run_check(fault("hang"), Options(device="cpu", seconds=0.1), grace=2)
    assert outcome.status is Status.TIMED_OUT
    assert outcome.record.failures == ["stopped after 2 s"]


def test_what_no_time_is_left_for_is_skipped() -> None:
    (outcome,) = run_all([fault("crash")], QUICK, seconds=1)
    assert outcome.status is Status.SKIPPED


def test_without_a_gpu_a_line_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if mx.is_available(mx.gpu):
        pytest.skip("there is a GPU")
    out = tmp_path / "report.md"
    assert main(["--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith("no GPU that MLX can use is here")
    assert not out.exists()


def test_a_report_that_cannot_be_written_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*DRY_RUN, "--out", str(tmp_path)]) == 2
    assert "--out: the report cannot be written" in capsys.readouterr().err


def test_other_keys_after_preemption_fail_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_weights(family: str, dtype: mx.Dtype, **limits: int) -> Served:
        served = serve_tiny(family, dtype, **limits)
        if limits["num_blocks"] < 50:
            forward = served.runner.logits
            served.runner.logits = lambda step: forward(step)[:, ::-1]  # type: ignore[method-assign]
        return served

    monkeypatch.setattr(invariance, "serve_tiny", other_weights)
    record = Record()
    invariance.run(QUICK, record)
    (failure,) = record.failures
    assert failure.startswith("after preemption: token 0 is")


def test_a_fault_that_does_not_happen_fails_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery.Fault, "arm", lambda *_: None)
    record = Record()
    recovery.run(QUICK, record)
    assert record.failures[0].startswith("round 1: 0 failed")


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_gate_of_kernels_compares_them_with_the_portable_path(
    monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """Without a GPU the second of two engines only stands for one with kernels."""

    def serve(family: str, dtype: mx.Dtype, mode: str, num_blocks: int = 256) -> Served:
        served = serve_tiny(family, dtype, num_blocks=num_blocks, block_size=16)
        if is_wrong and mode == "require":
            forward = served.runner.logits
            served.runner.logits = lambda step: forward(step)[:, ::-1]  # type: ignore[method-assign]
        return served

    monkeypatch.setattr(kernels, "_FAMILIES", ("qwen3",))
    monkeypatch.setattr(kernels, "_need_gpu", lambda: None)
    monkeypatch.setattr(kernels, "_serve", serve)
    record = Record()
    kernels.run_scattered(QUICK, record)
    assert len(record.rows) == 2
    assert len(record.failures) == (2 if is_wrong else 0)


def test_another_token_is_right_within_the_margin_only() -> None:
    top = ((3, -1.0), (4, -1.1), (5, -2.0))
    expected = Answer([3, 7], [TokenLogprobs(-1.0, top), TokenLogprobs(-0.5)])

    def agreement(token: int) -> Agreement:
        result = Agreement(0.25)
        result.add(expected, Answer([token, 9]))
        return result

    assert agreement(4).is_within()
    assert not agreement(5).is_within()
    assert not agreement(6).is_within()
    assert agreement(5).is_within(num_may_leap=1)
    assert agreement(4).share == "0.0 %"


def test_another_token_is_right_if_it_is_as_likely_less_the_penalty() -> None:
    top = ((3, -1.0), (4, -1.6), (5, -1.2))
    # Token 3 has been there, so that 5 is the best one; it is not among the most probable ones that are listed.
    logprobs = [TokenLogprobs(-0.5), TokenLogprobs(-1.2, top[:2])]

    def agreement(token: int, presence_penalty: float) -> Agreement:
        result = Agreement(0.25, presence_penalty)
        result.add(Answer([3, 5], logprobs), Answer([3, token]))
        return result

    assert not agreement(4, 0.5).is_within()
    assert agreement(3, 0.0).is_within()
    assert not agreement(3, 0.5).is_within()
    assert agreement(3, 0.2).is_within()
