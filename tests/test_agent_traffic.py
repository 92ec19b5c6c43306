"""Agents on a model with recurrent layers, over HTTP: what they share is found, and answers are those of a cold cache."""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from mlx_lm.utils import save_config, save_model

from scripts.server_process import Server
from tests.support.model_files import write_model
from tests.support.model_zoo import make_tiny, tiny_config

BLOCK = 32
VOCAB_SIZE = 128


class Answer(NamedTuple):
    text: str
    num_cached: int


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a tiny model of gated delta nets and attention."""
    directory = write_model(tmp_path_factory.mktemp("hybrid"))
    save_model(directory, make_tiny("qwen3_5"))
    config = tiny_config("qwen3_5") | {
        "eos_token_id": VOCAB_SIZE - 1,
        "max_position_embeddings": 4096,
    }
    config["text_config"] = config["text_config"] | {"max_position_embeddings": 4096}
    save_config(config, directory / "config.json")
    tokenizer = directory / "tokenizer.json"
    vocabulary = json.loads(tokenizer.read_text())
    vocabulary["model"]["vocab"] = {f"w{i}": i for i in range(VOCAB_SIZE)}
    vocabulary["model"]["unk_token"] = "w0"
    tokenizer.write_text(json.dumps(vocabulary))
    with Server(model=str(directory), model_id="hybrid") as started:
        yield started
        assert started.stop() == 0


def tokens(salt: int, number: int) -> list[int]:
    return [(i * 37 + i * i * salt + 11 * salt) % (VOCAB_SIZE - 2) + 1 for i in range(number)]


def complete(server: Server, prompt: list[int], **fields: Any) -> Answer:
    body = {
        "model": "hybrid",
        "prompt": prompt,
        "max_tokens": 40,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body | fields, timeout=60)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    details = usage["prompt_tokens_details"] or {"cached_tokens": 0}
    return Answer(response.json()["choices"][0]["text"], details["cached_tokens"])


def cold(server: Server, prompt: list[int], salt: str) -> str:
    answer = complete(server, prompt, cache_salt=salt)
    assert answer.num_cached == 0
    return answer.text


def test_an_identical_prompt_computes_its_last_block_only(server: Server) -> None:
    prompt = tokens(1, 333)
    first, second = complete(server, prompt), complete(server, prompt)
    assert (first.num_cached, second.num_cached) == (0, 332 // BLOCK * BLOCK)
    assert first.text == second.text == cold(server, prompt, "identical")


def test_turns_find_the_answer_before_them(server: Server) -> None:
    prompt = tokens(2, 300)
    for turn in range(4):
        shared = len(prompt)
        answer = complete(server, prompt)
        assert answer.text == cold(server, prompt, f"turn {turn}")
        # As a client does: what was generated, and what the user says next.
        prompt += [int(word) for word in re.findall(r"w(\d+)", answer.text)]
        assert len(prompt) == shared + 40
        found = complete(server, [*prompt, *tokens(20 + turn, 50)], max_tokens=1).num_cached
        # The last generated token was not processed before.
        assert found == (shared + 39) // BLOCK * BLOCK
        prompt += tokens(20 + turn, 50)


def test_a_system_prompt_is_found_from_the_third_request_on_whatever_follows(
    server: Server,
) -> None:
    system = tokens(3, 250)
    found = [complete(server, [*system, *tokens(30 + i, 40 + 7 * i)]).num_cached for i in range(5)]
    assert found == [0, 0, *[250 // BLOCK * BLOCK] * 3]
    prompt = [*system, *tokens(34, 68)]
    assert complete(server, prompt).text == cold(server, prompt, "system")
