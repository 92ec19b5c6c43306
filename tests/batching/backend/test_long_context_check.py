"""The check at load on a GPU: what goes wrong over a long context only is found, and not served.

The GPU is a value here; what computes is the CPU, with the faults of a GPU planted.
"""

from dataclasses import replace
from itertools import product
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest

from batching.backend.devices import Gpu
from batching.backend.execution_mode import ExecutionMode
from batching.backend.hooks.changes import Changes
from batching.backend.paged.kv_cache import LayerCache
from batching.backend.paged.mlx_attention import RowGroup, RunContext, SlidingWindow, StepAttention
from batching.backend.self_check import check as self_check
from batching.backend.self_check.long_steps import LONG, MAX_TOKENS, MIN_TOKENS, long_prompt
from tests.support.platforms import check_model, gpu_of
from tests.support.requests import make_request
from tests.support.serving import limits, make_runner, serve
from tests.support.tiny_models import VOCAB_SIZE, insist_on_own_caches, tiny_model
from tests.support.weekly import weekly

FAMILIES: Final = ["llama", "mistral", "qwen3_moe", "gpt_oss", "gemma2", "stablelm", "mamba"]


def plant_cudas_view(monkeypatch: pytest.MonkeyPatch, *, in_windows: bool = False) -> None:
    """Let a single query over many keys of a part of the pool read the pool from its beginning.

    As MLX's `unslice_kv` does on CUDA, where 256 divides the slots.
    """
    plain = StepAttention.groups

    def groups(
        self: StepAttention, window: SlidingWindow | None, *, sees_ahead: bool = False
    ) -> list[RowGroup]:
        found = plain(self, window, sees_ahead=sees_ahead)
        return found if in_windows and window is None else [misread(group) for group in found]

    monkeypatch.setattr(StepAttention, "groups", groups)


def misread(group: RowGroup) -> RowGroup:
    context = group.context
    if group.is_chunk or group.mask is not None or not isinstance(context, RunContext):
        return group
    length = context.stop - context.start
    return group if length < 256 else replace(group, context=RunContext(0, length))


def outputs(model: nn.Module, **options: Any) -> list[list[int]]:
    checked = check_model(model, VOCAB_SIZE, **options)
    requests = [make_request(i, [i + 1] * 9, max_tokens=6) for i in range(3)]
    serve(make_runner(model, VOCAB_SIZE, checked), limits(checked), requests)
    return [request.output_token_ids for request in requests]


def test_attention_over_a_view_that_cuda_reads_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant_cudas_view(monkeypatch)
    # Where decodes are viewed, only a long context shows it ...
    assert check_model(tiny_model("llama"), VOCAB_SIZE).mode is ExecutionMode.RAGGED
    found = check_model(tiny_model("llama"), VOCAB_SIZE, gpu=Gpu.METAL)
    assert found.mode is not ExecutionMode.RAGGED
    assert found.reason.startswith("a long context changes its logits by")
    # ... and on CUDA they are gathered.
    checked = check_model(tiny_model("llama"), VOCAB_SIZE, gpu=Gpu.CUDA)
    assert (checked.mode, checked.reason) == (ExecutionMode.RAGGED, "")


@pytest.mark.parametrize(("family", "gpu"), weekly(product(FAMILIES, Gpu), 2))
def test_a_model_is_served_as_without_a_long_context(family: str, gpu: Gpu) -> None:
    short = check_model(tiny_model(family), VOCAB_SIZE)
    checked = check_model(tiny_model(family), VOCAB_SIZE, gpu=gpu)
    assert checked.result == short.result
    assert checked.layout == short.layout
    assert gpu_of(checked).gpu is gpu
    assert outputs(tiny_model(family), gpu=gpu) == outputs(tiny_model(family))


