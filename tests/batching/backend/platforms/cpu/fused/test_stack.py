"""Which models' layers are one operation, and that it is the layers one by one, bit for bit."""

from collections.abc import Iterator
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import base

from batching.backend.mlx_runner import MLXRunner
from batching.backend.paged.kv_cache import PagedKVCache
from batching.backend.platforms.cpu.fused.blocks import replace_blocks
from batching.backend.platforms.cpu.fused.stack import LayerStack
from batching.backend.platforms.cpu.layers.replace import replace_modules
from batching.backend.platforms.cpu.model import use_kernels
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.self_check.check import check_model
from batching.backend.self_check.steps import BLOCK_SIZE, SHORT, probe_prompts
from batching.backend.self_check.verdict import CheckedModel, Way
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.model_zoo import ZOO, make_tiny
from tests.support.weekly import weekly, weekly_pairs

_NAMES: Final = """
    cohere2 deepseek deepseek_v2 deepseek_v3 deepseek_v3-direct dots1 ernie4_5 ernie4_5_moe exaone4
    exaone_moe gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt_oss granite
    granitemoe granitemoehybrid-dense helium hunyuan_v1_dense internlm3 kimi_k25 kimi_vl lfm2 lfm2-vl
    lfm2_moe llama mamba2 mellum mimo minicpm minicpm3 minimax mistral mixtral nemotron olmo2
    olmo3 olmoe phi phi3 pixtral qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next
    qwen3_vl qwen3_vl_moe seed_oss smollm3 solar_open starcoder2 telechat3 youtu_llm"""
STACKED: Final = _NAMES.split()


def stacks(model: nn.Module) -> list[LayerStack]:
    found = {id(m): vars(m)["_stack"] for m in model.modules() if "_stack" in vars(m)}
    return list({id(stack): stack for stack in found.values()}.values())


def is_one_operation(stack: LayerStack) -> bool:
    """Return whether the layers will be that in the next step."""
    return stack._stacking is not None


def make_plain(native: Native, name: str, **options: Any) -> nn.Module:
    """Return a model whose layers are operations of their own."""
    bits = 4 if options else None
    model = replace_modules(make_tiny(name, bits=bits), native, **options)
    replace_blocks(model, native)
    return model


def make_stacked(native: Native, name: str, **options: Any) -> nn.Module:
    bits = 4 if options else None
    return use_kernels(make_tiny(name, bits=bits), native, **options)


class Steps:
    """The steps of the check at load, on a pool of a model."""

    def __init__(self, model: nn.Module, native: Native, dtype: mx.Dtype | None = None) -> None:
        self.check: CheckedModel = check_model(model, VOCAB_SIZE, native, dtype)
        self._model = model
        self.cache = self.new_cache()

    def new_cache(self) -> PagedKVCache:
        windows = SHORT.num_window_blocks if self.check.layout.window else 0
        return self.check.cache(SHORT.num_blocks, BLOCK_SIZE, num_window_blocks=windows)

    def logits(self) -> Iterator[mx.array]:
        runner = MLXRunner(self._model, VOCAB_SIZE, self.check.selection, self.cache)
        for plan in SHORT.plans(probe_prompts(VOCAB_SIZE), self.check.layout.window):
            self.cache.copy_blocks(plan.copies)
            self.cache.copy_states(plan.state_copies)
            logits = runner.logits(self.cache.begin(plan.slices))
            self.cache.flush()
            # What is written is evaluated by itself first, as if no logits were needed.
            mx.eval(self.cache.arrays)
            yield logits


def same(steps: Steps, expected: list[mx.array]) -> bool:
    computed = list(steps.logits())
    return len(computed) == len(expected) and all(map(mx.array_equal, computed, expected))


@pytest.mark.parametrize("name", weekly(ZOO, 8))
def test_the_models_whose_layers_are_one_operation(native: Native, name: str) -> None:
    assert len(stacks(use_kernels(make_tiny(name), native))) == (name in STACKED)


@pytest.mark.parametrize("name", weekly(STACKED, 3))
def test_they_are_the_layers_bit_for_bit(native: Native, name: str) -> None:
    expected = list(Steps(make_plain(native, name), native).logits())
    model = make_stacked(native, name)
    steps = Steps(model, native)
    assert steps.check.way in (Way.RAGGED, Way.PIECES)
    assert same(steps, expected)
    (stack,) = stacks(model)
    assert is_one_operation(stack)


@pytest.mark.parametrize(
    ("name", "input_bits", "dtype"),
    weekly_pairs(
        ["deepseek_v3", "gemma3_text", "phi", "qwen3_5", "qwen3_moe"],
        [8, 16],
        [mx.float32, mx.bfloat16, mx.int8],
        size=3,
    ),
)
def test_in_any_precision(native: Native, name: str, input_bits: int, dtype: mx.Dtype) -> None:
    plain = make_plain(native, name, input_bits=input_bits)
    model = make_stacked(native, name, input_bits=input_bits)
    assert same(Steps(model, native, dtype), list(Steps(plain, native, dtype).logits()))
    assert is_one_operation(stacks(model)[0])


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_on_pools_in_turn_and_after_a_reset(native: Native, name: str) -> None:
    expected = list(Steps(make_plain(native, name), native).logits())
    model = make_stacked(native, name)
    steps, other = Steps(model, native), Steps(model, native)
    pairs = zip(steps.logits(), other.logits(), expected, strict=True)
    assert all(mx.array_equal(a, e) and mx.array_equal(b, e) for a, b, e in pairs)
    assert same(steps, expected)
    next(steps.logits())
    steps.cache.reset()
    assert same(steps, expected)
    assert is_one_operation(stacks(model)[0])


