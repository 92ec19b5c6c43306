"""Which device is chosen, and what MLX is told before it is imported."""

import os
import subprocess
import sys
from typing import Final

import mlx.core as mx
import pytest

from batching.backend import let_buffers_grow
from batching.backend.devices import Gpu, default_gpu, select_device
from batching.config import DeviceName
from batching.errors import ModelLoadError

VARIABLE: Final = "MLX_MAX_MB_PER_BUFFER"


def have_gpu(monkeypatch: pytest.MonkeyPatch, kind: Gpu | None) -> None:
    """Let MLX have a GPU, which is its default device."""
    device = [mx.Device(mx.cpu if kind is None else mx.gpu)]
    monkeypatch.setattr(mx, "is_available", lambda _: kind is not None)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: kind is Gpu.CUDA)
    monkeypatch.setattr(mx, "default_device", lambda: device[0])
    monkeypatch.setattr(mx, "set_default_device", lambda new: device.__setitem__(0, new))


@pytest.mark.parametrize("kind", [*Gpu, None])
@pytest.mark.parametrize("name", ["auto", "cpu", "gpu"])
def test_a_gpu_is_told_by_its_kind(
    monkeypatch: pytest.MonkeyPatch, name: DeviceName, kind: Gpu | None
) -> None:
    have_gpu(monkeypatch, kind)
    if name == "gpu" and kind is None:
        return
    expected = None if name == "cpu" else kind
    assert select_device(name) is expected
    assert default_gpu() is expected


def test_without_the_gpu_that_is_demanded_one_line_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have_gpu(monkeypatch, None)
    with pytest.raises(ModelLoadError) as caught:
        select_device("gpu")
    assert str(caught.value) == (
        "no GPU that MLX can use is here: set MLX_SERVER_DEVICE=auto to compute on the CPU, or on Linux "
        'install MLX for CUDA, with DEVICE=cuda make serve or pip install ".[cuda]"'
    )


@pytest.mark.parametrize(
    ("platform", "before", "after"),
    [
        ("darwin", {}, {VARIABLE: "4096"}),
        ("darwin", {VARIABLE: "50"}, {VARIABLE: "50"}),
        ("linux", {}, {}),
    ],
)
def test_command_buffers_take_more_than_a_layer_unless_the_user_has_set_how_much(
    platform: str, before: dict[str, str], after: dict[str, str]
) -> None:
    let_buffers_grow(platform, before)
    assert before == after


IMPORTS: Final = """
import os, sys
sys.platform = "darwin"

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            print(os.environ.get("MLX_MAX_MB_PER_BUFFER"))
            # As for whom the variable is read then.
            os._exit(0)

sys.meta_path.insert(0, Watch())
import batching.backend
"""


def test_it_is_set_when_mlx_is_imported() -> None:
    environ = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-u", "-c", IMPORTS]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert run.stdout == "4096\n"
