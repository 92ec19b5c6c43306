"""Recurrences by the native kernels are those of mlx-lm, and a request's bits depend on no other."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from mlx_lm.models import gated_delta, ssm
from mlx_lm.models.gated_delta import gated_delta_ops as mlx_gated_delta_ops
from mlx_lm.models.ssm import ssm_attn as mlx_ssm_attn

from batching.backend.hooks.changes import Changes, running
from batching.backend.platforms.cpu.layers.recurrent import (
    Conv1d,
    rebind_recurrences,
    replace_convolution,
)
from batching.backend.platforms.cpu.native_loader import Native

EXAMPLES: Final = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Of the largest number.
TOLERANCE: Final = 1e-5

Arrays = tuple[mx.array, ...]


@pytest.fixture
def kernels(native: Native) -> Any:
    return native.module


def normal(rng: np.random.Generator, *shape: int) -> mx.array:
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def check(actual: Arrays, expected: Arrays) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        # Where terms cancel out, the rounding is theirs.
        assert float(mx.abs(a - e).max()) <= TOLERANCE * max(1e-3, float(mx.abs(e).max()))


def check_same(actual: Arrays, expected: Arrays) -> None:
    assert all(mx.array_equal(a, e) for a, e in zip(actual, expected, strict=True))


# The gated delta rule


def mlx_delta_rule(*inputs: Any) -> Arrays:
    """Return what MLX's own operations compute."""
    return mlx_gated_delta_ops(*inputs)


def delta_inputs(
    rng: np.random.Generator,
    requests: int,
    tokens: int,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (32, 40),
    *,
    has_channels: bool = False,
    decay: tuple[float, float] = (0, 1),
) -> list[mx.array]:
    """Return q, k, v, decay, beta and a state, keys of a length of one as models make them."""
    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    q, k = (normal(rng, requests, tokens, key_heads, key_dim) for _ in range(2))
    q, k = gated_delta.normalize_qk(q, k, inv_scale=key_dim**-0.5, eps=1e-6)
    gates = (requests, tokens, value_heads)
    decays = rng.uniform(*decay, (*gates, key_dim) if has_channels else gates)
    return [
        q,
        k,
        normal(rng, requests, tokens, value_heads, value_dim),
        mx.array(decays.astype(np.float32)),
        mx.array(rng.uniform(0, 1, gates).astype(np.float32)),
        normal(rng, requests, value_heads, value_dim, key_dim),
    ]


@EXAMPLES
@given(
    requests=st.integers(1, 3),
    tokens=st.integers(1, 30),
    key_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 140), st.integers(1, 70)),
    has_channels=st.booleans(),
    has_state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gated_delta_rule(
    kernels: Any,
    requests: int,
    tokens: int,
    key_heads: int,
    group: int,
    dims: tuple[int, int],
    has_channels: bool,
    has_state: bool,
    seed: int,
) -> None:
    heads = (key_heads, key_heads * group)
    rng = np.random.default_rng(seed)
    *inputs, state = delta_inputs(rng, requests, tokens, heads, dims, has_channels=has_channels)
    before = state if has_state else None
    check(kernels.delta_rule(*inputs, before), mlx_delta_rule(*inputs, before))


@pytest.mark.parametrize("decay", [(0, 1e-6), (0.999999, 1), (0, 0), (1, 1), (0, 1)])
@pytest.mark.parametrize("has_channels", [False, True])
def test_gated_delta_rule_of_many_tokens(
    kernels: Any, decay: tuple[float, float], has_channels: bool
) -> None:
    rng = np.random.default_rng(1)
    inputs = delta_inputs(rng, 2, 500, decay=decay, has_channels=has_channels)
    check(kernels.delta_rule(*inputs), mlx_delta_rule(*inputs))


@pytest.mark.parametrize("dims", [(128, 128), (96, 37), (20, 5)])
def test_a_request_does_not_depend_on_its_batch_nor_on_how_its_tokens_are_cut(
    native: Native, dims: tuple[int, int]
) -> None:
    delta_rule = native.module.delta_rule
    *inputs, states = delta_inputs(np.random.default_rng(2), 3, 40, dims=dims)
    kept = mx.array(np.array(states))
    y, new_states = delta_rule(*inputs, states)
    try:
        native.module.set_num_threads(1)
        for request in range(3):
            alone = [a[request : request + 1] for a in inputs]
            state, parts = states[request : request + 1], []
            for cut in (slice(0, 1), slice(1, 20), slice(20, 40)):
                part, state = delta_rule(*(a[:, cut] for a in alone), state)
                parts.append(part)
            expected = (y[request : request + 1], new_states[request : request + 1])
            check_same((mx.concatenate(parts, axis=1), state), expected)
    finally:
        native.module.set_num_threads(native.num_threads)
    assert mx.array_equal(states, kept), "a state is never changed in place"


