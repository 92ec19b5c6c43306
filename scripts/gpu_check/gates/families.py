"""A small model of each family: its check at load, and batches against single requests."""

from typing import Final

import mlx.core as mx

from batching.backend.devices import default_gpu
from scripts.gpu_check.models import FAMILIES, Served, serve_tiny
from scripts.gpu_check.record import Options, Record
from scripts.gpu_check.serving import WITH_LOGPROBS, agreement, alone, answer, prompt
from scripts.make_model.tiny_configs import VOCAB_SIZE

# Of log probabilities; CUDA multiplies float32 with 10 bits of mantissa (TF32) unless it is told not to.
MARGINS: Final = {"float32": 0.03, "bfloat16": 0.25}
_DTYPES: Final = {"float32": mx.float32, "bfloat16": mx.bfloat16}
# Rounding may lead to other experts, so one answer in eight may leap.
_WITH_EXPERTS: Final = ("gpt_oss", "deepseek_v3", "qwen3_moe")
# From within a window to beyond the 256 keys for which GPUs have kernels of their own.
_LENGTHS: Final = (9, 23, 40, 61, 130, 255, 270, 300)
_QUICK_LENGTHS: Final = (9, 40)
_QUICK: Final = {
    ("qwen3", "float32"),
    ("qwen3", "bfloat16"),
    ("gemma3_text", "float32"),
    ("gpt_oss", "float32"),
    ("deepseek_v3", "float32"),
}


def run(options: Options, record: Record) -> None:
    record.table(
        *("family", "type", "served", "tokens equal", "largest logprob difference", "seconds", "")
    )
    for family in FAMILIES:
        for name in _DTYPES:
            left = record.seconds_left
            if left < 5:
                record.row(family, name, "skipped: no time left", "", "", "", "skipped")
            elif family in _WITH_EXPERTS and name != "float32" and default_gpu() is None:
                why = "skipped: MLX's products of experts are for float32 only on a CPU"
                record.row(family, name, why, "", "", "", "skipped")
            elif options.is_quick and (family, name) not in _QUICK:
                record.row(family, name, "skipped: quick", "", "", "", "skipped")
            else:
                _check(options, record, family, name)
                took = left - record.seconds_left
                record.rows[-1][5] = f"{took:.1f}"
    record.note(
        f"Margins: {MARGINS['float32']} in float32, {MARGINS['bfloat16']} in bfloat16, of log probabilities; one "
        "answer in eight may leave them where a model has experts."
    )


def _check(options: Options, record: Record, family: str, name: str) -> None:
    try:
        served = serve_tiny(family, _DTYPES[name])
    except Exception as error:
        failure = f"{family} in {name} cannot be served: {error}"
        record.row(family, name, "not", "", "", "", record.expect(False, failure))
        return
    compare_batch(options, record, served, family, name)


def compare_batch(options: Options, record: Record, served: Served, family: str, name: str) -> None:
    """Serve prompts of unlike lengths one by one and together, with and without queued steps."""
    lengths = _QUICK_LENGTHS if options.is_quick else _LENGTHS
    prompts = [prompt(i, length, VOCAB_SIZE) for i, length in enumerate(lengths)]
    max_tokens = 4 if options.is_quick else 24
    expected = alone(served.engine, prompts, max_tokens)
    together = agreement(
        expected, answer(served.engine, prompts, max_tokens, WITH_LOGPROBS), MARGINS[name]
    )
    queued = agreement(expected, answer(served.engine, prompts, max_tokens), MARGINS[name])
    num_may_leap = -(-len(prompts) // 8) if family in _WITH_EXPERTS else 0
    is_right = together.is_within(num_may_leap) and queued.is_within(num_may_leap)
    wrong = "; ".join(together.wrong + queued.wrong) or f"off by {together.difference:.3g}"
    way = "a slower way: " + "; ".join(served.warnings) if served.warnings else "as intended"
    verdict = record.expect(
        is_right and not served.warnings,
        f"{family} in {name}: {way if is_right else wrong}",
    )
    record.row(
        *(family, name, way, f"{together.share}, {queued.share}"),
        *(f"{together.difference:.2g}", "", verdict),
    )
