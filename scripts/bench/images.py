"""What images cost: to the request that has them, and to streams of text beside it.

`python -m scripts.bench.images` makes random weights in the shape of SmolVLM-256M, whose images are tiles of 512 x 512
pixels and 64 rows, and serves them without HTTP.  It prints how long the tower takes, the time to the first token with
an image that is new, encoded or in the prefix cache, and the tokens a second of streams of text with and without
requests with images beside them.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Final

import numpy as np

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from batching.engine.async_engine import AsyncEngine
from batching.inputs.images import ImageInput, PlacedImage, TowerArray
from batching.inputs.sequence_spec import SequenceSpec
from tests.support.vision_models import BEGIN, EOS, IMAGE, write_vision_model

_SIDE: Final = 512
_NUM_ROWS: Final = 64
_NUM_STREAMS: Final = 4
_NUM_TOKENS: Final = 200
_NUM_WORDS: Final = 40
_NUM_TIMES: Final = 7
_CONFIG: Final[dict[str, Any]] = {
    "model_type": "idefics3",
    "image_token_id": IMAGE,
    "scale_factor": 4,
    "vocab_size": 49280,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49280,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "model_type": "idefics3",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": _SIDE,
        "patch_size": 16,
    },
}


def picture(seed: int) -> ImageInput:
    pixels = np.random.default_rng(seed).standard_normal((1, 1, 3, _SIDE, _SIDE), np.float32)
    array = TowerArray("pixel_values", pixels.dtype.str, pixels.shape, pixels.tobytes())
    return ImageInput((BEGIN, *(IMAGE,) * _NUM_ROWS), tuple(range(1, 1 + _NUM_ROWS)), (array,))


def asking(image: ImageInput, seed: int, max_tokens: int = 1) -> SequenceSpec:
    """Return a request with words before its image, which a seed makes, and behind it."""
    words = np.random.default_rng(seed).integers(0, 256, 2 * _NUM_WORDS).tolist()
    before, behind = words[:_NUM_WORDS], words[_NUM_WORDS:]
    prompt = (*before, *image.token_ids, *behind)
    placed = (PlacedImage(len(before), image),)
    return SequenceSpec(prompt=prompt, images=placed, max_tokens=max_tokens)


async def seconds_of(engine: AsyncEngine, spec: SequenceSpec) -> float:
    began = monotonic()
    async for _ in await engine.submit([spec]):
        pass
    return monotonic() - began


async def first_tokens(engine: AsyncEngine) -> dict[str, float]:
    """Return the median seconds to the first token, by what is known of the request's image."""
    found: dict[str, list[float]] = {
        "text of as many tokens": [],
        "new": [],
        "encoded": [],
        "cached": [],
    }
    for i in range(_NUM_TIMES):
        words = np.random.default_rng(900 + i).integers(0, 256, 2 * _NUM_WORDS + _NUM_ROWS + 1)
        text = SequenceSpec(prompt=tuple(words.tolist()), max_tokens=1)
        found["text of as many tokens"].append(await seconds_of(engine, text))
        image = picture(100 + i)
        found["new"].append(await seconds_of(engine, asking(image, 1000 + i)))
        found["encoded"].append(await seconds_of(engine, asking(image, 2000 + i)))
        found["cached"].append(await seconds_of(engine, asking(image, 2000 + i)))
    return {name: float(np.median(times)) for name, times in found.items()}


async def stream_rate(engine: AsyncEngine, num_images: int) -> tuple[float, float]:
    """Return the tokens a second of streams of text, and the longest gap between two, with so many images beside."""
    gaps: list[float] = []

    async def stream(seed: int) -> None:
        spec = SequenceSpec(prompt=(seed, 2, 3, 4), max_tokens=_NUM_TOKENS)
        times = [monotonic() async for _ in await engine.submit([spec])]
        gaps.extend(np.diff(times))

    async def ask() -> None:
        for i in range(num_images):
            await seconds_of(engine, asking(picture(5000 + i), 5000 + i, max_tokens=20))

    began = monotonic()
    asks = asyncio.create_task(ask())
    await asyncio.gather(*map(stream, range(_NUM_STREAMS)))
    seconds = monotonic() - began
    await asks
    return _NUM_STREAMS * _NUM_TOKENS / seconds, max(gaps)


async def measure(folder: Path, num_images: int) -> None:
    config = EngineConfig(model=str(folder), model_id="images", weights_cache_gib=0)
    engine = AsyncEngine(lambda slices: build_engine(config, slices))
    await asyncio.to_thread(engine.start)
    try:
        await stream_rate(engine, 1)
        times = await first_tokens(engine)
        for name, seconds in times.items():
            print(f"first token, {name}: {seconds * 1000:.0f} ms")
        print(f"of a new image the tower takes {(times['new'] - times['encoded']) * 1000:.0f} ms")
        for number in (0, num_images, 0):
            rate, gap = await stream_rate(engine, number)
            print(
                f"{_NUM_STREAMS} streams beside {number} images: {rate:.0f} tokens/s, longest gap {gap * 1000:.0f} ms"
            )
    finally:
        await asyncio.to_thread(engine.stop, 60)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench.images", description=__doc__)
    parser.add_argument("--images", type=int, default=3, help="images beside streams of text")
    with TemporaryDirectory() as folder:
        write_vision_model(_CONFIG, Path(folder))
        asyncio.run(measure(Path(folder), parser.parse_args(argv).images))
    return 0


if __name__ == "__main__":
    sys.exit(main())
