"""A mixture of experts as one operation is what the model's own code computes, row by row."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import qwen3_moe
from mlx_lm.models.switch_layers import SwitchGLU

from batching.backend.hooks.changes import Changes
from batching.backend.platforms.cpu.fused import mixture, routers
from batching.backend.platforms.cpu.fused.blocks import FusedBlock, replace_blocks
from batching.backend.platforms.cpu.fused.check import compare
from batching.backend.platforms.cpu.fused.mixture import MixtureHalf
from batching.backend.platforms.cpu.fused.parts import Norm, UnknownPart
from batching.backend.platforms.cpu.native_loader import Native
from tests.support.model_zoo import ZOO, make_tiny
from tests.support.platforms import replace_modules, use_kernels
from tests.support.weekly import weekly, weekly_pairs

GROUPS: Final = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}
MIXTURES: Final = [
    *("bailing_moe", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite"),
    *("gpt_oss", "granitemoe", "hunyuan", "lfm2_moe", "minimax", "mixtral", "olmoe", "qwen2_moe"),
    *("qwen3_5_moe", "qwen3_moe", "qwen3_next"),
]


def make(name: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Callable[..., nn.Module]:
    """Return what makes a tiny model with some of its configuration changed."""
    monkeypatch.setitem(ZOO, name, {**ZOO[name], **changes})
    return lambda **options: make_tiny(name, **options)


def mixtures(model: nn.Module) -> list[nn.Module]:
    def has_experts(module: nn.Module) -> bool:
        return any(isinstance(child, SwitchGLU) for child in module.children().values())

    return [module for module in model.modules() if has_experts(module)]


def halves(model: nn.Module) -> list[MixtureHalf]:
    """Return those that a model's blocks have, or that are by themselves."""
    fused = [vars(m).get("_fused") for m in model.modules()]
    parts = [path.mlp if isinstance(path, FusedBlock) else path for path in fused]
    return [part for part in parts if isinstance(part, MixtureHalf)]


def rows(num_rows: int, half: MixtureHalf) -> mx.array:
    rng = np.random.default_rng(1)
    return mx.array(2 * rng.standard_normal((num_rows, 1, half.size)), mx.float32)


CASES: Final = [
    *((name, {}) for name in MIXTURES),
    ("deepseek_v3", GROUPS),
    ("glm4_moe", {**GROUPS, "norm_topk_prob": False, "routed_scaling_factor": 2.5}),
    ("mixtral", {"num_local_experts": 37, "num_experts_per_tok": 5}),
    ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 8}),
    ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("lfm2_moe", {"use_expert_bias": False}),
]


@pytest.mark.parametrize(("name", "changes"), weekly(CASES, 8))
def test_mixtures_are_those_of_the_model(
    native: Native, name: str, changes: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(name, monkeypatch, **changes)
    plain, replaced = mixtures(model()), mixtures(replace_modules(model(), native))
    assert plain
    for own, ours in zip(plain, replaced, strict=True):
        half = MixtureHalf(native.module, ours)
        x = rows(30, half)
        expected = np.array(own(x))
        largest = float(np.abs(expected).max())
        np.testing.assert_allclose(np.array(half(x)), expected, 0, 1e-5 * largest)


@pytest.mark.parametrize(
    ("name", "input_bits"), weekly_pairs(["glm4_moe", "gpt_oss", "qwen2_moe"], [16, 32])
)
def test_a_row_does_not_depend_on_others(native: Native, name: str, input_bits: int) -> None:
    model = replace_modules(make_tiny(name, bits=4), native, input_bits=input_bits)
    half = MixtureHalf(native.module, mixtures(model)[0])
    x = rows(40, half)
    together = half(x)
    assert mx.array_equal(mx.concatenate([half(row[None]) for row in x]), together)
    assert mx.array_equal(mx.concatenate([half(x[:13]), half(x[13:])]), together)


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe", "qwen3_moe"])
def test_a_row_that_is_not_finite_stays_alone(native: Native, name: str) -> None:
    half = MixtureHalf(native.module, mixtures(replace_modules(make_tiny(name), native))[0])
    x = rows(3, half)
    expected = half(x)
    for value in (np.nan, np.inf):
        bad = mx.array(np.array(x))
        bad[1, 0, 3] = value
        outputs = half(bad)
        assert mx.array_equal(outputs[::2], expected[::2])
        assert not np.isfinite(np.array(outputs[1])).all()


# Faults: what is fused then computes something else.

Fault = Callable[[pytest.MonkeyPatch], None]


def no_correction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "floats_of", lambda array: [])


def other_router(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = routers.packed_layer

    def packed(kernels: Any, layer: Any) -> tuple[Any, list[float]]:
        weights, _ = plain(kernels, layer)
        return weights, [float(i) for i in range(weights.shape[0])]

    monkeypatch.setattr(routers, "packed_layer", packed)


def other_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = routers.packed_layer
    monkeypatch.setattr(mixture, "packed_layer", lambda *given: (plain(*given)[0], [1.0]))


def no_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture, "_SHARED", ())


def no_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "_FACTOR", ())


def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "_NUM_GROUPS", ())


def other_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "_EPSILONS", (0.0, 1e-5))


