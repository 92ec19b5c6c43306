"""Which blocks of which models are fused, and that nothing is that computes something else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import gemma, llama

from batching.backend.frequencies import Frequencies
from batching.backend.hooks.changes import Changes
from batching.backend.paged.mlx_attention import SlidingWindow
from batching.backend.platforms.cpu.fused import blocks, halves, latent
from batching.backend.platforms.cpu.fused.blocks import FusedBlock, replace_blocks
from batching.backend.platforms.cpu.fused.halves import AttentionHalf, MlpHalf
from batching.backend.platforms.cpu.fused.latent import LatentHalf
from batching.backend.platforms.cpu.fused.parts import Around, OfRows, norm_of
from batching.backend.platforms.cpu.fused.recurrent import RecurrentHalf
from batching.backend.platforms.cpu.layers import rotary
from batching.backend.platforms.cpu.layers.norms import RMSNorm
from batching.backend.platforms.cpu.layers.rotary import RoPE
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.pools.cache import NativeLayerCache
from batching.backend.runner.mlx_runner import MLXRunner
from batching.block_manager import BlockTable
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.model_zoo import ZOO, make_tiny
from tests.support.platforms import check_model, replace_modules, use_kernels
from tests.support.requests import make_request, slice_of
from tests.support.weekly import weekly, weekly_pairs

# What is one operation in the layers of a model.  "block": attention, and the MLP or the mixture of
# experts, with norms and residuals.  "attention": this half of a block, the rest being the model's.
# "lone ...": such modules by themselves.
PATHS: Final = {
    ("block",): """
        cohere2 deepseek deepseek_v2 deepseek_v3 deepseek_v3-direct dots1 ernie4_5 ernie4_5_moe
        exaone4 exaone_moe gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt_oss
        granite granitemoe granitemoehybrid-dense helium hunyuan_v1_dense internlm3 kimi_k25 kimi_vl lfm2 lfm2-vl lfm2_moe llama mellum mimo
        minicpm minicpm3 minimax ministral3 mistral mistral3 mixtral nanbeige nemotron olmo2 olmo3
        olmoe phi phi3 pixtral qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe
        qwen3_next qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open starcoder2 telechat3
        youtu_llm""",
    ("block", "lone MLP"): """
        gear olmo_hybrid prism_hadamard_qwen35""",
    ("block", "lone MLP", "lone mixture"): """
        bailing_hybrid""",
    ("lone MLP", "lone attention"): """
        gemma3n gemma4 gemma4-shared gemma4_text longcat_flash longcat_flash_ngram""",
    ("lone MLP", "lone attention", "lone recurrence"): """
        falcon_h1 nemotron_h nemotron_h-latent""",
    ("lone MLP", "lone attention", "lone mixture", "lone recurrence"): """
        granitemoehybrid""",
    ("lone recurrence",): """
        mamba2""",
    ("attention", "lone MLP"): """
        kimi_linear kimi_linear-nope""",
    (): """
        dbrx deepseek_v41 gpt_neox kimi_k3 lille-130m mamba minimax_m3_vl phi3small
        phixtral qwen rwkv7 talkie""",
    ("lone MLP", "lone mixture"): """
        bailing_moe bailing_moe_linear bailing_moe_v3 deepseek_v32 glm_moe_dsa mimo_v2_flash""",
    ("lone MLP",): """
        afm7 afmoe baichuan_m1 cohere gpt2 gpt_bigcode internlm2 internlm2-dynamic iquestloopcoder
        laguna llama4 llama4_text muse_glimmer nanochat plamo plamo2 plamo3 recurrent_gemma
        spark2_5 stablelm step3p5""",
    ("lone MLP", "lone attention", "lone mixture"): """
        jamba""",
    ("attention",): """
        apertus phimoe""",
    ("lone attention",): """
        exaone gptj openelm""",
    ("attention", "block", "lone MLP"): """
        Klear mistral4 nemotron-nas""",
    ("lone mixture",): """
        hunyuan""",
}
PATHS_OF: Final = {name: paths for paths, names in PATHS.items() for name in names.split()}
LLAMA_3: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def paths(model: nn.Module) -> tuple[str, ...]:
    """Return the kinds of operations that a model's layers have."""
    fused = {id(m): vars(m)["_fused"] for m in model.modules() if "_fused" in vars(m)}
    blocks = [m for m in model.modules() if isinstance(fused.get(id(m)), FusedBlock)]
    for block in blocks:
        for child in block.children().values():
            fused.pop(id(child), None)
    return tuple(sorted({_name(path) for path in fused.values()}))


def _name(path: object) -> str:
    if isinstance(path, FusedBlock):
        return "block" if path.is_whole else "attention"
    names = {
        AttentionHalf: "lone attention",
        LatentHalf: "lone attention",
        RecurrentHalf: "lone recurrence",
        MlpHalf: "lone MLP",
    }
    return names.get(type(path), "lone mixture")