def test_inputs_need_not_be_contiguous(kernels: Any) -> None:
    q, k, v, decay, beta, state = delta_inputs(np.random.default_rng(3), 2, 7, (3, 3), (16, 16))
    joined = mx.concatenate([q, k, v], axis=-1)
    q_view, k_view, v_view = mx.split(joined, 3, axis=-1)
    check_same(
        kernels.delta_rule(q_view, k_view, v_view, decay, beta, state),
        kernels.delta_rule(q, k, v, decay, beta, state),
    )


@pytest.fixture
def in_a_model(kernels: Any) -> Iterator[None]:
    """Call functions of mlx-lm as a model on the kernels does."""
    model, changes = nn.Sequential(), Changes()
    rebind_recurrences(model, kernels, changes)
    with running(model):
        yield
    changes.undo()


@pytest.fixture
def update(in_a_model: None) -> Callable[..., tuple[mx.array, mx.array]]:
    return gated_delta.gated_delta_update


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_models_compute_the_gated_delta_rule_by_the_kernel(
    kernels: Any, update: Callable[..., Any], lower_bound: float | None
) -> None:
    rng = np.random.default_rng(4)
    q, k, v, *_, state = delta_inputs(rng, 2, 9)
    a, b, a_log, bias = (normal(rng, *shape) for shape in ((2, 9, 4), (2, 9, 4), (4,), (4,)))
    if lower_bound is None:
        decay = gated_delta.compute_g(a_log, a, bias)
    else:
        decay = gated_delta.compute_lower_bound_g(a_log, a, bias, lower_bound)
    check_same(
        update(q, k, v, a, b, a_log, bias, state, lower_bound=lower_bound),
        kernels.delta_rule(q, k, v, decay, mx.sigmoid(b), state),
    )


@pytest.mark.parametrize("is_masked", [False, True])
def test_what_the_kernel_does_not_take_stays_mlx_lm_s(
    update: Callable[..., Any], is_masked: bool
) -> None:
    rng = np.random.default_rng(5)
    q, k, v, *_, state = delta_inputs(rng, 1, 6)
    a, b, a_log, bias = (normal(rng, *shape) for shape in ((1, 6, 4), (1, 6, 4), (4,), (4,)))
    mask = mx.arange(6)[None] < 4 if is_masked else None
    if not is_masked:
        q, k, v = (x.astype(mx.bfloat16) for x in (q, k, v))
    y, new_state = update(q, k, v, a, b, a_log, bias, state, mask)
    expected = mlx_delta_rule(
        q, k, v, gated_delta.compute_g(a_log, a, bias), mx.sigmoid(b), state, mask
    )
    assert y.dtype == q.dtype
    check_same((y, new_state), expected)


# Mamba 2


@pytest.fixture
def ssm_update(in_a_model: None) -> Callable[..., tuple[mx.array, mx.array]]:
    return ssm.ssm_update


def ssm_inputs(
    rng: np.random.Generator,
    requests: int,
    tokens: int,
    groups: int,
    heads: int,
    dims: tuple[int, int],
) -> dict[str, mx.array]:
    head_dim, state_dim = dims
    return {
        "hidden_states": normal(rng, requests, tokens, heads, head_dim),
        "A_log": normal(rng, heads),
        "B": normal(rng, requests, tokens, groups, state_dim),
        "C": normal(rng, requests, tokens, groups, state_dim),
        "D": normal(rng, heads),
        "dt": normal(rng, requests, tokens, heads),
        "dt_bias": normal(rng, heads),
        "state": normal(rng, requests, heads, head_dim, state_dim),
    }


def mlx_ssm(hidden_states: mx.array, **inputs: Any) -> Arrays:
    """Return what MLX's own operations compute."""
    return mlx_ssm_attn(hidden_states, **inputs)