@pytest.mark.parametrize(("pattern", "is_stacked"), [("-M*-", False), ("M-*-", True)])
def test_on_one_pool_after_another_if_the_first_layer_keeps_nothing(
    native: Native, monkeypatch: pytest.MonkeyPatch, pattern: str, is_stacked: bool
) -> None:
    """What an MLP is called with does not tell which pool is used."""
    monkeypatch.setitem(ZOO["nemotron_h"], "hybrid_override_pattern", list(pattern))
    expected = list(Steps(make_plain(native, "nemotron_h"), native).logits())
    model = make_stacked(native, "nemotron_h")
    assert len(stacks(model)) == is_stacked
    steps, other = Steps(model, native), Steps(model, native)
    assert same(steps, expected)
    assert same(other, expected)


# Faults: the code of a model does more than call its layers one after the other.


class Trunk(nn.Module):
    """Calls its layers one after the other, and nothing else."""

    def __call__(self, inputs: mx.array, cache: Any, _: None = None) -> mx.array:
        output: mx.array = self.norm(self.through(self.embed_tokens(inputs), cache))
        return output

    def through(self, x: mx.array, cache: Any) -> mx.array:
        for index in range(len(self.layers)):
            x = self.layer(index, x, cache)
        return x

    def layer(self, index: int, x: mx.array, cache: Any, window: int | None = None) -> mx.array:
        mask = base.create_attention_mask(x, cache[index], window)
        output: mx.array = self.layers[index](x, mask, cache=cache[index])
        return output


class Between(Trunk):
    """Adds something to what its first layer returns."""

    added = 1.0

    def through(self, x: mx.array, cache: Any) -> mx.array:
        x = self.layer(0, x, cache)
        return self.layer(1, x + self.added if self.added else x, cache)


class ReadsMiddle(Trunk):
    """Adds the output of its first layer to that of the last one."""

    def through(self, x: mx.array, cache: Any) -> mx.array:
        x = self.layer(0, x, cache)
        return x + self.layer(1, x, cache)


class Twice(Trunk):
    def through(self, x: mx.array, cache: Any) -> mx.array:
        return super().through(super().through(x, cache), cache)


class Backwards(Trunk):
    def through(self, x: mx.array, cache: Any) -> mx.array:
        return self.layer(0, self.layer(1, x, cache), cache)


class LastWindow(Trunk):
    """Has a window in the last layer, if any."""

    window: int | None = None

    def through(self, x: mx.array, cache: Any) -> mx.array:
        return self.layer(1, self.layer(0, x, cache), cache, self.window)


def of_kind(kind: type[nn.Module]) -> nn.Module:
    model = make_tiny("llama")
    model.model.__class__ = kind
    return model


def plain_of_kind(native: Native, kind: type[nn.Module]) -> nn.Module:
    model = replace_modules(of_kind(kind), native)
    replace_blocks(model, native)
    return model


@pytest.mark.parametrize(
    ("kind", "is_stacked"),
    [
        *((Trunk, True), (LastWindow, True)),
        *((Between, False), (ReadsMiddle, False), (Twice, False), (Backwards, False)),
    ],
)
def test_layers_are_one_operation_if_a_model_only_calls_one_after_the_other(
    native: Native, kind: type[nn.Module], is_stacked: bool
) -> None:
    assert len(stacks(use_kernels(of_kind(kind), native))) == is_stacked


def test_a_model_that_begins_to_change_what_layers_return_fails_once(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Between, "added", 0.0)
    model = use_kernels(of_kind(Between), native)
    steps = Steps(model, native)
    running = steps.logits()
    next(running)
    assert is_one_operation(stacks(model)[0])
    monkeypatch.setattr(Between, "added", 1.0)
    with pytest.raises(RuntimeError, match="changes what a layer returns"):
        next(running)
    steps.cache.reset()
    assert same(steps, list(Steps(plain_of_kind(native, Between), native).logits()))


def test_a_layer_that_is_called_in_another_way_computes_that(
    native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = use_kernels(of_kind(LastWindow), native), plain_of_kind(native, LastWindow)
    pairs = zip(Steps(model, native).logits(), Steps(plain, native).logits(), strict=True)
    assert mx.array_equal(*next(pairs))
    assert is_one_operation(stacks(model)[0])
    monkeypatch.setattr(LastWindow, "window", 3)
    assert all(mx.array_equal(*pair) for pair in pairs)
    assert not is_one_operation(stacks(model)[0])
