"""All gates and benches, in the order in which they run."""

from dataclasses import dataclass
from typing import Final


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


def _check(name: str, title: str, function: str, seconds: float) -> Check:
    is_bench = function.startswith("speed:")
    module = function if is_bench else f"gates.{function}"
    return Check(name, title, f"scripts.gpu_check.{module}", seconds, is_bench)


CHECKS: Final = (
    _check("kernels", "Kernels over scattered block tables", "kernels:run_scattered", 90),
    _check("order", "Order of writes and reads in queued steps", "kernels:run_order", 60),
    _check("families", "Model families", "families:run", 240),
    _check("invariance", "Invariance in bfloat16", "invariance:run", 90),
    _check("adapters", "Adapters of unlike requests", "adapters:run", 120),
    _check("recovery", "Failed steps and recovery", "recovery:run", 60),
    _check("4bit", "Qwen3-4B shape in 4 bits", "speed:run_4bit", 400),
    _check("bf16", "Qwen3-4B shape in bfloat16", "speed:run_bf16", 400),
)