def test_sizes_are_as_they_are_over_a_long_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that was made small would never show as many keys as the fault needs."""
    plant_cudas_view(monkeypatch, in_windows=True)
    model = tiny_model("mistral", sliding_window=4096)
    assert check_model(model, VOCAB_SIZE, gpu=Gpu.METAL).mode is not ExecutionMode.RAGGED
    model = tiny_model("mistral", sliding_window=4096)
    checked = check_model(model, VOCAB_SIZE, gpu=Gpu.CUDA)
    assert (checked.mode, checked.layout.window) == (ExecutionMode.RAGGED, 4096)


def test_what_has_left_a_window_is_not_read_over_a_long_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window = 100

    def wider(self: LayerCache, window: Any) -> Any:
        return None if window is None else window._replace(size=window.size + 40)

    changes = {"sliding_window": window}
    assert (
        check_model(tiny_model("mistral", **changes), VOCAB_SIZE, gpu=Gpu.CUDA).mode
        is ExecutionMode.RAGGED
    )
    monkeypatch.setattr(self_check, "_shrunk_sizes", lambda *_: Changes())
    monkeypatch.setattr(LayerCache, "visible", wider)
    checked = check_model(tiny_model("mistral", **changes), VOCAB_SIZE, gpu=Gpu.CUDA)
    assert checked.mode is not ExecutionMode.RAGGED


@pytest.mark.parametrize(
    ("max_model_len", "is_checked"), [(MIN_TOKENS - 1, False), (MIN_TOKENS, True), (400, True)]
)
def test_a_long_context_is_no_longer_than_the_models(
    monkeypatch: pytest.MonkeyPatch, max_model_len: int, is_checked: bool
) -> None:
    asked: list[int] = []

    def watched(vocab_size: int, num_tokens: int, salt: int) -> list[int]:
        asked.append(num_tokens)
        return long_prompt(vocab_size, num_tokens, salt)

    monkeypatch.setattr(self_check, "long_prompt", watched)
    model = tiny_model("llama")
    checked = check_model(model, VOCAB_SIZE, gpu=Gpu.CUDA, max_model_len=max_model_len)
    assert checked.mode is ExecutionMode.RAGGED
    assert set(asked) == ({max_model_len} if is_checked else set())


def test_a_model_without_finite_logits_over_a_long_context_is_served_as_over_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    plain = type(model.model.norm)

    def call(self: nn.Module, x: mx.array) -> mx.array:
        normed: mx.array = plain.__call__(self, x)
        return normed * mx.nan if x.shape[1] > 100 else normed

    model.model.norm.__class__ = type("Damaged", (plain,), {"__call__": call})
    checked = check_model(model, VOCAB_SIZE, gpu=Gpu.CUDA)
    assert (checked.mode, checked.reason) == (ExecutionMode.RAGGED, "")


def test_a_model_on_its_own_caches_is_not_checked_again() -> None:
    model = tiny_model("llama")
    insist_on_own_caches(model)
    checked = check_model(model, VOCAB_SIZE, gpu=Gpu.METAL)
    assert checked.mode is ExecutionMode.OWN
    assert "a batch changes its logits" in checked.reason


def test_the_steps_reach_what_they_are_made_for() -> None:
    """Decodes of 256 keys and more: alone in a run that is not the first, alone elsewhere, together."""
    prompt = long_prompt(VOCAB_SIZE, MAX_TOKENS, 0)
    kinds: set[tuple[int, bool, bool]] = set()
    last_rows: list[tuple[int, int]] = []
    for plan in LONG.plans([prompt, prompt], window=None):
        decodes = [s for s in plan.slices if len(s) == 1]
        lengths = {s.stop for s in decodes}
        is_run = all(len(s.blocks.runs) == 1 for s in decodes)
        if decodes and min(lengths) > 256:
            kinds.add((len(decodes), is_run, len(lengths) == 1))
        for s in plan.slices:
            assert s.num_samples
            assert s.blocks.runs[0].first_block > 0
            last_rows.append((s.sequence_id, s.stop))
    assert kinds == {(1, True, True), (1, False, True), (2, False, True), (2, False, False)}
    assert len(last_rows) == len(set(last_rows)) == 17
    assert LONG.num_blocks * 4 % 256 == 0
    assert -(-MAX_TOKENS // 4) * 4 % 256 == 0
