"""`python -m tests.support.scripted_server`: the server, with a model that does as it is told.

The tokenizer and the chat template are the bundled model's, and everything above the model runner is real.
The model reads its prompt as text: the last `[[say TEXT]]` or `[[call NAME key=value; key=value]]` in it
decides what it writes, and once the result of a call has followed, it repeats the result's beginning.  After
`[[count]]` it counts, slowly, until the client leaves, and to N after `[[count N]]`; `[[slow TEXT]]` is said after
more than a minute, and `[[held PATH TEXT]]` once there is a file at PATH.  The command line is that of `python -m app`; the context is `MLX_SERVER_MAX_MODEL_LEN`, 65,536 without it.  With
`MLX_SERVER_KV_CACHE_DIR` each block is kept, in memory, as a MiB.

All models of `MLX_SERVER_MODELS` are that one, and are loaded at once unless they name a file, as in
`slow=/tmp/slow`: their load is as far as the number in that file says, is done at 1, and fails with any other text.
The folders of `MLX_SERVER_ADAPTERS` are written first; what an adapter says is what the model says.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from threading import Event
from typing import Any, Final

from app.cli import run
from app.flags import parse_flags
from app.observability.logs import configure, print_stderr
from app.settings import load_settings
from app.settings.models import served_models
from batching import (
    AdapterFile,
    EngineConfig,
    ModelInfo,
    ModelLoadError,
    NoVision,
    SchedulerManager,
    VisionModel,
)
from batching.backend.gguf.tokenizer import build_tokenizer
from batching.backend.loader import BUNDLED_MODEL, resolve
from batching.batch_inference import BatchInferenceEngine
from batching.block_store.entry_file import Entry
from batching.config import SchedulerConfig
from batching.engine.load_slices import LoadSlices
from batching.engine.loaded_engine import LoadedEngine
from batching.engine.memory_use import MemoryUse
from batching.inputs.sequence_spec import SequenceSpec
from batching.model_files.gguf_header import read_header
from batching.model_info.vision import TEXT_ONLY
from batching.scheduler import UNLIMITED, ContinuousBatchingScheduler, StoreLimits
from batching.steps.sequences import Sequences, SequenceState, recorded
from batching.steps.step_plan import Slice, SliceOutput, StepPlan
from tests.support.block_stores import FakeStore
from tests.support.served_adapters import LAYERS, write_adapter

_CONTEXT: Final = 65_536
_BLOCK_SIZE: Final = 32
_DIRECTIVE: Final = re.compile(r"\[\[(say|call|count|slow|held) ?(.*?)\]\]", re.DOTALL)
_HELD: Final = re.compile(r"\[\[held (\S+) ")
_RESULT: Final = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
_NUM_REPEATED: Final = 200  # characters of a result
_MAX_COUNT: Final = 1999
_COUNTED: Final = "0 1 2 "
_STEP_TIME: Final = 0.02  # seconds, while it counts or all prompts are slow
_PREFILL_TIME: Final = 65.0  # seconds, from a request's arrival until it says something slowly
_MEMORY: Final = MemoryUse(weights=3 << 30, kv_cache=3 << 29)
_BLOCK: Final = bytes(1 << 20)
_POLL_INTERVAL: Final = 0.02  # seconds, while a load waits for its file
# A prompt without a directive: clients ask for titles and summaries by themselves.
_SILENCE: Final = "Understood."


def answer(prompt: str) -> str:
    """Return what the model writes after a prompt."""
    directives = list(_DIRECTIVE.finditer(prompt))
    if not directives:
        return _SILENCE
    directive = directives[-1]
    if result := _RESULT.search(prompt, directive.end()):
        return f"The tool returned: {result[1][:_NUM_REPEATED]}"
    kind, text = directive.groups()
    if kind in ("say", "slow"):
        return text
    if kind == "held":
        return text.partition(" ")[2]
    if kind == "count":
        return " ".join(map(str, range(int(text or _MAX_COUNT) + 1)))
    name, _, pairs = text.partition(" ")
    arguments = dict(pair.split("=", 1) for pair in pairs.split("; ") if pair)
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class SlowScheduler(ContinuousBatchingScheduler):
    """Keeps prompts with `[[slow` or `[[held` prefilling, beside others; steps stay short."""

    def __init__(self, config: SchedulerConfig, tokenizer: Any, store: FakeStore | None) -> None:
        super().__init__(config, store)
        self._tokenizer = tokenizer
        self._due: dict[int, float] = {}
        self._gates: dict[int, Path] = {}

    def schedule(
        self,
        max_prefill_tokens: int | None = None,
        max_image_bytes: float = inf,
        store: StoreLimits = UNLIMITED,
        *,
        now: float = 0.0,
    ) -> StepPlan:
        plan = super().schedule(max_prefill_tokens, max_image_bytes, store, now=now)
        for started in plan.started:
            prompt = self._tokenizer.decode(started.spec.prompt)
            self._due[started.sequence_id] = now + _PREFILL_TIME * ("[[slow" in prompt)
            if held := _HELD.search(prompt):
                self._gates[started.sequence_id] = Path(held[1])
        slices = tuple(s for s in plan.slices if self._may_run(s.sequence_id, now))
        return replace(plan, slices=slices)

    def _may_run(self, sequence_id: int, now: float) -> bool:
        gate = self._gates.get(sequence_id)
        return self._due[sequence_id] <= now and (gate is None or gate.exists())


class ScriptedRunner:
    """Writes the tokens of `answer` for each request; it has no KV pool."""

    vision: VisionModel | NoVision = TEXT_ONLY

    def __init__(self, tokenizer: Any, eos_token_id: int, store: FakeStore | None = None) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._eos_token_id = eos_token_id
        self._answers: dict[int, list[int]] = {}
        self._counting: set[int] = set()
        self._sequences = Sequences()

    @staticmethod
    def tokenizer() -> Any:
        return build_tokenizer(read_header(resolve(BUNDLED_MODEL)))

    def run(self, plan: StepPlan) -> Sequence[SliceOutput]:
        states = self._sequences.begin(plan)
        for order in plan.saves:
            assert self._store is not None
            self._store.put(Entry(order.key, order.parent, order.token_ids, [_BLOCK]))
        if not plan.slices:
            Event().wait(_STEP_TIME)
        if any(s.sequence_id in self._counting for s in plan.slices):
            print_stderr("the scripted model counts")
            Event().wait(_STEP_TIME)
        return [recorded(s, states, self._output(s, states)) for s in plan.slices]

    def reset(self) -> None:
        self._sequences.forget()

    def _answer(self, spec: SequenceSpec) -> str:
        return answer(self._tokenizer.decode(spec.prompt))

    def _output(self, s: Slice, states: Mapping[int, SequenceState]) -> SliceOutput:
        own = [self._next(states[s.sequence_id], i) for i in range(s.num_samples)]
        return SliceOutput([*own, *(self._next(states[fork], 0) for fork in s.forks)])

    def _next(self, sequence: SequenceState, index: int) -> int:
        sequence_id = sequence.sequence_id
        if sequence_id not in self._answers:
            text = self._answer(sequence.spec)
            if text.startswith(_COUNTED):
                self._counting.add(sequence_id)
            token_ids = self._tokenizer.encode(text, add_special_tokens=False)
            self._answers[sequence_id] = [*token_ids, self._eos_token_id]
        tokens = self._answers[sequence_id]
        return tokens[
            min(len(sequence.token_ids) - sequence.num_prompt_tokens + index, len(tokens) - 1)
        ]


def follow(path: Path, slices: LoadSlices) -> None:
    """Be as far with a load as a file says, until it says 1.

    Raises:
        ModelLoadError: it says something else.
    """
    while (text := path.read_text(encoding="utf-8")) != "1":
        try:
            progress = float(text)
        except ValueError:
            raise ModelLoadError(text) from None
        slices.pause(progress)
        slices.in_thread(partial(Event().wait, _POLL_INTERVAL))


def build(
    config: EngineConfig, slices: LoadSlices, runner: type[ScriptedRunner] = ScriptedRunner
) -> LoadedEngine:
    if (path := Path(config.model)).is_file():
        follow(path, slices)
    tokenizer = runner.tokenizer()
    context = config.max_model_len or _CONTEXT
    limits: SchedulerConfig = config.scheduler_config(2 * context // _BLOCK_SIZE, context)
    store = None if config.kv_cache_dir is None else FakeStore()
    engine = BatchInferenceEngine(
        SlowScheduler(limits, tokenizer, store), runner(tokenizer, tokenizer.eos_token_id, store)
    )
    model = ModelInfo(
        config.model_id,
        tokenizer,
        frozenset(tokenizer.eos_token_ids),
        len(tokenizer.get_vocab()),
        limits.max_request_tokens,
        vision=runner.vision,
        adapters=LAYERS,
    )
    return LoadedEngine(engine, model, ("a scripted model",), _MEMORY)


def main(runner: type[ScriptedRunner] = ScriptedRunner) -> int:
    settings = load_settings(parse_flags(sys.argv[1:]))
    configure(settings.log_level, settings.log_format)
    make = partial(build, runner=runner)
    models = served_models(settings)
    manager = SchedulerManager(models, make)
    for model in models:
        for name, folder in model.adapters.items():
            file = AdapterFile(write_adapter(Path(folder)), name)
            manager.adapters.add(name, model.model_id, file, source=folder)
    return run(settings, manager)


if __name__ == "__main__":
    sys.exit(main())