@pytest.mark.parametrize(
    ("case", "input_bits"),
    weekly_pairs(
        [
            ("deepseek_v3", no_correction),
            ("deepseek_v3", no_factor),
            ("deepseek_v3", no_groups),
            ("glm4_moe", no_correction),
            ("glm4_moe", no_shared),
            ("gpt_oss", other_router),
            ("lfm2_moe", other_epsilon),
            ("qwen2_moe", no_shared),
            ("qwen2_moe", other_gate),
            ("qwen3_moe", other_router),
            ("qwen3_next", other_gate),
        ],
        [16, 32],
    ),
)
def test_what_computes_something_else_is_not_fused(
    native: Native, case: tuple[str, Fault], input_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fault = case
    changes = {**GROUPS, "routed_scaling_factor": 2.5} if name == "deepseek_v3" else {}
    make_model = make(name, monkeypatch, **changes)
    assert halves(use_kernels(make_model(bits=4), native, input_bits=input_bits))
    model = replace_modules(make_model(bits=4), native, input_bits=input_bits)
    fault(monkeypatch)
    replace_blocks(model, native, Changes())
    assert not halves(model)


class OtherWeights(qwen3_moe.Qwen3MoeSparseMoeBlock):
    """Weighs by the squares of the scores."""

    def __call__(self, x: mx.array) -> mx.array:
        gates = mx.softmax(self.gate(x), axis=-1)
        indices = mx.argpartition(gates, kth=-self.top_k, axis=-1)[..., -self.top_k :]
        scores = mx.take_along_axis(gates, indices, axis=-1) ** 2
        outputs: mx.array = (self.switch_mlp(x, indices) * scores[..., None]).sum(axis=-2)
        return outputs


class Twice(qwen3_moe.Qwen3MoeSparseMoeBlock):
    """Gives the experts something else than the router."""

    def __call__(self, x: mx.array) -> mx.array:
        output: mx.array = super().__call__(mx.concatenate([2 * x[..., :1], x[..., 1:]], axis=-1))
        return output


@pytest.mark.parametrize("kind", [OtherWeights, Twice])
def test_mixtures_are_known_by_what_they_compute(native: Native, kind: type[nn.Module]) -> None:
    model = make_tiny("qwen3_moe")
    for module in mixtures(model):
        module.__class__ = kind
    assert not halves(use_kernels(model, native))


def test_other_parts_are_not_known(native: Native) -> None:
    model = replace_modules(make_tiny("qwen3_moe"), native)
    module = mixtures(model)[0]
    module.more = mx.ones(3)
    with pytest.raises(UnknownPart, match="more"):
        MixtureHalf(native.module, module)


def leaps_at(border: float) -> Callable[[mx.array], mx.array]:
    """Return a module that adds 1 to rows whose first number is at least the border."""
    return lambda x: x + (x[..., :1] >= border)


def test_only_rows_that_are_chosen_by_little_may_differ() -> None:
    seen: list[mx.array] = []

    def see(x: mx.array) -> mx.array:
        seen.append(x)
        return x

    compare(8, see, see)
    border = float(seen[0][4, 0, 0])
    assert compare(8, leaps_at(border), leaps_at(border + 1e-6)) == ()
    assert compare(8, leaps_at(border), leaps_at(border + 1e-3)) is None
    assert compare(8, leaps_at(border), lambda x: leaps_at(border)(x) * mx.nan) is None


def test_experts_of_left_out_groups_count_as_0(native: Native) -> None:
    kernels = native.module
    router = kernels.router(6, 2, True, [0.0, 0.0, 0.0, -2.0, 0.0, 0.0], 3, 1)
    # Of sums 0.54, 0.5 - 2 + 0.73 and 1.0, the last is the best.
    assert [index for index, _ in kernels.route(router, [-3, 0, 0, 1, 0, 0.1])] == [5, 4]
    # What is left of the best group is below 0, so that others count more.
    low = kernels.router(4, 2, True, [-0.1, -2.0, -3.0, -3.0], 2, 1)
    assert [index for index, _ in kernels.route(low, [1, 1, 1, 1])] == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "some of the experts"),
        ({"top_k": 0}, "some of the experts"),
        ({"correction": [0.0]}, "a correction for each"),
        ({"num_groups": 3, "top_groups": 2}, "groups of as many"),
        ({"num_groups": 4, "top_groups": 2}, "of two or more"),
        ({"num_groups": 2, "top_groups": 3}, "some of the groups"),
    ],
)
def test_a_router_that_does_not_fit_is_refused(
    native: Native, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        native.module.router(**{"num_experts": 4, "top_k": 2, "is_sigmoid": False, **options})


def test_parts_that_do_not_fit_are_refused(native: Native) -> None:
    kernels = native.module
    experts = kernels.gated_experts(
        *(kernels.expert_layer(kernels.pack(mx.ones((4, 16, 16)))) for _ in range(3))
    )
    router = kernels.router(4, 2, False)
    layers: dict[int, Any] = {n: (kernels.pack(mx.ones((n, 16))), []) for n in (1, 4, 5)}
    none: Norm = ([], 0.0, False, [])
    cases: list[tuple[Any, Any, Any]] = [
        (layers[5], [none, none], None),
        (layers[4], [([1.0], 0.0, False, []), none], None),
        (layers[4], [none], None),
        (layers[4], [none, none], layers[1]),
    ]
    for layer, norms, gate in cases:
        with pytest.raises(ValueError, match=r"\w+ \w+"):
            kernels.mixture(layer, router, experts, norms, None, gate)
    half = kernels.mixture(layers[4], router, experts, [none, none])
    with pytest.raises(ValueError, match="size"):
        kernels.run_mixture(mx.ones((1, 8)), half)
