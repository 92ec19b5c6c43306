"""A model that says a given text, and the app over it: everything above the runner is real."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

import httpx
from fastapi import FastAPI
from jinja2 import TemplateError

from app.admission.admitted_request import AdmittedRequest, Deadline
from app.http.client import ANONYMOUS
from app.main import create_app
from app.observability.tracing import Tracer
from app.server_state import ServerState
from app.settings import Settings
from app.storage.storage import Storage
from batching import (
    AsyncEngine,
    EngineConfig,
    MemoryNeed,
    ModelInfo,
    ModelState,
    NoVision,
    Priority,
    SchedulerManager,
    ServedModel,
    VisionModel,
)
from batching.adapters.adapter import NO_ADAPTERS, AdaptableLayers, NoAdapters
from batching.batch_inference import BatchInferenceEngine
from batching.config import SchedulerConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.model_info.vision import TEXT_ONLY
from batching.pooling import NO_EMBEDDINGS, Embeddings, NoEmbeddings, Reranker
from batching.scheduler import ContinuousBatchingScheduler
from batching.steps.sequences import SequenceState
from batching.steps.step_plan import SliceOutput, StepPlan
from tests.support.fakes import TokenRunner

MODEL_ID: Final = "fake/speaker"
END: Final = 256
VOCAB_SIZE: Final = 257
# So long that a request which never stops by itself is still there to be aborted.
ENDLESS_BLOCKS: Final = 1 << 15


class ByteTokenizer:
    """One token for each byte, and one that ends the text."""

    has_chat_template = True
    chat_template: str | None = (
        "{{ raise_exception('the system message comes first') }}{{ messages }}"
    )
    all_special_ids: Sequence[int] = (END,)
    has_thinking = False
    think_start: str | None = None
    think_end: str | None = None
    has_tool_calling = False
    tool_call_start: str | None = None
    tool_call_end: str | None = None
    tool_parser: Any = None
    num_tokens = VOCAB_SIZE
    end_token_ids = frozenset({END})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        end = b"" if skip_special_tokens else b"<end>"
        return b"".join(end if t == END else bytes([t]) for t in token_ids).decode(errors="replace")

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> Any:
        if any(message["role"] == "system" for message in conversation[1:]):
            raise TemplateError("the system message comes first")
        turns = [f"{message['role']}: {message['content']}\n" for message in conversation]
        text = "".join([*turns, "assistant:" * add_generation_prompt])
        if continue_final_message:
            text = text.removesuffix("\n")
        return self.encode(text) if tokenize else text


class Gate:
    """Holds an engine after the first token of an answer, until it is opened.

    An endless answer behind a gate is still there to be aborted, and floods no client meanwhile.
    """

    def __init__(self, *, is_open: bool) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self.was_given_up = False
        if is_open:
            self.open()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        self.reached.set()
        self.was_given_up = not self._open.wait(20)
        assert not self.was_given_up, "the test never opens the gate"


class Speaker(TokenRunner):
    """Says the same bytes to everybody, or tokens, then ends; without any it says `a` for ever."""

    def __init__(self, config: SchedulerConfig, answer: Sequence[int] | None, gate: Gate) -> None:
        super().__init__(config)
        self._answer = answer
        self._gate = gate

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        if any(not s.num_prompt_tokens for s in plan.slices):
            self._gate.wait()
        return super().run(plan)

    def _choose(self, sequence: SequenceState, prefix: list[int]) -> int:
        if self._answer is None:
            return ord("a")
        position = len(prefix) - sequence.num_prompt_tokens
        return self._answer[position] if position < len(self._answer) else END


class Breaking(Speaker):
    """Says the first bytes, then every step raises."""

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        assert self._answer is not None, "it breaks at the end of what it says"
        states = self.sequences.begin(plan)
        for s in plan.slices:
            sequence = states[s.sequence_id]
            if s.stop - sequence.num_prompt_tokens >= len(self._answer):
                raise RuntimeError("out of memory")
        return super().run(plan)


def speaking_manager(
    answer: Sequence[int] | None = b"Hello!",
    *,
    runner: type[Speaker] = Speaker,
    tokenizer: ByteTokenizer | None = None,
    num_blocks: int = 64,
    gate: Gate | None = None,
    model_ids: Sequence[str] = (MODEL_ID,),
    embeddings: Embeddings | NoEmbeddings = NO_EMBEDDINGS,
    reranker: Reranker | None = None,
    vision: VisionModel | NoVision = TEXT_ONLY,
    adapters: AdaptableLayers | NoAdapters = NO_ADAPTERS,
    may_load: threading.Event | None = None,
    **options: Any,
) -> SchedulerManager:
    """Return a manager whose models are not loaded yet; `options` are the manager's.

    may_load: a load goes on until it is set; None loads at once.
    """
    known = tokenizer or ByteTokenizer()

    def build(config: EngineConfig, slices: LoadSlices) -> LoadedEngine:
        while may_load is not None and not may_load.wait(0.001):
            slices.pause(0.5)
        limits = config.scheduler_config(config.num_blocks or 1, 1 << 20)
        model_runner = runner(limits, answer, gate or Gate(is_open=True))
        model_runner.vocab_size = known.num_tokens
        engine = BatchInferenceEngine(ContinuousBatchingScheduler(limits), model_runner)
        model = ModelInfo(
            config.model_id,
            known,
            known.end_token_ids,
            known.num_tokens,
            limits.max_request_tokens,
            has_jinja_template=hasattr(known, "get_chat_template"),
            embeddings=embeddings,
            reranker=reranker,
            vision=vision,
            adapters=adapters,
        )
        return LoadedEngine(engine, model, ("a speaker",))

    max_adapters = 2 if isinstance(adapters, AdaptableLayers) else 0
    configs = [
        EngineConfig(model="speaker", model_id=m, num_blocks=num_blocks, max_adapters=max_adapters)
        for m in model_ids
    ]
    models = [ServedModel(config=config, loads_at_start=config is configs[0]) for config in configs]
    return SchedulerManager(models, build, **options)


class Served:
    """The app, a client of it, and the engine behind it."""

    def __init__(
        self, app: FastAPI, client: httpx.AsyncClient, manager: SchedulerManager, gate: Gate
    ) -> None:
        self.app = app
        self.client = client
        self.manager = manager
        self.gate = gate

    @property
    def engine(self) -> AsyncEngine:
        return self.manager.get(MODEL_ID)

    async def chat(self, content: Any = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL_ID, "messages": [{"role": "user", "content": content}], **fields}
        return await self.post("/v1/chat/completions", body)

    async def complete(self, prompt: Any = "Hi", **fields: Any) -> httpx.Response:
        body = {"model": MODEL_ID, "prompt": prompt, **fields}
        return await self.post("/v1/completions", body)

    async def message(self, content: Any = "Hi", **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL_ID, "max_tokens": 256, "messages": messages, **fields}
        return await self.post("/v1/messages", body)

    async def post(self, path: str, body: Any) -> httpx.Response:
        # Not httpx's `json=`: that cannot write NaN or half of a surrogate pair, and others can.
        headers = {"Content-Type": "application/json"}
        return await self.client.post(path, content=json.dumps(body), headers=headers)

    @property
    def service(self) -> ServerState:
        service: ServerState = self.app.state.service
        return service

    def admitted(self) -> AdmittedRequest:
        """Return a request that was admitted."""
        admission = self.service.admission
        return AdmittedRequest(
            ticket=admission.admit(ANONYMOUS, Priority.NORMAL),
            deadline=Deadline(admission.clock(), None, admission.clock),
            on_finish=self.service.on_finish,
        )

    async def until(self, state: ModelState, model_id: str = MODEL_ID) -> None:
        """Wait until a model is in this state."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        end = self.manager.listeners.add(lambda: loop.call_soon_threadsafe(changed.set))
        while state not in (s.state for s in self.manager.statuses() if s.model_id == model_id):
            await changed.wait()
            changed.clear()
        end()

    async def num_unfinished(self) -> int:
        """Count the requests in the engine; those aborted before are gone, as jobs are in order."""
        self.gate.open()
        stats = await self.engine.stats()
        return stats.num_running + stats.num_waiting


