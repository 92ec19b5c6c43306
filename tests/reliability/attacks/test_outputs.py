"""Answers that are too large: they are rejected before anything is computed."""

from collections.abc import Sequence
from typing import Any, Final

import pytest

from tests.support.speaker import MODEL_ID, ByteTokenizer, served

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
