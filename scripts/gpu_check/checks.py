"""All gates and benches, in the order in which they run."""

from dataclasses import dataclass
from typing import Final

_PACKAGE: Final = "scripts.gpu_check"


@dataclass(frozen=True, slots=True)
class Check:
    """A gate or a bench.

    function: `module:name`, called with `Options` and a `Record`.
    seconds: what it may take; all of them together are 25 minutes at most.
    """

    name: str
    title: str
    function: str
    seconds: float
    is_bench: bool = False


def _gate(name: str, title: str, function: str, seconds: float) -> Check:
    return Check(name, title, f"{_PACKAGE}.gates.{function}", seconds)


def _bench(name: str, title: str, function: str, seconds: float) -> Check:
    return Check(name, title, f"{_PACKAGE}.benches.{function}", seconds, is_bench=True)


CHECKS: Final = (
    _gate("attention", "Attention over views of a pool", "attention:run", 60),
    _gate("products", "Quantized products of rows of length 1", "products:run", 60),
    _gate("kernels", "Kernels over scattered block tables", "kernels:run_scattered", 90),
    _gate("order", "Order of writes and reads in queued steps", "kernels:run_order", 60),
    _gate("families", "Model families", "families:run", 240),
    _gate("invariance", "Invariance in bfloat16", "invariance:run", 90),
    _gate("recovery", "Failed steps and recovery", "recovery:run", 60),
    _bench("roofs", "Roofs", "roofs:run", 45),
    _bench("steps-4bit", "Qwen3-4B shape in 4 bits", "steps:run_4bit", 270),
    _bench("mlx-lm-4bit", "mlx-lm itself, 4 bits", "mlx_lm:run_4bit", 120),
    _bench("steps-bf16", "Qwen3-4B shape in bfloat16", "steps:run_bf16", 240),
    _bench("mlx-lm-bf16", "mlx-lm itself, bfloat16", "mlx_lm:run_bf16", 120),
)
