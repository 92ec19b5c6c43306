"""Loads the bundled model in this process and lets it generate some tokens."""

import asyncio
import threading
from time import monotonic
from typing import Final

from app.commands.health.finding import Finding, bad, note, ok
from batching import (
    BUNDLED_MODEL,
    HOW_TO_BUNDLE,
    AsyncEngine,
    EngineConfig,
    SamplingParams,
    SchedulerManager,
    SequenceSpec,
    bundled_file,
)

_NAME: Final = "self-test"
_PROMPT: Final = "The capital of France is"
_NUM_TOKENS: Final = 8
# It takes five; a machine that swaps takes any time.
_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 5.0
_NUM_BLOCKS: Final = 64


def self_test(config: EngineConfig, seconds: float = _SECONDS) -> Finding:
    """Load and generate, within some seconds.

    config: the device and the kernels are taken from it.
    """
    if bundled_file() is None:
        return note(_NAME, f"the bundled model is not installed: {HOW_TO_BUNDLE}")
    findings: list[Finding] = []
    manager = SchedulerManager([_config(config)])
    # Nothing waits for it where it hangs.
    thread = threading.Thread(target=lambda: findings.append(_try(manager)), daemon=True)
    thread.start()
    thread.join(seconds)
    if findings:
        return findings[0]
    return bad(_NAME, f"no answer after {seconds:.0f} s: end other programs, and try again")


def _config(config: EngineConfig) -> EngineConfig:
    return EngineConfig(
        model=BUNDLED_MODEL,
        model_id=BUNDLED_MODEL,
        num_blocks=_NUM_BLOCKS,
        device=config.device,
        native=config.native,
        gpu_kernels=config.gpu_kernels,
        cpu_threads=config.cpu_threads,
        weights_cache_gib=0,
    )


def _try(manager: SchedulerManager) -> Finding:
    started = monotonic()
    try:
        engine = manager.get(BUNDLED_MODEL)
        loaded = monotonic()
        text = asyncio.run(_generate(engine))
    except Exception as error:
        # Whatever fails is the answer.
        return bad(_NAME, " ".join(str(error).split()) or type(error).__name__)
    finally:
        manager.close(_STOP_SECONDS)
    times = (
        f"loaded in {loaded - started:.1f} s, {_NUM_TOKENS} tokens in {monotonic() - loaded:.1f} s"
    )
    return ok(_NAME, " ".join(f"{times}: {_PROMPT}{text}".split()))


async def _generate(engine: AsyncEngine) -> str:
    """Return a greedy completion."""
    tokenizer = engine.model.tokenizer
    spec = SequenceSpec(
        prompt=tuple(tokenizer.encode(_PROMPT)),
        max_tokens=_NUM_TOKENS,
        sampling=SamplingParams(temperature=0.0),
    )
    token_ids: list[int] = []
    stream = await engine.submit([spec])
    async for _, output in stream:
        token_ids += output.token_ids
    return tokenizer.decode(token_ids)
