"""A client that has left holds nothing, wherever its request is: the stage itself goes on, and is not waited for."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import product
from typing import Any, Final

import pytest

from app.http import json_body
from app.prompts.templates import model_template, template_process
from app.server_state import ServerState
from app.worker_threads import WorkerThreads
from batching import Priority, Sandbox, SandboxLimits
from batching.pooling import Embeddings, PoolingType
from batching.steps.step_plan import SliceOutput, StepPlan
from scripts.server_process import wait_until
from tests.support.fill_in import QWEN, Marked
from tests.support.raw_http import LONG, Connection, Site, running, split
from tests.support.speaker import MODEL_ID, ByteTokenizer, Speaker, speaking_app, speaking_manager

CHATS: Final = "/v1/chat/completions"
MESSAGES: Final = [{"role": "user", "content": "Hi"}]
PREDICATE: Final = {"type": "predicate", "instructions": "Is it?"}
# A request of each API, and of each endpoint that needs no engine.
BODIES: Final[Mapping[str, Mapping[str, Any]]] = {
    CHATS: {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100},
    "/v1/decisions": {"input": "Hi", "questions": [PREDICATE]},
    "/v1/systemone": {
        "state": "Hi",
        "questions": {"a": {"type": "noul", "instructions": "Is it?"}},
    },
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/api/chat": {"messages": MESSAGES},
    "/api/generate": {"prompt": "Hi"},
    "/api/embed": {"input": "Hi"},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/v1/chat/completions/render": {"messages": MESSAGES},
}


class Stage:
    """A point that requests reach and do not get beyond until it is opened."""

    def __init__(self) -> None:
        self.num_there = 0
        self.was_waited_for = False
        self._open = threading.Event()
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            self.num_there += 1
        self.was_waited_for |= not self._open.wait(LONG)

    def open(self) -> None:
        assert not self.was_waited_for
        self._open.set()


class SteppingSpeaker(Speaker):
    """Makes a step when it is let."""

    steps = threading.Semaphore(0)
    num_begun = 0

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        type(self).num_begun += 1
        assert self.steps.acquire(timeout=2 * LONG), "the test makes no step"
        return super().run(plan)


class SlowTokenizer(ByteTokenizer):
    stage: Stage

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if "slow" in text:
            self.stage.wait()
        return super().encode(text, add_special_tokens=add_special_tokens)


class Server:
    """The app on a real socket, and what its requests hold."""

    def __init__(self, site: Site, service: ServerState) -> None:
        self.site = site
        self.service = service

    @property
    def held(self) -> tuple[int, int, int]:
        """The requests that are open, admitted, and in the engine or on the way to it."""
        engine = self.service.manager.get(MODEL_ID)
        stats = engine.latest_stats
        return (
            self.service.in_flight.num_open,
            self.service.admission.num_requests,
            stats.num_running + stats.num_waiting,
        )

    def wait_for(self, num_open: int, num_admitted: int, num_in_engine: int) -> None:
        wanted = (num_open, num_admitted, num_in_engine)
        wait_until(lambda: self.held == wanted, f"{wanted} is never held", timeout=LONG)

    def connection(self) -> AbstractContextManager[Connection]:
        return self.site.connection()

    def check_it_serves(self) -> None:
        """Fail unless a request is served, and nothing is left behind it."""
        assert split(self.site.ask(request(CHATS, "close", max_tokens=2)))[0] == 200
        self.wait_for(0, 0, 0)


@contextmanager
def serving(
    runner: type[Speaker] = Speaker, tokenizer: ByteTokenizer | None = None, **settings: Any
) -> Iterator[Server]:
    manager = speaking_manager(
        b"Hello!",
        runner=runner,
        tokenizer=tokenizer or Marked(*QWEN),
        num_blocks=1024,
        embeddings=Embeddings(pooling=PoolingType.LAST, size=4),
    )
    with speaking_app(manager, **settings) as app, running(app) as site:
        manager.get(MODEL_ID)
        yield Server(site, app.state.service)


def request(path: str, connection: str = "keep-alive", **fields: Any) -> bytes:
    body = json.dumps({"model": MODEL_ID, **BODIES[path], **fields}).encode()
    head = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        f"Connection: {connection}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*head, "", ""]).encode() + body


@contextmanager
def all_busy(threads: WorkerThreads) -> Iterator[None]:
    """Keep all threads of a kind busy."""
    stage = Stage()
    futures = [threads._executor.submit(stage.wait) for _ in range(threads.num_threads)]
    wait_until(lambda: stage.num_there == threads.num_threads, "not all are busy")
    try:
        yield
    finally:
        stage.open()
        for future in futures:
            future.result(LONG)


@pytest.mark.parametrize("part", ["head", "body"])
def test_one_that_leaves_while_it_sends(part: str) -> None:
    with serving() as server:
        whole = request(CHATS)
        with server.connection() as connection:
            connection.send(whole[:20] if part == "head" else whole[:-5])
            if part == "body":
                server.wait_for(1, 0, 0)
        server.check_it_serves()


def test_one_that_leaves_while_its_body_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, read_json = Stage(), json_body.read_json

    def read_slowly(body: bytes) -> Any:
        if len(body) > json_body.LARGE:
            stage.wait()
        return read_json(body)

    monkeypatch.setattr(json_body, "read_json", read_slowly)
    with serving() as server:
        with server.connection() as connection:
            connection.send(request(CHATS, user="x" * (json_body.LARGE + 1)))
            wait_until(lambda: stage.num_there == 1, "it is not validated")
            server.wait_for(1, 0, 0)
        server.wait_for(0, 0, 0)
        server.check_it_serves()
        stage.open()


@pytest.mark.parametrize("path", BODIES)
def test_one_that_leaves_while_it_waits_for_a_thread(path: str) -> None:
    with serving() as server:
        with all_busy(server.service.threads.prompts):
            with server.connection() as connection:
                connection.send(request(path))
                server.wait_for(1, 1, 0)
            server.wait_for(0, 0, 0)
        server.check_it_serves()


def test_one_that_leaves_while_its_prompt_is_tokenized() -> None:
    tokenizer = SlowTokenizer()
    tokenizer.stage = Stage()
    with serving(tokenizer=tokenizer) as server:
        with server.connection() as connection:
            connection.send(request("/v1/completions", prompt="slow"))
            wait_until(lambda: tokenizer.stage.num_there == 1, "it is not tokenized")
        server.wait_for(0, 0, 0)
        server.check_it_serves()
        tokenizer.stage.open()


class EndlessTemplate(ByteTokenizer):
    """Has a template that renders for ever, in a process that is not ended for it."""

    special_tokens_map: Final[Mapping[str, str]] = {}

    def get_chat_template(self, name: str | None, tools: Any) -> str | None:
        return "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("path", [CHATS, "/v1/messages/count_tokens"])
def test_one_that_leaves_while_its_prompt_is_rendered(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = SandboxLimits(cpu_seconds=1000)
    sandbox = Sandbox(template_process.__file__, limits, wall_seconds=1000, num_processes=1)
    monkeypatch.setattr(model_template, "SANDBOX", sandbox)
    with serving(tokenizer=EndlessTemplate()) as server:
        with server.connection() as connection:
            connection.send(request(path))
            wait_until(lambda: not sandbox._free, "it is not rendered")
        server.wait_for(0, 0, 0)
        wait_until(lambda: bool(sandbox._free), "the process is still held", timeout=LONG)
    sandbox.close()


def test_one_that_leaves_while_its_own_template_is_rendered() -> None:
    """Its process has two seconds; it is ended before, and so is the thread that waits."""
    with serving(allow_request_chat_template=True) as server:
        template = EndlessTemplate().get_chat_template(None, None)
        for _ in range(3):
            with server.connection() as connection:
                connection.send(request(CHATS, chat_template=template))
                server.wait_for(1, 1, 0)
            server.wait_for(0, 0, 0)
        server.check_it_serves()


def test_one_that_leaves_while_it_waits_for_its_grammar() -> None:
    with serving() as server:
        with all_busy(server.service.threads.grammars):
            with server.connection() as connection:
                connection.send(request(CHATS, response_format={"type": "json_object"}))
                server.wait_for(1, 1, 0)
            server.wait_for(0, 0, 0)
        server.check_it_serves()


@contextmanager
def stepping(**settings: Any) -> Iterator[tuple[Server, Callable[[], None]]]:
    """Serve with steps that the test makes; it begins with one."""

    class Runner(SteppingSpeaker):
        steps = threading.Semaphore(0)

    def step() -> None:
        """Let the step that has begun end, and wait for the next one."""
        num_begun = Runner.num_begun
        Runner.steps.release()
        wait_until(lambda: Runner.num_begun > num_begun, "no step follows")

    with serving(Runner, **settings) as server:
        try:
            yield server, step
        finally:
            Runner.steps.release(1000)


STREAMED: Final = (
    *(CHATS, "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/infill", "/api/chat", "/api/generate"),
)
WHOLE: Final = ("/v1/responses/compact", "/v1/decisions", "/v1/systemone", "/api/embed")


@pytest.mark.parametrize(
    ("path", "stream"),
    [*product(STREAMED, (False, True)), *product(WHOLE, (False,))],
)
def test_one_that_leaves_in_the_engine(path: str, stream: bool) -> None:
    """It waits to be accepted, waits in the queue, and is read and answered; in each a step goes on."""
    with stepping(max_num_seqs=1) as (server, step), server.connection() as first:
        first.send(request(CHATS, max_tokens=5))
        server.wait_for(1, 1, 1)
        for num_steps in (0, 1):
            with server.connection() as connection:
                connection.send(request(path, stream=stream))
                server.wait_for(2, 2, 2)
                for _ in range(num_steps):
                    step()
            server.wait_for(1, 1, 1)


def test_no_live_client_is_rejected_for_those_that_have_left() -> None:
    """All places are taken by clients that leave while a step goes on; the next one gets one."""
    with stepping(max_num_seqs=1, max_queued_requests=8) as (server, _):
        num_places = server.service.admission.limits.max_requests(Priority.NORMAL)
        for _ in range(3):
            with ExitStack() as leavers:
                for _ in range(num_places):
                    leavers.enter_context(server.connection()).send(request(CHATS))
                server.wait_for(num_places, num_places, num_places)
            with server.connection() as live:
                live.send(request(CHATS, max_tokens=1))
                server.wait_for(1, 1, 1)


def test_an_exception_after_admission_loses_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is raised: here by what follows the engine's acceptance, and by the response."""
    places = (
        "app.api.openai.chat.router.ChatResponseBuilder",
        "app.api.openai.chat.router.respond",
        "app.generation.submit.Choice",
    )
    with serving() as server:
        for place in places:
            with monkeypatch.context() as patch:
                patch.setattr(place, raise_a_bug)
                assert split(server.site.ask(request(CHATS, "close")))[0] == 500
            server.wait_for(0, 0, 0)
        server.check_it_serves()


def raise_a_bug(*_: object, **__: object) -> None:
    raise RuntimeError("a bug")
