"""The architectures of GGUF files in mlx-lm: names, values and changes of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import mlx.core as mx

from batching.backend.gguf.architecture import changes, names, values
from batching.backend.gguf.architecture.changes import Changes
from batching.backend.gguf.architecture.metadata import Config
from batching.backend.gguf.architecture.names import Names
from batching.backend.gguf.architecture.values import Values
from batching.backend.gguf.file.quantizations import Weight


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a file of one architecture becomes a model of mlx-lm.

    half: the type of its floats; float16, which the scales have, unless activations exceed it.
    exact: arrays that stay float32.
    join: what several tensors of the file are one tensor of.
    """

    model_type: str
    names: Names
    values: Values = field(default_factory=dict)
    changes: Changes = field(default_factory=dict)
    rope_scalings: frozenset[str] = frozenset({"linear", "yarn"})
    rotates_a_part: bool = False
    prefix: str = ""
    half: mx.Dtype = mx.float16
    exact: frozenset[str] = frozenset()
    join: Callable[[dict[str, Weight], Config], None] | None = None


_QWEN3_5: Final = names.ATTENTION | names.MLP | names.DELTA_NET
_EXACT_DELTA_NET: Final = frozenset({"linear_attn.A_log"})
# Activations exceed float16: residuals of Gemma 3 270M reach 103,795, and cut off at 65,504 its distributions are
# ten times as far from float32's as with activations and scales of bfloat16 (mean KL 0.014, 0.0014).  vLLM refuses
# float16 for Gemma 3 and GLM-4, too.
_TRAINED_IN_BFLOAT16: Final = mx.bfloat16

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("llama", names.ATTENTION | names.MLP, changes=changes.OF_ROTATED_PAIRS),
    "qwen2": Architecture("qwen2", names.ATTENTION | names.MLP),
    "qwen3": Architecture("qwen3", names.ATTENTION | names.MLP),
    "qwen3moe": Architecture("qwen3_moe", names.ATTENTION | names.MLP | names.EXPERTS, values.MOE),
    "gemma3": Architecture(
        "gemma3_text",
        names.ATTENTION | names.MLP | names.GEMMA,
        values.GEMMA3,
        changes.OF_GEMMA,
        half=_TRAINED_IN_BFLOAT16,
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        names.ATTENTION | names.GPT_OSS,
        values.GPT_OSS,
        half=_TRAINED_IN_BFLOAT16,
    ),
    "qwen35": Architecture(
        "qwen3_5",
        _QWEN3_5,
        values.QWEN3_5,
        changes.OF_DELTA_NET | changes.OF_GROUPED_HEADS,
        frozenset(),
        rotates_a_part=True,
        prefix="language_model.",
        exact=_EXACT_DELTA_NET,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe",
        _QWEN3_5 | names.EXPERTS | names.SHARED_EXPERT,
        values.QWEN3_5 | values.MOE | values.SHARED_EXPERT,
        changes.OF_DELTA_NET | changes.OF_GROUPED_HEADS | changes.OF_SHARED_EXPERT,
        frozenset(),
        rotates_a_part=True,
        prefix="language_model.",
        exact=_EXACT_DELTA_NET,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        _QWEN3_5 | names.EXPERTS | names.SHARED_EXPERT,
        values.DELTA_NET | values.MOE | values.SHARED_EXPERT,
        changes.OF_DELTA_NET | changes.OF_SHARED_EXPERT,
        rotates_a_part=True,
        exact=_EXACT_DELTA_NET,
        join=changes.join_qkvz,
    ),
    "lfm2": Architecture(
        "lfm2",
        names.ATTENTION | names.LFM2 | names.LFM2_MLP,
        values.LFM2,
        changes.OF_LFM2,
        frozenset(),
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        names.ATTENTION | names.LFM2 | names.LFM2_EXPERTS,
        values.LFM2_MOE,
        changes.OF_LFM2,
        frozenset(),
        exact=frozenset({"feed_forward.expert_bias"}),
    ),
    "phi3": Architecture(
        "phi3",
        names.ATTENTION | names.MLP | names.FUSED,
        rope_scalings=frozenset({"linear", "longrope"}),
        rotates_a_part=True,
    ),
    "granite": Architecture(
        "granite", names.ATTENTION | names.MLP, values.GRANITE, changes.OF_ROTATED_PAIRS
    ),
    "glm4": Architecture(
        "glm4",
        names.ATTENTION | names.MLP | names.GLM4,
        values.GLM4,
        changes.OF_GLM4,
        rope_scalings=frozenset(),
        rotates_a_part=True,
        half=_TRAINED_IN_BFLOAT16,
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        names.ATTENTION | names.MLP | names.EXPERTS | names.LATENT_ATTENTION,
        values.LATENT,
        rotates_a_part=True,
        join=changes.join_latent,
        exact=frozenset({"mlp.gate.e_score_correction_bias"}),
    ),
}
