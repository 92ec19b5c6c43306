"""OpenAI's own client with `/v1/conversations`, against a live server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import httpx
import openai
import pytest
from openai.types.conversations import ConversationDeletedResource

from scripts.server_process import Server, wait_until
from tests.support.conversations import CONVERSATIONS, checked_conversation, checked_page
from tests.support.live import live_server
from tests.support.responses import ENDLESS, PATH
from tests.support.sdk_types import check_shape

pytestmark = pytest.mark.timeout(240)

MODEL: Final = "smollm2-135m-instruct"
QUESTION: Final = "What is the capital of France?"
GREETING: Final = {"role": "user", "content": "My name is Ada."}


@pytest.fixture(scope="module")
def client(bundled_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{bundled_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_conversation_from_its_beginning_to_its_end(client: openai.OpenAI) -> None:
    begun = client.conversations.create(items=cast(Any, [GREETING]), metadata={"topic": "a"})
    checked_conversation(begun.to_dict(mode="json"))
    assert client.conversations.retrieve(begun.id) == begun
    changed = client.conversations.update(begun.id, metadata={"topic": "b"})
    assert changed.metadata == {"topic": "b"}
    added = client.conversations.items.create(
        begun.id,
        items=[{"role": "assistant", "content": "Hello, Ada."}],
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
    )
    checked_page(added.to_dict(mode="json"))
    items = list(client.conversations.items.list(begun.id, limit=1, order="asc"))
    assert [item.type for item in items] == ["message", "message"]
    assert items[1] == added.data[0]
    assert client.conversations.items.retrieve(added.first_id, conversation_id=begun.id) == items[1]
    left = client.conversations.items.delete(added.first_id, conversation_id=begun.id)
    assert left == changed
    assert len(list(client.conversations.items.list(begun.id))) == 1
    deleted = client.conversations.delete(begun.id)
    check_shape(deleted.to_dict(mode="json"), ConversationDeletedResource)
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(begun.id)
    empty = client.conversations.create()
    assert empty.metadata == {}
    client.conversations.delete(empty.id)


def test_responses_of_all_kinds_go_on_from_a_conversation(client: openai.OpenAI) -> None:
    begun = client.conversations.create(items=cast(Any, [GREETING])).id
    short: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 8}

    def is_done() -> bool:
        return client.responses.retrieve(back.id).status == "incomplete"

    whole = client.responses.create(input=QUESTION, conversation=begun, **short)
    count = client.responses.input_tokens.count(model=MODEL, input="And?", conversation=begun)
    with client.responses.create(
        input="And?", conversation={"id": begun}, stream=True, **short
    ) as events:
        *_, last = events
    assert last.type == "response.incomplete"
    streamed = last.response
    back = client.responses.create(
        input="Why?", conversation=begun, background=True, store=True, **short
    )
    wait_until(is_done, "it does not end")
    answers = [whole, streamed, client.responses.retrieve(back.id)]
    for answer in answers:
        assert answer.conversation is not None
        assert answer.conversation.id == begun
    assert streamed.usage is not None
    assert streamed.usage.input_tokens == count.input_tokens
    items = list(client.conversations.items.list(begun, order="asc"))
    checked_page(client.conversations.items.list(begun).to_dict(mode="json"))
    assert [item.id for item in items[2::2]] == [answer.output[0].id for answer in answers]
    assert len(items) == 7
    # The same prompt as if the client had sent all.
    history = [item.to_dict(mode="json") for item in items]
    sent = client.responses.input_tokens.count(model=MODEL, input=cast(Any, history))
    kept = client.responses.input_tokens.count(model=MODEL, conversation=begun)
    assert sent.input_tokens == kept.input_tokens


def test_conversations_outlive_the_server(tmp_path: Path) -> None:
    """What a kill ended has added nothing, and keeps nothing locked."""
    settings = {"data_dir": str(tmp_path), "model_id": MODEL, "shutdown_timeout": "0.1"}

    def post(server: Server, path: str, **body: Any) -> Any:
        answer = httpx.post(f"{server.url}{path}", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def texts(server: Server) -> list[str]:
        page = httpx.get(f"{server.url}{CONVERSATIONS}/{begun}/items?order=asc").json()
        return [item["content"][0]["text"] for item in checked_page(page)]

    long = {"input": "Count.", "max_output_tokens": 8000, "text": {"format": ENDLESS}}
    with live_server(**settings) as first:
        begun = post(first, CONVERSATIONS, items=[GREETING])["id"]
        asked: dict[str, Any] = {"conversation": begun, "max_output_tokens": 4}
        post(first, PATH, input="One", **asked)
        before = texts(first)
        post(first, PATH, **(asked | long), background=True)
        locked = httpx.post(f"{first.url}{PATH}", json={"input": "Two"} | asked)
        first.kill()
    assert locked.json()["error"]["code"] == "conversation_locked"
    with live_server(**settings) as second:
        assert texts(second) == before
        post(second, PATH, input="Two", **asked)
        # An answer may be empty, and then is no item.
        assert texts(second)[: len(before) + 1] == [*before, "Two"]
        assert second.stop() == 0
