"""A second start takes packed weights from their file, or packs again if that is not what it should be."""

import fcntl
import json
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import huggingface_hub.constants
import mlx.core as mx
import pytest
from mlx_lm.utils import save_config, save_model
from safetensors import safe_open

from batching import EngineConfig
from batching.backend.builder import platforms
from batching.backend.builder.engine import build_engine
from batching.backend.execution_mode import CheckResult, ExecutionMode
from batching.backend.hooks.changes import Changes
from batching.backend.loader import load_model
from batching.backend.platforms.cpu.layers.packing import Packing, StoredDiffers
from batching.backend.platforms.cpu.native_loader import Native
from batching.backend.platforms.cpu.packed_model import PackedModel
from batching.backend.self_check.checked_model import CheckedModel
from batching.backend.self_check.probe import Probe
from batching.backend.weights_cache import cache, identity
from batching.inputs.sampling_params import SamplingParams
from batching.scheduling.outputs import RequestOutput
from scripts.make_model.tiny_configs import VOCAB_SIZE
from tests.support.gguf_models import BPE, metadata_of, random_model, tensors_of
from tests.support.gguf_writer import write_gguf
from tests.support.model_files import write_model
from tests.support.model_zoo import make_tiny, tiny_config
from tests.support.platforms import check_model, replace_modules
from tests.support.requests import make_request
from tests.support.weekly import weekly, weekly_pairs

pytestmark = pytest.mark.usefixtures("native", "keeps_any_size")

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


@pytest.fixture
def keeps_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def write_directory(path: Path) -> Path:
    path.mkdir()
    return write_model(path)


def write_file(path: Path) -> Path:
    mx.random.seed(7)
    model, config = random_model("qwen3", head_dim=64)
    return write_gguf(
        path.with_suffix(".gguf"), metadata_of(config) | BPE, tensors_of(model, config)
    )


every_kind = pytest.mark.parametrize("write_it", [write_directory, write_file])


@pytest.fixture
def config(tmp_path: Path, folder: Path) -> EngineConfig:
    return config_of(write_directory(tmp_path / "model"), folder)


def config_of(model: Path, folder: Path) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        model_id="tiny",
        num_blocks=16,
        device="cpu",
        native="require",
        weights_cache_dir=folder,
    )


def start(config: EngineConfig) -> tuple[str, list[Any]]:
    """Return what the start says of the packed weights, and outputs with their log probabilities."""
    loaded = build_engine(config)
    [line] = [line for line in loaded.startup_lines if line.startswith("packed ")]
    logprobs = SamplingParams(temperature=0.0, logprobs=3)
    requests = [
        make_request(number, list(prompt), max_tokens=6, sampling=logprobs)
        for number, prompt in enumerate(PROMPTS)
    ]
    loaded.engine.add(*requests)
    outputs: list[Any] = []
    while loaded.engine.has_work:
        for each in loaded.engine.step():
            assert isinstance(each, RequestOutput)
            outputs += [each.request_id, each.output.token_ids, each.output.logprobs]
    return line.removeprefix("packed    "), outputs


NOTES: Final = [
    "no JSON",
    "[]",
    "{}",
    '{"key": {"way": 1}}',
    '{"key": {"check": ["ragged", false]}}',
    '{"key": {"check": ["by magic", false, ""]}}',
    '{"key": {"check": ["ragged", 1, ""]}}',
]