@EXAMPLES
@given(
    requests=st.integers(1, 3),
    tokens=st.sampled_from([1, 2, 30, 300]),
    groups=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 140)),
    has_state=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_mamba_2(
    ssm_update: Callable[..., Any],
    requests: int,
    tokens: int,
    groups: int,
    group: int,
    dims: tuple[int, int],
    has_state: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    inputs = ssm_inputs(rng, requests, tokens, groups, groups * group, dims)
    if not has_state:
        del inputs["state"]
    check(ssm_update(**inputs), mlx_ssm(**inputs))


def test_mamba_2_does_not_depend_on_the_batch_nor_on_how_the_tokens_are_cut(
    ssm_update: Callable[..., Any],
) -> None:
    inputs = ssm_inputs(np.random.default_rng(8), 2, 20, 1, 4, (64, 128))
    y, new_state = ssm_update(**inputs)
    own = {n: a[1:] if a.ndim > 1 else a for n, a in inputs.items()}
    state, parts = own.pop("state"), []
    for cut in (slice(0, 1), slice(1, 13), slice(13, 20)):
        part = {n: a[:, cut] if a.ndim > 1 else a for n, a in own.items()}
        output, state = ssm_update(**part, state=state)
        parts.append(output)
    check_same((mx.concatenate(parts, axis=1), state), (y[1:], new_state[1:]))


@pytest.mark.parametrize("more", ["mask", "lengths", "a type"])
def test_what_the_kernel_does_not_take_of_mamba_2_stays_mlx_lm_s(
    ssm_update: Callable[..., Any], more: str
) -> None:
    inputs = ssm_inputs(np.random.default_rng(9), 1, 6, 1, 2, (8, 8))
    if more == "a type":
        inputs = {n: a.astype(mx.bfloat16) for n, a in inputs.items()}
    else:
        inputs[more] = mx.arange(6)[None] < 4 if more == "mask" else mx.array([4])
    y, state = ssm_update(**inputs)
    assert y.dtype == inputs["hidden_states"].dtype
    check_same((y, state), mlx_ssm(**inputs))


# Convolutions


def convolution(
    rng: np.random.Generator, channels: int, taps: int, *, has_bias: bool, groups: int | None = None
) -> nn.Conv1d:
    groups = channels if groups is None else groups
    conv = nn.Conv1d(channels, channels, taps, groups=groups, bias=has_bias)
    conv.update({name: normal(rng, *array.shape) for name, array in conv.items()})
    return conv


@EXAMPLES
@given(
    requests=st.integers(1, 3),
    tokens=st.integers(1, 20),
    channels=st.integers(1, 3000),
    taps=st.integers(1, 5),
    has_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_convolution(
    kernels: Any, requests: int, tokens: int, channels: int, taps: int, has_bias: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    conv = convolution(rng, channels, taps, has_bias=has_bias)
    x = normal(rng, requests, tokens + taps - 1, channels)
    expected = conv(x)
    replace_convolution(conv, kernels)
    assert type(conv) is Conv1d
    y = conv(x)
    check((y,), (expected,))
    last = conv(x[-1:, -taps:])
    assert mx.array_equal(last[0, 0], y[-1, -1])


def test_convolutions_of_another_kind_stay_mlx_s(kernels: Any) -> None:
    rng = np.random.default_rng(7)
    others: list[nn.Conv1d] = [
        convolution(rng, 8, 3, has_bias=True, groups=2),
        nn.Conv1d(8, 8, 3, groups=8, stride=2),
        nn.Conv1d(8, 8, 3, groups=8, padding=2),
        nn.Conv1d(8, 8, 3, groups=8, dilation=2),
        nn.Conv1d(8, 16, 3, groups=8),
    ]
    x = normal(rng, 1, 9, 8)
    for conv in others:
        expected = conv(x)
        replace_convolution(conv, kernels)
        assert mx.array_equal(conv(x), expected)


def test_wrong_shapes_are_rejected(kernels: Any) -> None:
    inputs = delta_inputs(np.random.default_rng(6), 1, 3)
    wrong = [mx.ones((1, 3, 2, 31)), mx.ones((1, 3, 2)), mx.ones((1, 3, 3, 40))]
    wrong += [mx.ones((1, 3, 4, 31)), mx.ones((1, 2, 4)), mx.ones((1, 4, 40, 31))]
    calls = [
        partial(kernels.delta_rule, *inputs[:i], other, *inputs[i + 1 :])
        for i, other in enumerate(wrong)
    ]
    x, taps = mx.ones((1, 5, 8)), mx.ones((3, 8))
    calls += [
        partial(kernels.convolve, x, mx.ones(8)),
        partial(kernels.convolve, x, mx.ones((3, 7))),
        partial(kernels.convolve, x, mx.ones((6, 8))),
        partial(kernels.convolve, x[0], taps),
        partial(kernels.convolve, x, taps, mx.ones(7)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            call()
