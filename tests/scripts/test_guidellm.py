"""A command in GuideLLM's stead finds the server and the tokenizer that it is given."""

import sys
from pathlib import Path

import pytest

from scripts.guidellm import main

STAND_IN = f"""#!{sys.executable}
import json, sys
from pathlib import Path
from urllib.request import urlopen

command, backend, tokenizer, *others = sys.argv[1:]
target = json.loads(backend.partition("=")[2])["target"]
folder = Path(tokenizer.rpartition("=")[2])
with urlopen(target + "/v1/models") as response:
    model = json.load(response)["data"][0]["id"]
vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
Path("{{report}}").write_text(json.dumps([command, model, len(vocabulary), others[-1]]))
sys.exit(3)
"""


@pytest.mark.slow
def test_the_load_is_on_a_server_that_runs_with_its_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVER_MODEL_ID", "measured")
    report, stand_in = tmp_path / "report.json", tmp_path / "guidellm"
    stand_in.write_text(STAND_IN.replace("{report}", str(report)))
    stand_in.chmod(0o755)
    assert main([str(stand_in), str(tmp_path), "--seed", "kind=static"]) == 3
    assert report.read_text() == '["run", "measured", 49152, "kind=static"]'


def test_a_command_line_without_a_folder_gets_the_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["guidellm"]) == 2
    assert "PATH_OF_GUIDELLM FOLDER" in capsys.readouterr().err