def test_a_note_of_something_else_is_not_believed(
    config: EngineConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(config)
    notes = the_file(folder).with_suffix(".json")
    [(key, of_model)] = json.loads(notes.read_text()).items()
    [name] = [name for name in of_model if name.startswith("check")]
    assert of_model[name] == ["ragged", False, ""]
    checked: list[Probe] = []
    plain = Probe.fastest

    def fastest(probe: Probe) -> tuple[CheckedModel, Changes]:
        checked.append(probe)
        return plain(probe)

    monkeypatch.setattr(Probe, "fastest", fastest)
    for num_checks, text in enumerate(NOTES, 1):
        notes.write_text(text.replace("key", key).replace("check", name))
        start(config)
        assert len(checked) == num_checks, text
        assert json.loads(notes.read_text())[key].items() >= of_model.items(), text


def test_what_a_check_found_is_known_for_all_ways(tmp_path: Path) -> None:
    """Also for models that are served in another one than the fastest, with the reason."""
    for family in ("llama", "mamba"):
        model = make_tiny(family)
        found = check_model(model, VOCAB_SIZE)
        for way in (
            found.result,
            CheckResult(ExecutionMode.ONE_BY_ONE, reason="a"),
            CheckResult(ExecutionMode.OWN),
        ):
            known = check_model(make_tiny(family), VOCAB_SIZE, known=way)
            assert known.result == way
            if way == found.result:
                assert known.layout == found.layout


def test_notes_that_cannot_be_written_are_none(config: EngineConfig, folder: Path) -> None:
    start(config)
    notes = the_file(folder).with_suffix(".json")
    notes.unlink()
    notes.mkdir()
    _, first = start(config)
    assert (first, notes.is_dir()) == (start(config)[1], True)


def the_file(folder: Path) -> Path:
    [file] = folder.glob("*.safetensors")
    return file


@pytest.mark.parametrize(
    ("write_it", "precision"), weekly_pairs([write_directory, write_file], ["exact", "auto"])
)
def test_a_second_start_packs_nothing_and_gives_the_same_bits(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_it: Callable[[Path], Path],
    precision: Any,
) -> None:
    config = replace(config_of(write_it(tmp_path / "model"), folder), cpu_precision=precision)
    line, plain = start(replace(config, weights_cache_gib=0))
    assert line.endswith("not kept: the cache is off")
    assert not folder.exists()
    line, first = start(config)
    assert f" in {the_file(folder)}" in line
    monkeypatch.setattr(Packing, "_pack", lambda *_: pytest.fail("it is packed"))
    monkeypatch.setattr(
        "batching.backend.gguf.model.read_weight", lambda *_: pytest.fail("it is read")
    )
    monkeypatch.setattr(Probe, "fastest", lambda _: pytest.fail("it is checked"))
    monkeypatch.setattr(
        "batching.backend.platforms.cpu.model.find_shifts",
        lambda *_: pytest.fail("it is looked at"),
    )
    line, second = start(config)
    assert line.startswith(f"read from {the_file(folder)} in ")
    assert plain == first == second


def test_without_a_matrix_unit_shifts_are_those_of_the_first_start(
    config: EngineConfig, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_integers = replace(native, supports_bfloat16=False)
    monkeypatch.setattr(platforms, "load_native", lambda *_: in_integers)
    _, first = start(config)
    monkeypatch.setattr(
        "batching.backend.platforms.cpu.model.find_shifts",
        lambda *_: pytest.fail("it is looked at"),
    )
    assert start(config)[1] == first


@pytest.mark.parametrize("name", weekly(["deepseek_v3", "gpt_oss", "qwen3_moe", "qwen3_next"], 2))
def test_experts_routers_and_recurrent_layers_are_those_of_the_first_start(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    directory = write_directory(tmp_path / "model")
    save_model(directory, make_tiny(name))
    save_config(tiny_config(name), directory / "config.json")
    config = config_of(directory, folder)
    _, plain = start(replace(config, weights_cache_gib=0))
    line, first = start(config)
    assert " kept in " in line
    monkeypatch.setattr(Packing, "_pack", lambda *_: pytest.fail("it is packed"))
    line, second = start(config)
    assert line.startswith("read from ")
    assert plain == first == second


def test_inputs_are_rounded_further_by_default(
    config: EngineConfig, native: Native, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, default = start(config)
    monkeypatch.setattr(PackedModel, "_round_further", lambda _: None)
    _, without = start(config)
    rounds_further = native.min_input_bits == 8 or native.supports_bfloat16
    assert (default != without) == rounds_further


def test_small_models_are_not_kept(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MIN_BYTES", 1 << 28)
    line, _ = start(config)
    assert line.endswith("not kept: less than 256 MiB")


def test_the_file_is_one_of_safetensors(config: EngineConfig, folder: Path) -> None:
    start(config)
    with safe_open(the_file(folder), "np") as file:
        names = set(file.keys())
        assert "lm_head" in names
        assert "model.layers.0.self_attn.q_proj" in names
        assert file.get_tensor("model.layers.1.self_attn.q_proj").dtype == "uint8"
        assert file.get_slice("model.norm.weight").get_dtype() == "BF16"
    assert the_file(folder).stat().st_mode & 0o077 == 0


def cut_off(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def lengthen(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 4096)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(data)


def change_the_header(file: Path) -> None:
    text = file.read_bytes()
    overwrite(file, text.index(b'"BF16"'), b'"F16" ')


def claim_a_long_header(file: Path) -> None:
    overwrite(file, 7, b"\x7f")


def break_the_header(file: Path) -> None:
    overwrite(file, 8, b"[1,2]")


def change_weights(file: Path) -> None:
    overwrite(file, file.stat().st_size - 1, b"\xa5")


DAMAGES: Final[dict[Callable[[Path], None], str]] = {
    cut_off: "bytes, not ",
    lengthen: "bytes, not ",
    empty: "it has no header",
    claim_a_long_header: "it has no header",
    break_the_header: "its header cannot be read",
    change_the_header: "its header has been changed",
    change_weights: "its weights have been changed",
}


def test_a_damaged_file_is_made_again(
    config: EngineConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, first = start(config)
    file = the_file(folder)
    content = file.read_bytes()
    for damage, reason in DAMAGES.items():
        file.write_bytes(content)
        damage(file)
        caplog.clear()
        line, second = start(config)
        assert line.startswith("in "), damage
        assert reason in caplog.text, damage
        assert first == second, damage
        # It is deleted, and written by the next start.
        assert list(folder.iterdir()) == [], damage
    start(config)
    line, third = start(config)
    assert line.startswith("read from ")
    assert first == third


def test_weights_that_cannot_be_taken_are_packed(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the disk fails, or by a mistake of ours."""
    _, first = start(config)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("batching.backend.platforms.cpu.packed_model._Stored.packed", fail)
        line, second = start(config)
    assert line.startswith("in ")
    assert "Input/output error" in caplog.text
    assert first == second


class OfAnotherModel:
    others: Final = {"model.norm.weight": mx.zeros(3)}

    def packed(self, _: str) -> None:
        pytest.fail("it is taken")


def test_arrays_of_another_model_are_not_taken(config: EngineConfig, native: Native) -> None:
    model = load_model(config.model, dtype=None).model
    with pytest.raises(StoredDiffers, match=r"layernorm\.weight is another array"):
        replace_modules(model, native, packing=Packing(native.module, stored=OfAnotherModel()))


def touch(model: Path) -> None:
    os.utime(model / "config.json", ns=(1, 1))


def rewrite(model: Path) -> None:
    """Change a bit, but neither the size nor the time."""
    file = model / "model.safetensors"
    stat = file.stat()
    overwrite(file, stat.st_size - 1, bytes([file.read_bytes()[-1] ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def add_code(model: Path) -> None:
    (model / "code.py").write_text("", encoding="utf-8")


@pytest.mark.parametrize("change", [touch, rewrite, add_code])
def test_weights_of_a_model_that_has_changed_are_packed_again(
    config: EngineConfig, folder: Path, change: Callable[[Path], None]
) -> None:
    start(config)
    change(Path(config.model))
    line, _ = start(config)
    assert line.startswith("in ")
    # In place of the other file.
    assert f" in {the_file(folder)}" in line
    line, _ = start(config)
    assert line.startswith("read from ")


def test_weights_of_another_version_are_packed_again(
    config: EngineConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(config)
    monkeypatch.setattr(identity, "version", lambda _: "0")
    line, _ = start(config)
    assert line.startswith("in ")
    monkeypatch.undo()
    assert len(list(folder.glob("*.safetensors"))) == 1


def test_each_precision_has_a_file(config: EngineConfig, folder: Path, native: Native) -> None:
    start(replace(config, cpu_precision="exact"))
    start(replace(config, cpu_precision="exact", dtype="bfloat16"))
    assert len(list(folder.glob("*.safetensors"))) == 2
    if native.min_input_bits < 32:
        start(config)
        assert len(list(folder.glob("*.safetensors"))) == 3


def test_a_folder_that_cannot_be_written_costs_a_warning(
    config: EngineConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("no folder", encoding="utf-8")
    line, _ = start(config)
    assert line.startswith("in ")
    assert f"not kept: {folder}: " in line
    assert "packed weights are not kept" in caplog.text


def test_a_folder_that_cannot_be_looked_into_costs_a_warning(
    config: EngineConfig, folder: Path
) -> None:
    """As one of another user; not even whether a file is there can be told."""
    unreadable = folder / ("long" * 100)
    line, _ = start(replace(config, weights_cache_dir=unreadable))
    assert f"not kept: {unreadable}: " in line


def test_without_a_home_nothing_is_kept(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", "~no such user/hub")
    line, _ = start(replace(config, weights_cache_dir=None))
    assert line.startswith("in ")
    assert "there is no home directory" in caplog.text


def test_a_file_of_the_model_that_cannot_be_read_is_no_obstacle(config: EngineConfig) -> None:
    (Path(config.model) / "consolidated.safetensors").symlink_to("gone")
    (Path(config.model) / "code.py").mkdir()
    start(config)
    line, _ = start(config)
    assert line.startswith("read from ")


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_a_warning_and_leaves_nothing(
    config: EngineConfig, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with largest_file(1 << 16):
        line, first = start(config)
    assert "not kept: " in line
    assert "packed weights are not kept" in caplog.text
    assert list(folder.iterdir()) == []
    assert start(config)[1] == first


def test_of_two_that_start_at_once_one_writes(config: EngineConfig, folder: Path) -> None:
    start(config)
    file = the_file(folder)
    part = file.with_name(f"{file.name}.part")
    file.rename(part)
    with written_by_another(part):
        line, _ = start(config)
    assert line.endswith("not kept: another process writes the same file")
    # What it has written so far is still there.
    assert part.stat().st_size > 0
    # It ended without an end: what it left is no file of weights.
    line, _ = start(config)
    assert " kept in " in line
    assert the_file(folder) == file


@contextmanager
def written_by_another(part: Path) -> Iterator[None]:
    """Lock a file as another process would."""
    descriptor = os.open(part, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)