@pytest.mark.parametrize("name", weekly(ZOO, 12))
def test_the_fused_paths_of_each_model_type(native: Native, name: str) -> None:
    assert paths(use_kernels(make_tiny(name), native)) == PATHS_OF[name]


@pytest.mark.parametrize(
    "name",
    weekly(
        [
            *("deepseek_v3", "gemma3_text", "gpt_oss", "llama", "minicpm", "minicpm3"),
            *("ministral3", "phi", "phi3", "qwen2_moe"),
        ],
        4,
    ),
)
def test_they_are_the_same_with_rounded_inputs(native: Native, name: str) -> None:
    model = use_kernels(make_tiny(name, bits=4), native, input_bits=16)
    assert paths(model) == PATHS_OF[name]


def logits(model: nn.Module, native: Native) -> mx.array:
    """Return those of two prompts in one step."""
    check = check_model(model, VOCAB_SIZE, native)
    cache = check.cache(24, 4, num_window_blocks=24 if check.layout.window else 0)
    runner = MLXRunner(model, VOCAB_SIZE, check.selection, cache)
    prompts = [[(7 * i + size) % VOCAB_SIZE for i in range(size)] for size in (41, 14)]
    requests = [make_request(i, prompt, max_tokens=1) for i, prompt in enumerate(prompts)]
    for request, first in zip(requests, (0, 12), strict=True):
        request.state_slot = first
        request.block_table = request.window_table = BlockTable(list(range(first, first + 11)))
    step = cache.begin([slice_of(r, 0, r.num_tokens) for r in requests])
    return runner.logits(step)


@pytest.mark.parametrize(
    "name",
    weekly(
        [
            *("exaone4", "gemma2", "gemma3_text", "glm4", "granite"),
            *("hunyuan_v1_dense", "lfm2", "llama", "minicpm3", "ministral3", "mistral"),
            *("olmo2", "olmo3", "phi3", "qwen2", "qwen3", "smollm3", "youtu_llm"),
        ],
        3,
        always=["llama"],
    ),
)
def test_a_fused_block_is_its_modules_bit_for_bit(native: Native, name: str) -> None:
    model, unfused = make_tiny(name), replace_modules(make_tiny(name), native)
    expected = logits(unfused, native)
    assert mx.array_equal(logits(use_kernels(model, native), native), expected)


@pytest.mark.parametrize(
    "name",
    weekly(
        [
            *("cohere2", "deepseek_v3", "falcon_h1", "gemma", "gemma4_text", "granitemoehybrid"),
            *(
                "kimi_vl",
                "mamba2",
                "mistral4",
                "nemotron",
                "nemotron_h",
                "phi",
                "qwen3_5",
                "starcoder2",
            ),
        ],
        2,
        always=["deepseek_v3"],
    ),
)
def test_a_fused_block_is_its_modules_but_for_rounding(native: Native, name: str) -> None:
    """Blocks with another order of sums, or with an activation that MLX computes otherwise."""
    expected = logits(replace_modules(make_tiny(name), native), native)
    computed = logits(use_kernels(make_tiny(name), native), native)
    assert mx.allclose(computed, expected, rtol=0, atol=1e-5 * float(mx.abs(expected).max()))


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        LLAMA_3,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "longrope",
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + i / 4 for i in range(16)],
        },
    ],
)
def test_with_any_table_of_frequencies(
    native: Native, scaling: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ZOO, "llama", {**ZOO["llama"], "rope_scaling": scaling})
    plain, model = make_tiny("llama"), use_kernels(make_tiny("llama"), native)
    assert paths(model) == ("block",)
    expected = plain(mx.array([[(7 * i + 14) % VOCAB_SIZE for i in range(14)]]))[0, -1]
    assert mx.allclose(logits(model, native)[-1], expected, rtol=0, atol=1e-4)


# Faults: what is fused then computes something else.


def without_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = norm_of

    def norm(module: nn.Module | None, size: int) -> tuple[Any, ...]:
        weight, *rest = plain(module, size)
        return [value - 1 for value in weight], *rest

    monkeypatch.setattr(halves, "norm_of", norm)


def no_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "RoPE", type(None))


def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: NativeLayerCache, run: Callable[..., mx.array], mask: object) -> mx.array:
        return run(self.pool, self._native_step(), SlidingWindow(0))

    monkeypatch.setattr(NativeLayerCache, "run_attention", run)


def other_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_SCALE", ("head_dim",))


def no_soft_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "soft_cap", lambda module: 0.0)


def no_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        halves, "floats_of", lambda array: [] if array is None else [0.0] * array.size
    )


def norms_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "_LATE_NORM", "")


def no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfRows, "factors", None)


def one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MlpHalf, "__call__", lambda self, x, residual=None: self._plain(residual))
    monkeypatch.setattr(
        MlpHalf, "_plain", lambda self, x: self._kernels.run_mlp(x, self.half), raising=False
    )


