"""`/api/tags`, `/api/show`, `/api/ps`, `/api/version` and `/api/embed`."""

from pathlib import Path

import pytest

from batching import Embeddings, PoolingParams, PoolingType
from tests.support.fakes import expected_vector
from tests.support.local_models import write_folder
from tests.support.speaker import MODEL_ID, served

pytestmark = pytest.mark.anyio

CONFIG = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 512}


async def test_models_are_listed_and_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "speaker", **CONFIG)
    async with served() as server:
        (listed,) = (await server.client.get("/api/tags")).json()["models"]
        assert (await server.client.get("/api/ps")).json() == {"models": []}
        shown = (await server.post("/api/show", {"name": f"{MODEL_ID}:latest"})).json()
        await server.chat()
        loaded = (await server.post("/api/show", {"model": MODEL_ID})).json()
        (running,) = (await server.client.get("/api/ps")).json()["models"]
    assert listed["model"] == listed["name"] == MODEL_ID
    assert listed["size"] > 0
    assert listed["details"]["family"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 512
    assert "completion" in shown["capabilities"]
    assert loaded["model_info"]["llama.context_length"] == 2048
    assert running["context_length"] == 2048
    assert running["expires_at"].startswith("9999")


async def test_a_model_whose_files_are_not_here_is_listed() -> None:
    async with served() as server:
        (listed,) = (await server.client.get("/api/tags")).json()["models"]
        missing = await server.post("/api/show", {"model": "no"})
    assert listed["details"]["family"] == "unknown"
    assert missing.status_code == 404


async def test_the_version_is_one_of_ollama() -> None:
    async with served() as server:
        version = (await server.client.get("/api/version")).json()["version"]
    assert len(version.split(".")) == 3


async def test_a_model_that_embeds_no_text_says_so() -> None:
    async with served() as server:
        for path, body in (("/api/embed", {"input": "a"}), ("/api/embeddings", {"prompt": "a"})):
            response = await server.post(path, {"model": MODEL_ID} | body)
            assert response.status_code == 400
            assert "embedding" in response.json()["error"]


async def test_texts_become_vectors() -> None:
    known = Embeddings(pooling=PoolingType.LAST, size=4)
    async with served(embeddings=known) as server:
        body = {"model": MODEL_ID, "input": ["Hi", "x" * 3000]}
        answer = (await server.post("/api/embed", body)).json()
        old = await server.post("/api/embeddings", {"model": MODEL_ID, "prompt": "Hi"})
        whole = await server.post("/api/embed", body | {"truncate": False})
        large = await server.post("/api/embed", body | {"dimensions": 9})
    assert len(answer["embeddings"]) == 2
    assert answer["embeddings"][0] == expected_vector(b"Hi", PoolingParams())
    assert answer["prompt_eval_count"] > 2
    assert old.json() == {"embedding": answer["embeddings"][0]}
    assert (whole.status_code, large.status_code) == (400, 400)
    assert "input.1" in whole.json()["error"] and "dimensions" in large.json()["error"]


async def test_a_damaged_model_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "speaker", **CONFIG)
    (tmp_path / "speaker" / "config.json").write_text("{")
    async with served() as server:
        (listed,) = (await server.client.get("/api/tags")).json()["models"]
    assert listed["details"]["family"] == "unknown"


@pytest.mark.parametrize(
    ("template", "capabilities"),
    [
        ("{{ messages }}", ["completion"]),
        ("{{ tools }}{{ messages }}", ["completion", "tools"]),
    ],
)
async def test_a_template_that_shows_tools_is_told_before_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, capabilities: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "speaker", **CONFIG)
    (tmp_path / "speaker" / "chat_template.jinja").write_text(template)
    async with served() as server:
        shown = (await server.post("/api/show", {"model": MODEL_ID})).json()
    assert shown["capabilities"] == capabilities
