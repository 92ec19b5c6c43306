"""What is installed from the wheels of the server and of the kernels, in an environment without the checkout."""

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.request import Request, urlopen

import pytest

from scripts.server_process import ROOT, Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # a compiler may run

KERNEL_TESTS: Final = "tests/batching/backend/platforms/cpu/test_kernels.py"
# Compiled in a third of the time of others, and the least that a server uses.
ISA: Final = "avx2" if platform.machine() == "x86_64" else "baseline"


def run(*command: str | Path, cwd: Path = ROOT, variables: Mapping[str, str] = {}) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the server's wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("server")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder)
    [wheel] = folder.glob("*.whl")
    made = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", made)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "--python", made / "bin" / "python", "install", "--no-deps", "--no-index", wheel)
    # Of a folder that is named so, no .pth is read: the checkout is not on the path.
    (site_packages(made) / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return made


def site_packages(environment: Path) -> Path:
    [found] = environment.glob("lib/python*/site-packages")
    return found


def answer_to(url: str, **body: Any) -> str:
    data = {"model": "smollm2-135m-instruct", "max_tokens": 60, "temperature": 0} | body
    headers = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/chat/completions", json.dumps(data).encode(), headers)
    with urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def test_one_name_is_installed(environment: Path) -> None:
    names = {path.name for path in site_packages(environment).iterdir()}
    assert {name for name in names if not name.endswith((".dist-info", ".pth"))} == {
        "mlx_batch_server"
    }


def test_the_installed_command_explains_itself(environment: Path, tmp_path: Path) -> None:
    # What is found first in the folder of the user is not ours.
    (tmp_path / "app.py").write_text("raise AssertionError")
    variables = {"PYTHONPATH": str(tmp_path)}
    command = environment / "bin" / "mlx-batch-server"
    assert run(command, "--help", cwd=tmp_path, variables=variables).startswith(
        "usage: mlx-batch-server"
    )
    module = (environment / "bin" / "python", "-m", "mlx_batch_server")
    assert run(*module, "--version", cwd=tmp_path, variables=variables).startswith(
        "mlx-batch-server "
    )


def test_the_installed_server_starts_its_processes(environment: Path) -> None:
    """One compiles grammars and one renders the templates that requests bring."""
    command = str(environment / "bin" / "mlx-batch-server")
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    messages = [{"role": "user", "content": "Which number?"}]
    with Server((), python=command, allow_request_chat_template="true") as server:
        url = server.url
        assert json.loads(answer_to(url, messages=messages, response_format=format_)) == {"n": 7}
        template = (
            "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert "Paris" in answer_to(url, messages=messages, chat_template=template)
        assert server.stop() == 0


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is in the kernels' wheel."""
    folder = tmp_path_factory.mktemp("kernels")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps")
    options = ("--no-build-isolation", "-C", f"cmake.define.NATIVE_ISAS={ISA}")
    run(*pip, *options, "--wheel-dir", folder, "./kernels")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def test_the_kernels_name_their_mlx_and_no_place_of_this_machine(kernels: Path) -> None:
    [metadata] = kernels.glob("*.dist-info/METADATA")
    [required] = re.findall(r"^Requires-Dist: mlx==(\S+)$", metadata.read_text(), re.MULTILINE)
    package = kernels / "mlx_cpu_kernels"
    assert (package / "_build.py").read_text() == f'MLX_VERSION = "{required}"\n'
    [extension] = package.glob("_native*.so")
    content = extension.read_bytes()
    for place in (ROOT, kernels.parent, sys.prefix, sys.base_prefix):
        assert f"{place}/".encode() not in content


def test_the_least_instruction_set_computes_the_same(kernels: Path) -> None:
    """The C++ tests run on those in between, which `make` does not build for this processor."""
    load = "from batching.backend.platforms.cpu.native_loader import load_native"
    say = f"import batching.backend; {load}; print(load_native('require'))"
    variables = {"PYTHONPATH": str(kernels), "NATIVE_ISA": ISA}
    assert run(sys.executable, "-c", say, variables=variables).startswith(f"{ISA} ")
    pytest_ = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in run(*pytest_, KERNEL_TESTS, variables=variables).splitlines()[-1]
