"""What of mlx-vlm is imported, and what it changes: in processes of their own."""

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from batching.backend.vision import mlx_vlm_models

ROOT: Final = Path(__file__).parents[4]
IMPORT: Final = """
import sys
import batching.backend
from transformers import AutoProcessor
before = AutoProcessor.from_pretrained.__func__
from batching.backend.vision.mlx_vlm_models import NoVisionModel, model_file
{use}
assert AutoProcessor.from_pretrained.__func__ is before
loaded = {{name for name in sys.modules if name.startswith("mlx_vlm.")}}
assert not loaded & {{"mlx_vlm.server", "mlx_vlm.generate", "mlx_vlm.utils", "mlx_vlm.apc"}}, loaded
assert not {{"pandas", "cv2", "datasets", "torch"}} & sys.modules.keys()
"""


def run(use: str) -> None:
    program = IMPORT.format(use=use)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_a_models_file_comes_without_the_package_and_leaves_transformers_as_it_is() -> None:
    run(
        "assert hasattr(model_file('qwen3_vl'), 'VisionModel')\n"
        "try:\n    model_file('none')\nexcept NoVisionModel as error:\n"
        "    assert 'no model none' in str(error)\nelse:\n    raise AssertionError"
    )


def test_without_the_package_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, mlx_vlm_models.PACKAGE, raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(mlx_vlm_models.NoVisionModel, match="mlx-vlm is not installed"):
        mlx_vlm_models.model_file("qwen3_vl")


def test_a_text_model_imports_none_of_it() -> None:
    run(
        "from batching.backend.builder.engine import build_engine\n"
        "from batching.config import EngineConfig\n"
        "from tests.support.small_model import small_model\n"
        "config = EngineConfig(model=str(small_model()), model_id='small', device='cpu', num_blocks=16)\n"
        "build_engine(config).close()\n"
        "assert 'mlx_vlm' not in sys.modules"
    )
