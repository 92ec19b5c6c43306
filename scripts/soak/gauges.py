"""The gauges that a server reports at `/metrics`."""

import re
from collections.abc import Mapping
from typing import Final

from scripts.server_process import Address
from scripts.soak.client import get

_SAMPLE: Final = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)

# What is 0 when no request is in flight.
HELD: Final = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)


def parse(text: str) -> Mapping[str, float]:
    """Return the sum over all labels of each sample's name."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return sums


async def metrics_text(address: Address) -> str:
    outcome = await get(address, "/metrics")
    assert outcome.status == 200, outcome
    return str(outcome.body, "utf-8")


async def gauges(address: Address) -> Mapping[str, float]:
    return parse(await metrics_text(address))


async def held(address: Address) -> dict[str, float]:
    """Return what requests hold; a name that is not reported is an error."""
    values = await gauges(address)
    return {name: values[name] for name in HELD}
