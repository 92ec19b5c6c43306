"""Keys and values that outlive their engine: outputs are those of an engine that has never stopped.

On the native kernels they are so bit for bit.  By MLX alone the last bits depend on how a prompt is cut.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from batching.backend.builder.engine import build_engine
from batching.backend.devices import Gpu
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.vision.tower import Tower
from batching.block_store.entry_file import read
from batching.block_store.keys import Key, Kind
from batching.config import EngineConfig
from batching.engine.loaded_engine import LoadedEngine
from batching.errors import ModelLoadError
from batching.inputs.sampling_params import SamplingParams
from batching.request import BatchRequest
from batching.scheduling.outputs import RequestFailure, RequestOutput
from batching.steps.stats import SchedulerStats
from tests.support.host_kernels import HostKernels
from tests.support.model_files import write_model, write_tiny
from tests.support.model_zoo import CONFIGS
from tests.support.platforms import platform_of
from tests.support.requests import make_request
from tests.support.stored_entries import write_file
from tests.support.tiny_models import DEVICE_KINDS
from tests.support.vision_models import FAMILIES, Prompt, make_vision_model
from tests.support.weekly import weekly, weekly_pairs

# Of transformers, about the configs of tiny models.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

BLOCK_SIZE: Final = 8
# Plain, with windows, and with two kinds of states.
MODELS: Final = ("llama", "gemma3_text", "qwen3_5", "lfm2")
PROMPT: Final = [i * 7 % 90 + 5 for i in range(50)]
TOLERANCE: Final = 1e-5

Lives = Callable[..., "Life"]


class Life:
    """An engine, from its start to its end, and what its requests have got."""

    def __init__(self, loaded: LoadedEngine, tolerance: float = 0.0) -> None:
        self._loaded = loaded
        self._tolerance = tolerance
        self.scores: dict[int, list[float]] = defaultdict(list)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.num_failed = 0

    def run(self, *requests: BatchRequest) -> None:
        """Run requests to their ends, and hand over what is to be stored."""
        engine = self._loaded.engine
        engine.add(*requests)
        while engine.has_work or engine.can_step:
            for item in engine.step():
                if isinstance(item, RequestFailure):
                    self.num_failed += 1
                    continue
                assert isinstance(item, RequestOutput)
                self.tokens[item.request_id] += item.output.token_ids
                self.scores[item.request_id] += [each.logprob for each in item.output.logprobs]

    def stats(self) -> SchedulerStats:
        return self._loaded.engine.stats()

    def num_read(self) -> int:
        store = self._loaded.store
        return 0 if store is None else store.stats.num_read

    def end(self) -> "Life":
        self._loaded.close()
        return self

    def check_like(
        self, other: "Life", request_ids: Iterable[int], tolerance: float | None = None
    ) -> None:
        """Check that these requests have got the same here and there; None is the tolerance of the pool."""
        tolerance = self._tolerance if tolerance is None else tolerance
        for i in request_ids:
            assert self.tokens[i] == other.tokens[i]
            assert self.tokens[i]
            expected = (
                pytest.approx(other.scores[i], abs=tolerance) if tolerance else other.scores[i]
            )
            assert self.scores[i] == expected


def engine_of(model: Path, folder: Path | None, **config: Any) -> LoadedEngine:
    limits = {"num_blocks": 64, "block_size": BLOCK_SIZE, "max_num_seqs": 4, "weights_cache_gib": 0}
    settings = {"model": str(model), "model_id": "tiny", "device": "cpu", **limits, **config}
    return build_engine(EngineConfig(kv_cache_dir=folder, **settings))


@pytest.fixture
def begin(tmp_path: Path) -> Lives:
    """Return what begins a life of the model in the folder `model`, with the store in `store`, or None."""

    def make(pool: str = DEVICE_KINDS[1], store: str | None = "store", **config: Any) -> Life:
        is_native = pool == "with native kernels"
        folder = None if store is None else tmp_path / store
        uses = "auto" if is_native else "off"
        loaded = engine_of(tmp_path / "model", folder, native=uses, **config)
        return Life(loaded, 0.0 if is_native else TOLERANCE)

    return make


def use_pool(pool: str, request: pytest.FixtureRequest) -> None:
    """Let engines be of this pool; those of kernels need them."""
    if pool == "on any device":
        return
    native: Native = request.getfixturevalue("native")
    if pool == "with a GPU's kernels":
        platform = platform_of(gpu=Gpu.METAL, kernels=HostKernels(native))
        patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        patch.setattr("batching.backend.builder.engine.choose_platform", lambda *_, **__: platform)


def asked(request_id: int, prompt: Sequence[int] = PROMPT, **spec: Any) -> BatchRequest:
    sampling = SamplingParams(temperature=0, logprobs=0)
    return make_request(request_id, prompt, **{"max_tokens": 6, "sampling": sampling, **spec})


@pytest.mark.parametrize(("name", "pool"), weekly_pairs(MODELS, DEVICE_KINDS, size=3))
def test_a_prefix_is_read_in_the_next_life(
    name: str, pool: str, begin: Lives, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    use_pool(pool, request)
    write_tiny(name, tmp_path / "model")
    first = begin(pool)
    first.run(asked(0))
    first.end()
    again, cached = begin(pool), asked(0)
    again.run(cached)
    again.end().check_like(first, [0])
    assert cached.num_cached_tokens == 48


@pytest.mark.parametrize("name", weekly([*CONFIGS], 1))
def test_models_of_all_types_are_read_or_computed(name: str, begin: Lives, tmp_path: Path) -> None:
    """The last bits of those with attention of their own depend on how a prompt is cut."""
    write_tiny(name, tmp_path / "model")
    try:
        first = begin()
    except ModelLoadError as error:
        # Of some types transformers does not take the tiny config.
        pytest.skip(str(error))
    first.run(asked(0))
    first.end()
    again = begin()
    again.run(asked(0))
    again.end().check_like(first, [0], TOLERANCE)


def of_both_lives() -> tuple[list[BatchRequest], list[BatchRequest]]:
    """Return requests before and after a restart: with forks, drafts, and prompts that share their beginnings."""
    drafted = [9, 8, 7, 6, 5] * 9
    of_choices = asked(10, PROMPT[:30], max_tokens=20)
    first = [asked(0, max_tokens=20), asked(1, drafted), of_choices, of_choices.fork(11)]
    later = asked(20, [*PROMPT, *range(20, 40)], max_tokens=24)
    # Drafts are made of what has come before.
    repeated = SamplingParams(temperature=0, logprobs=0, logit_bias=((9, 50.0), (8, 50.0)))
    of_drafts = asked(22, [*drafted, 9, 8, 7], max_tokens=24, sampling=repeated)
    second = [later, later.fork(21), of_drafts, asked(23)]
    second += [asked(24, [*PROMPT[:24], *range(30)], max_tokens=20), asked(25, [3, *PROMPT])]
    return first, second


# On the host the kernels of a GPU take ten times as long.
_ON_GPUS: Final = [
    pytest.param(name, DEVICE_KINDS[2], marks=pytest.mark.slow) for name in (*MODELS, "gpt_oss")
]


@pytest.mark.parametrize(
    ("name", "pool"), [*weekly_pairs(MODELS, DEVICE_KINDS[:2], size=2), *_ON_GPUS]
)
def test_outputs_are_those_of_an_engine_that_has_never_stopped(
    name: str, pool: str, begin: Lives, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    use_pool(pool, request)
    write_tiny(name, tmp_path / "model")
    first, second = of_both_lives()
    whole = begin(pool, None)
    whole.run(*first)
    whole.run(*second)
    whole.end()
    first, second = of_both_lives()
    before = begin(pool, num_blocks=16)
    before.run(*first)
    before.end().check_like(whole, [each.request_id for each in first])
    after = begin(pool, num_blocks=16)
    after.run(*second)
    stats = after.stats()
    after.end().check_like(whole, [each.request_id for each in second])
    assert stats.num_preemptions
    assert stats.num_drafts
    assert after.num_read()
    assert second[0].num_cached_tokens >= 48


def files_of(folder: Path, kind: Kind) -> list[Path]:
    """Return the files of a kind, in the order of the prompt."""
    keys = {path: Key.of_name(path.name) for path in folder.rglob("*.*")}
    of_blocks = {path: key for path, key in keys.items() if key and key.kind is Kind.BLOCK}
    parents = {
        key.block_hash: read(path, path.parent.parent.name, key).parent
        for path, key in of_blocks.items()
    }

    def depth(path: Path) -> int:
        key, num = keys[path], 0
        assert key is not None
        block_hash = key.block_hash
        while block_hash in parents:
            block_hash, num = parents[block_hash], num + 1
        return num

    return sorted(folder.rglob(f"*.{kind}"), key=depth)


def flip(path: Path) -> None:
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)


HARMS: Final[Mapping[str, Callable[[Path], None]]] = {
    "damaged": flip,
    "gone": Path.unlink,
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize(
    ("name", "kind", "index", "harm"),
    [
        ("llama", Kind.BLOCK, 3, "damaged"),
        pytest.param("llama", Kind.BLOCK, 0, "gone", marks=pytest.mark.slow),
        ("gemma3_text", Kind.WINDOW, 4, "damaged"),
        pytest.param("gemma3_text", Kind.WINDOW, 5, "gone", marks=pytest.mark.slow),
        pytest.param("gemma3_text", Kind.BLOCK, 2, "empty", marks=pytest.mark.slow),
        ("qwen3_5", Kind.STATE, -1, "damaged"),
        ("lfm2", Kind.STATE, -1, "gone"),
    ],
)
def test_what_is_lost_is_computed(
    name: str, kind: Kind, index: int, harm: str, begin: Lives, tmp_path: Path
) -> None:
    write_tiny(name, tmp_path / "model")
    first = begin()
    first.run(asked(0))
    first.end()
    # The engine knows of it at its start, and finds out when it reads it.
    again = begin()
    path = files_of(tmp_path / "store", kind)[index]
    HARMS[harm](path)
    cached = asked(0)
    again.run(cached)
    again.end().check_like(first, [0])
    assert cached.num_cached_tokens < 48
    # It is stored again.
    third, cached = begin(), asked(0)
    third.run(cached)
    third.end().check_like(first, [0])
    assert cached.num_cached_tokens == 48


def test_a_hit_ends_before_the_first_block_that_is_damaged(begin: Lives, tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model")
    first = begin()
    first.run(asked(0))
    first.end()
    flip(files_of(tmp_path / "store", Kind.BLOCK)[3])
    again, cached = begin(), asked(0)
    again.run(cached)
    again.end().check_like(first, [0])
    assert cached.num_cached_tokens == 3 * BLOCK_SIZE


def test_what_is_of_another_salt_is_never_found(begin: Lives, tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model")
    first = begin()
    first.run(asked(0, cache_salt="a"))
    first.end()
    found: list[int] = []
    for salt in ("", "b", "a"):
        life, cached = begin(), asked(0, cache_salt=salt)
        life.run(cached)
        life.end().check_like(first, [0])
        found.append(cached.num_cached_tokens)
    assert found == [0, 0, 48]


def test_keys_of_8_bits_are_kept_as_they_are(begin: Lives, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    limits = {"kv_cache_dtype": "int8", "max_num_batched_tokens": 64}
    prompt = [i * 7 % 36 + 4 for i in range(50)]
    first = begin(**limits)
    first.run(asked(0, prompt))
    first.end()
    again, cached = begin(**limits), asked(0, prompt)
    again.run(cached)
    again.end().check_like(first, [0])
    assert cached.num_cached_tokens == 48


def words(seed: int, count: int) -> list[int]:
    return [(seed * 31 + i * 7) % 256 for i in range(count)]


@pytest.mark.parametrize(
    ("family", "pool"),
    [
        ("qwen3_vl", "with native kernels"),
        pytest.param("gemma3", "on any device", marks=pytest.mark.slow),
        pytest.param("qwen3_5", "with a GPU's kernels", marks=pytest.mark.slow),
        pytest.param("lfm2_vl", "with native kernels", marks=pytest.mark.slow),
    ],
)
def test_a_hit_behind_an_image_is_read_without_encoding_it(
    family: str,
    pool: str,
    begin: Lives,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_pool(pool, request)
    make_vision_model(family, tmp_path / "model")
    image = FAMILIES[family].image
    prompt = Prompt.of(words(1, 5), image(3), words(2, 20))
    other = Prompt.of(words(1, 5), image(5), words(2, 20))
    limits = {"cpu_precision": "exact", "max_num_batched_tokens": 64}

    def of(request_id: int, prompt: Prompt) -> BatchRequest:
        return asked(request_id, prompt.token_ids, images=prompt.images)

    first = begin(pool, **limits)
    first.run(of(0, prompt))
    first.run(of(1, other))
    first.end()
    again, cached = begin(pool, **limits), of(0, prompt)
    plain, encoded = Tower.encode, []

    def watched(tower: Tower, *args: Any, **options: Any) -> Any:
        encoded.append(args)
        return plain(tower, *args, **options)

    monkeypatch.setattr(Tower, "encode", watched)
    again.run(cached)
    assert cached.num_cached_tokens >= len(prompt.token_ids) - 2 * BLOCK_SIZE
    assert encoded == []
    # Another image of the same size is another prefix.
    unlike = Prompt.of(words(1, 5), image(7), words(2, 20))
    uncached = of(2, unlike)
    again.run(uncached)
    assert encoded
    assert uncached.num_cached_tokens < 2 * BLOCK_SIZE
    again.end().check_like(first, [0])


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("llama", {"enable_prefix_cache": False}, "without a prefix cache nothing is stored"),
        ("llama", {}, "are not kept in"),
    ],
)
def test_what_cannot_be_stored_is_served_without(
    name: str,
    config: dict[str, Any],
    reason: str,
    begin: Lives,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write_tiny(name, tmp_path / "model")
    (tmp_path / "store").touch()
    life = begin(**config)
    life.run(asked(0))
    life.end()
    assert len(life.tokens[0]) == 6
    assert [each for each in caplog.messages if reason in each] == [*caplog.messages]
    assert len(caplog.messages) == 1


def test_a_block_of_another_form_fails_one_request_at_most(begin: Lives, tmp_path: Path) -> None:
    """As would be if the identity had left something out: the file is whole."""
    write_tiny("llama", tmp_path / "model")
    first = begin()
    first.run(asked(0))
    first.end()
    path = files_of(tmp_path / "store", Kind.BLOCK)[1]
    key = Key.of_name(path.name)
    assert key is not None
    entry = read(path, path.parent.parent.name, key)
    shorter = replace(entry, contents=[each[4:] for each in entry.contents])
    write_file(path, shorter, path.parent.parent.name)
    again = begin()
    again.run(asked(1))
    again.run(asked(0))
    assert again.num_failed == 1
    again.end().check_like(first, [0])


def test_what_the_pool_evicts_stays_in_the_hosts_memory(begin: Lives, tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model")
    prompts = [[(i * 7 + k) % 90 + 5 for i in range(50)] for k in range(3)]
    life = begin("on any device", store=None, num_blocks=16, kv_host_gib=0.01)
    for k, prompt in enumerate([*prompts, *prompts]):
        request = asked(k, prompt)
        life.run(request)
        assert request.num_cached_tokens == (48 if k >= len(prompts) else 0)
    assert [life.tokens[k] for k in (3, 4, 5)] == [life.tokens[k] for k in (0, 1, 2)]
    stats = life.stats()
    assert stats.num_evictions
    assert stats.store is not None
    assert stats.store.num_restored_tokens
    assert stats.store.host_bytes
    life.end()
