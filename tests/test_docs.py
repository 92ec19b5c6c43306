"""The documents say what the code says."""

import os
import re
from pathlib import Path

import pytest

from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.completions.request import CompletionRequest
from app.api.openai.schemas import unsupported
from app.settings import Settings
from scripts.generated_docs import ROOT, fields, filled, main, stale_files


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own variables out of the tests."""
    for name in [name for name in os.environ if name.upper().startswith("MLX_SERVER_")]:
        monkeypatch.delenv(name)


def test_what_is_generated_is_fresh() -> None:
    assert list(stale_files(ROOT)) == [], "run: python -m scripts.generated_docs"


def test_the_example_holds_the_defaults_and_all_of_them() -> None:
    text = (ROOT / ".env.example").read_text(encoding="utf-8")
    names = [line.partition("=")[0] for line in text.splitlines() if line and line[0] != "#"]
    assert names == [name for name, _ in fields()]
    assert Settings(_env_file=ROOT / ".env.example") == Settings(_env_file=None)


def test_a_stale_file_is_told_and_then_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("README.md", "ARCHITECTURE.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    readme_text = (ROOT / "README.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").write_text(readme_text.replace("_PORT`", "_PROT`"), encoding="utf-8")
    assert main(["--check"], tmp_path) == 1
    assert capsys.readouterr().out == "README.md is out of date\n.env.example is out of date\n"
    assert main([], tmp_path) == 0
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == readme_text
    assert main(["--check"], tmp_path) == 0


def test_a_document_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no <!-- settings -->"):
        filled("# Title\n\n<!-- settings -->\n", "settings", "")


def test_the_readme_names_every_parameter() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    names |= {*unsupported.CHAT, *unsupported.COMPLETIONS, *unsupported.STREAM_OPTIONS}
    known = set(re.findall(r"`([a-z_]+)", text)) | {"stream_options", "echo", "store"}
    assert names <= known, sorted(names - known)
