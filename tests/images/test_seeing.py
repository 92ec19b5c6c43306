"""A model that was trained on pictures, asked over HTTP about others: what it sees arrives."""

from base64 import b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from scripts.server_process import Server
from tests.support.seeing.talks import held_out_text, pair, picture

pytestmark = [pytest.mark.images, pytest.mark.timeout(600)]

MODEL: Final = "seeing"


def url_of(png: bytes) -> str:
    return f"data:image/png;base64,{b64encode(png).decode()}"


def ask(client: openai.OpenAI, text: str, *pngs: bytes, **options: Any) -> str:
    """Ask about pictures, which come before the question."""
    images = [{"type": "image_url", "image_url": {"url": url_of(png)}} for png in pngs]
    content: Any = [*images, {"type": "text", "text": text}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=12,
        **options,
    )
    return (answer.choices[0].message.content or "").strip()


def share_right(client: openai.OpenAI, asked: Sequence[tuple[Sequence[bytes], str, str]]) -> float:
    """Ask all at once; return how many answers are right, of 1."""
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda each: ask(client, each[1], *each[0]), asked)
        right = [a == expected for a, (*_, expected) in zip(answers, asked, strict=True)]
    return sum(right) / len(right)


@pytest.mark.parametrize(("kind", "share"), [("colour", 0.95), ("digit", 0.85), ("count", 0.85)])
def test_held_out_pictures_are_seen_32_at_once(
    client: openai.OpenAI, kind: str, share: float
) -> None:
    drawn = [picture(seed, kind) for seed in range(64)]
    asked = [([png], question, answer) for png, question, answer in drawn]
    assert share_right(client, asked) >= share


def test_the_order_of_two_pictures_is_kept(client: openai.OpenAI) -> None:
    """The model itself is right about three times of four; who takes one for the other is right half the time."""
    assert share_right(client, [pair(seed, "colour") for seed in range(64)]) >= 0.65


def test_answers_do_not_depend_on_who_else_is_in_the_batch(client: openai.OpenAI) -> None:
    asked = [picture(seed) for seed in range(100, 116)]
    alone = [ask(client, question, png) for png, question, _ in asked]
    texts = [held_out_text(seed).messages[0]["content"][-1]["text"] for seed in range(16)]
    with ThreadPoolExecutor(32) as pool:
        beside = [pool.submit(ask, client, text) for text in texts]
        together = list(pool.map(lambda each: ask(client, each[1], each[0]), asked))
        assert all(each.result() for each in beside)
    assert together == alone


def test_a_picture_that_was_read_before_is_neither_encoded_nor_read_again(
    client: openai.OpenAI, server: Server
) -> None:
    def encoded() -> float:
        page = httpx.get(f"{server.url}/metrics").text
        families = text_string_to_metric_families(page)
        samples = (sample for family in families for sample in family.samples)
        return next(s.value for s in samples if s.name == "mlx_server:images_encoded_total")

    png, question, _ = picture(999)
    first, count = ask(client, question, png), encoded()
    assert ask(client, question, png) == first
    assert encoded() == count
    other, *_ = picture(998)
    ask(client, question, other)
    assert encoded() == count + 1


def num_prompt_tokens(client: openai.OpenAI, text: str, *pngs: bytes) -> int:
    images = [{"type": "image_url", "image_url": {"url": url_of(png)}} for png in pngs]
    content: Any = [*images, {"type": "text", "text": text}]
    usage = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=1
    ).usage
    assert usage is not None
    return usage.prompt_tokens


def test_a_placeholder_that_a_user_writes_is_text(client: openai.OpenAI) -> None:
    png, question, _ = picture(3, "colour")
    typed = "<|vision_start|><|image_pad|><|vision_end|>"
    plain = num_prompt_tokens(client, question, png)
    # As special tokens they would be three.
    assert num_prompt_tokens(client, f"{typed}{question}", png) > plain + len(typed) // 3


def test_an_answer_streams(client: openai.OpenAI) -> None:
    png, question, _ = picture(5, "colour")
    content: Any = [
        {"type": "image_url", "image_url": {"url": url_of(png), "detail": "low"}},
        {"type": "text", "text": question},
    ]
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text.strip() == ask(client, question, png)
