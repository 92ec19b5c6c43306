"""Answers that are too large, or that are not read: they take a bounded share of memory, and of the event loop."""

import json
import signal
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
from pydantic import BaseModel

from app.api.openai.completions.response_builder import CompletionResponseBuilder
from app.api.openai.logprobs import chat_logprobs, prompt_logprobs
from app.api.openai.responses.items.output_items import OutputText
from app.api.openai.schemas.logprobs import PromptLogprobs
from app.generation.choice import TokenWithLogprob
from app.http.streams.unsent_bytes import UnsentBytes
from app.main import create_app
from app.server.uvicorn_server import Server
from app.settings import Settings
from batching import TokenLogprobs
from tests.support.raw_http import Site, split, started
from tests.support.speaker import MODEL_ID, ByteTokenizer, served, speaking_manager

COMPLETIONS: Final = "/v1/completions"
# Characters of the text of one token.
SPELLED: Final = 4096
# Bytes of an answer.
LARGE: Final = 1 << 20
# What a connection may have in its buffers.
PIECE: Final = 64 << 10


class Spelling(ByteTokenizer):
    """A tokenizer with a token whose text is long, `x`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        text = super().decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text.replace("x", "x" * SPELLED)


def echo_of(num_characters: int, **fields: Any) -> dict[str, Any]:
    prompt = [ord("x")] * (num_characters // SPELLED)
    return {"model": MODEL_ID, "prompt": prompt, "echo": True, "max_tokens": 1, **fields}


class TestTheSizeOfAnswers:
    """It is bounded before anything is computed."""

    @pytest.mark.anyio
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("path", "fields", "limit"),
        [
            (COMPLETIONS, {"logprobs": 5, "max_tokens": 90_000}, 87_381),
            (COMPLETIONS, {"logprobs": 3, "max_tokens": 10_000, "n": 14}, 131_072),
            (
                "/v1/chat/completions",
                {"logprobs": True, "logprob_token_ids": [*range(128)], "max_tokens": 4096},
                4064,
            ),
            ("/v1/responses", {"top_logprobs": 20, "max_output_tokens": 25_000}, 24_966),
        ],
    )
    async def test_log_probabilities_of_outputs_are_bounded(
        self, path: str, fields: dict[str, Any], limit: int, stream: bool
    ) -> None:
        prompt = "messages" if "chat" in path else "input" if "responses" in path else "prompt"
        text = [{"role": "user", "content": "Hi"}] if prompt == "messages" else "Hi"
        async with served(b"ok") as server:
            answer = await server.post(path, {prompt: text, "stream": stream, **fields})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] in fields
        assert f"log probabilities, are more than the {limit} that one request" in error["message"]

    @pytest.mark.anyio
    @pytest.mark.parametrize("stream", [False, True])
    async def test_echoed_characters_of_all_choices_are_bounded(self, stream: bool) -> None:
        async with served(b"ok", tokenizer=Spelling()) as server:
            few = echo_of(LARGE, n=4, stream=stream)
            accepted = await server.post(COMPLETIONS, few)
            many = echo_of(LARGE, n=5, stream=stream)
            rejected = await server.post(COMPLETIONS, many)
        assert accepted.status_code == 200
        assert len(accepted.text) > 4 * LARGE
        assert rejected.status_code == 400
        assert rejected.json()["error"]["param"] == "echo"
        assert "4194304 are the most" in rejected.json()["error"]["message"]


def log_probabilities(num_tokens: int, num_top: int) -> list[TokenWithLogprob]:
    top = tuple((token_id, -1.5) for token_id in range(num_top))
    return [TokenWithLogprob(97, i, TokenLogprobs(-1.5, top)) for i in range(num_tokens)]


def in_chat(tokens: Sequence[TokenWithLogprob]) -> BaseModel:
    return chat_logprobs(lambda i: bytes([i]), tokens)


def in_responses(tokens: Sequence[TokenWithLogprob]) -> BaseModel:
    content = chat_logprobs(lambda i: bytes([i]), tokens).content
    return OutputText(text="", logprobs=content)


def of_a_prompt(tokens: Sequence[TokenWithLogprob]) -> BaseModel:
    class Choice(BaseModel):
        prompt_logprobs: PromptLogprobs

    each = [token.logprobs for token in tokens]
    ids = [0] * (len(tokens) + 1)
    return Choice(prompt_logprobs=prompt_logprobs(lambda i: bytes([i]), ids, each, 128))


class TestTheWritingOfAnswers:
    """It takes little more memory than the answer itself, and no time of the event loop."""

    @pytest.mark.parametrize("write", [in_chat, in_responses, of_a_prompt])
    def test_log_probabilities_take_no_more_memory_than_their_json(self, write: Any) -> None:
        tokens = log_probabilities(num_tokens=64, num_top=128)
        tracemalloc.start()
        try:
            size = len(write(tokens).model_dump_json())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert size > 64 * 128 * 32
        assert peak < 3 * size

    @pytest.mark.anyio
    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_long_prompt_is_echoed_by_another_thread(
        self, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        threads: list[threading.Thread] = []
        written = CompletionResponseBuilder._echo

        def observed(builder: CompletionResponseBuilder, index: int) -> Any:
            threads.append(threading.current_thread())
            return written(builder, index)

        monkeypatch.setattr(CompletionResponseBuilder, "_echo", observed)
        async with served(b"", tokenizer=Spelling()) as server:
            answer = await server.post(COMPLETIONS, echo_of(LARGE, stream=stream))
        assert answer.status_code == 200
        assert threads
        assert threading.main_thread() not in threads


@contextmanager
def serving(unsent: UnsentBytes) -> Iterator[Site]:
    """Serve an app on real sockets."""
    manager = speaking_manager(b"ok", tokenizer=Spelling())
    app = create_app(manager, Settings.model_construct(web=False))
    app.state.service = replace(app.state.service, unsent=unsent)
    server = Server(app, app.state.service)
    with closing(manager), started(server) as site:
        try:
            yield site
        finally:
            server.handle_exit(signal.SIGTERM, None)


def post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    fields = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return (head + fields).encode() + content


def num_buffered(site: Site) -> int:
    """Return how many bytes the connections of a server have in their buffers."""
    connections = list(site.server.server_state.connections)
    return sum(connection.transport.get_write_buffer_size() for connection in connections)


class TestUnreadAnswers:
    NUM_CLIENTS: Final = 16

    @pytest.mark.parametrize("stream", [False, True])
    def test_they_take_bounded_memory_and_make_room(self, stream: bool) -> None:
        """Others get their answers meanwhile."""
        unsent = UnsentBytes(4 * LARGE, patience=0.05)
        request = post(echo_of(LARGE, stream=stream))
        with serving(unsent) as site, ExitStack() as clients:
            for _ in range(self.NUM_CLIENTS):
                opened = site.connection(receive_buffer=4096)
                clients.enter_context(opened).send(request)
            status, _, body = split(site.ask(request))
            assert status == 200
            assert len(body) > LARGE
            # The one that made the last room, and two that were written at that time.
            assert unsent.num_bytes < (4 + 2) * (LARGE + PIECE)
            assert num_buffered(site) < 2 * PIECE * self.NUM_CLIENTS