@asynccontextmanager
async def served(
    answer: Sequence[int] | None = b"Hello!",
    *,
    runner: type[Speaker] = Speaker,
    tokenizer: ByteTokenizer | None = None,
    num_blocks: int = 64,
    is_gated: bool = False,
    tracer: Tracer | None = None,
    model_ids: Sequence[str] = (MODEL_ID,),
    embeddings: Embeddings | NoEmbeddings = NO_EMBEDDINGS,
    reranker: Reranker | None = None,
    vision: VisionModel | NoVision = TEXT_ONLY,
    storage: Storage | None = None,
    adapters: AdaptableLayers | NoAdapters = NO_ADAPTERS,
    may_load: threading.Event | None = None,
    capacity: int | None = None,
    need: Callable[[EngineConfig], MemoryNeed] = lambda _: MemoryNeed(),
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve a speaker without a network; bodies of streams arrive whole."""
    gate = Gate(is_open=not is_gated)
    manager = speaking_manager(
        answer,
        runner=runner,
        tokenizer=tokenizer,
        num_blocks=num_blocks,
        gate=gate,
        model_ids=model_ids,
        embeddings=embeddings,
        reranker=reranker,
        vision=vision,
        adapters=adapters,
        may_load=may_load,
        capacity=capacity,
        need=need,
    )
    app = create_app(manager, Settings.model_construct(**settings), tracer, storage)
    # An unexpected exception is answered, as it is behind a real server.
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield Served(app, client, manager, gate)
    finally:
        gate.open()
        manager.close()
        app.state.service.images.close()


@contextmanager
def speaking_app(manager: SchedulerManager | None = None, **settings: Any) -> Iterator[FastAPI]:
    """Make the app, for a server on a real socket."""
    manager = manager or speaking_manager()
    try:
        yield create_app(manager, Settings.model_construct(**settings))
    finally:
        manager.close()


@asynccontextmanager
async def served_endlessly(
    tokenizer: ByteTokenizer | None = None, **options: Any
) -> AsyncIterator[Served]:
    """Serve a speaker whose answers only end when they are aborted."""
    async with served(
        None, tokenizer=tokenizer, num_blocks=ENDLESS_BLOCKS, is_gated=True, **options
    ) as server:
        yield server