def not_centered(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = norm_of

    def norm(module: nn.Module | None, size: int) -> tuple[Any, ...]:
        weight, eps, _, bias = plain(module, size)
        return weight, eps, False, bias

    monkeypatch.setattr(halves, "norm_of", norm)


def no_rotated_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent, "RoPE", type(None))


def other_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_DEPTH", ())


Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    ("case", "input_bits"),
    weekly_pairs(
        [
            ("gemma3_text", without_offset),
            ("olmo2", without_offset),
            ("llama", no_rotation),
            ("phi3", no_rotation),
            ("llama", no_window),
            ("gemma3_text", other_scale),
            ("gemma2", no_soft_cap),
            ("gpt_oss", no_sinks),
            ("hunyuan_v1_dense", norms_first),
            ("ministral3", no_factors),
            ("mistral4", no_factors),
            ("glm4_moe_lite", no_rotated_latents),
            ("deepseek_v3", no_rotated_latents),
            ("minicpm3", no_rotated_latents),
        ],
        [16, 32],
    ),
)
def test_what_computes_something_else_is_not_fused(
    native: Native, case: tuple[str, Fault], input_bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, fault = case
    model = replace_modules(make_tiny(name, bits=4), native, input_bits=input_bits)
    fault(monkeypatch)
    replace_blocks(model, native, Changes())
    assert set(paths(model)) <= {"lone MLP", "lone mixture"}


@pytest.mark.parametrize("input_bits", [16, 32])
@pytest.mark.parametrize(
    ("name", "fault", "expected"),
    [
        ("phi", not_centered, ("lone MLP", "lone attention")),
        ("phi", one_after_the_other, ("attention",)),
        ("minicpm", other_residual, ("lone MLP", "lone attention")),
    ],
)
def test_a_block_that_computes_something_else_is_fused_in_parts(
    native: Native,
    name: str,
    fault: Fault,
    expected: tuple[str, ...],
    input_bits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = replace_modules(make_tiny(name, bits=4), native, input_bits=input_bits)
    fault(monkeypatch)
    replace_blocks(model, native, Changes())
    assert paths(model) == expected


def half_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = blocks._one_half

    def halved(module: nn.Module) -> tuple[nn.Module, Around]:
        half, around = plain(module)
        return half, replace(around, residual=around.residual / 2)

    monkeypatch.setattr(blocks, "_one_half", halved)


@pytest.mark.parametrize(("fault", "is_fused"), [(None, True), (half_the_residual, False)])
def test_a_block_of_one_half_is_one_operation(
    native: Native, fault: Fault | None, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace_modules(make_tiny("nemotron_h"), native)
    if fault:
        fault(monkeypatch)
    replace_blocks(nn.Sequential(*model.layers[:3]), native, Changes())
    kinds = [type(vars(block).get("_fused")) for block in model.layers[:3]]
    assert kinds == ([RecurrentHalf, MlpHalf, AttentionHalf] if is_fused else [type(None)] * 3)


def test_a_rotary_embedding_with_another_table_is_not_replaced(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Frequencies(1 / np.arange(1.0, 17.0))
    monkeypatch.setattr(rotary, "frequencies_of", lambda module: other)
    model = use_kernels(make_tiny("llama"), native)
    assert not any(isinstance(module, RoPE) for module in model.modules())
    assert paths(model) == ("lone MLP",)


class OffsetNorm(nn.Module):
    """Scales by another number more than its weights."""

    offset = 1.0

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weight = mx.linspace(0, 1, 48)
        self.eps = 1e-6

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.offset + self.weight, self.eps)


class OtherOffsetNorm(OffsetNorm):
    offset = 2.0


@pytest.mark.parametrize(("kind", "is_known"), [(OffsetNorm, True), (OtherOffsetNorm, False)])
def test_norms_are_known_by_what_they_compute(
    native: Native, kind: type[OffsetNorm], is_known: bool
) -> None:
    model, x = nn.Sequential(kind()), mx.random.normal((5, 48))
    expected = model(x)
    replaced = replace_modules(model, native)
    assert isinstance(replaced.layers[0], RMSNorm) == is_known
    assert mx.allclose(replaced(x), expected, rtol=1e-5, atol=1e-6)


class LimitedMlp(llama.MLP):
    """Bounds the gate, further out than random numbers are."""

    def __call__(self, x: mx.array) -> mx.array:
        gate = mx.minimum(self.gate_proj(x), 100)
        output: mx.array = self.down_proj(nn.silu(gate) * self.up_proj(x))
        return output


@pytest.mark.parametrize(
    ("kind", "expected"), [(llama.MLP, ("lone MLP",)), (LimitedMlp, ()), (gemma.MLP, ("lone MLP",))]
)
def test_mlps_are_known_by_what_they_compute(
    native: Native, kind: type[nn.Module], expected: tuple[str, ...]
) -> None:
    model = make_tiny("llama")
    layer = model.layers[0]
    layer.mlp.__class__ = kind
    assert paths(use_kernels(nn.Sequential(layer.mlp), native)) == expected
