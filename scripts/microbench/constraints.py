"""What grammars cost a batch: its throughput with half of the rows constrained, and with none."""

from statistics import median
from time import perf_counter
from typing import Final

from batching.backend.builder.engine import build_engine
from batching.config import EngineConfig
from batching.constraints.grammar import Grammar, GrammarCompiler
from batching.constraints.grammar_text import json_schema_grammar
from batching.engine.loaded_engine import LoadedEngine
from batching.inputs.sampling_params import SamplingParams
from batching.inputs.sequence_spec import SequenceSpec
from batching.request import BatchRequest
from scripts.microbench.timing import QUICK, Pace, Result, Timing

_NUM_ROWS: Final = 16
_NUM_TOKENS: Final = 40
# So wide that no completion ends before the last step.
_SCHEMA: Final = {
    "type": "array",
    "minItems": 40,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["plant", "animal", "stone"]},
            "sizes": {"type": "array", "items": {"type": "number"}},
        },
        "required": ["name", "kind", "sizes"],
        "additionalProperties": False,
    },
}


def run_constraints(model: str, pace: Pace) -> Result:
    """Time decode steps of 16 rows in turns; raise ModelLoadError if there is no such model."""
    config = EngineConfig(model=model, model_id=model, max_num_seqs=_NUM_ROWS, max_draft_tokens=0)
    loaded = build_engine(config)
    info = loaded.model
    compiler = GrammarCompiler(info.tokenizer, info.vocab_size, info.eos_token_ids)
    compiled = [
        compiler.compile(json_schema_grammar(_SCHEMA), param="schema")
        for _ in range(_NUM_ROWS // 2)
    ]
    free: list[float] = []
    half: list[float] = []
    for turn in range(1 if pace == QUICK else pace.num_rounds):
        free += _steps(loaded, [], turn)
        half += _steps(loaded, compiled, turn)
    kept = 100 * median(free) / median(half)
    return Result(
        [
            Timing.of(f"{_NUM_ROWS} rows", free),
            Timing.of(f"{_NUM_ROWS} rows, half of them constrained", half),
        ],
        {"throughput that is left": kept},
    )


def _steps(loaded: LoadedEngine, grammars: list[Grammar], turn: int) -> list[float]:
    """Return the seconds of the steps that have all rows."""
    engine = loaded.engine
    for row in range(_NUM_ROWS):
        prompt = [1 + turn, 2 + row, *range(100, 140)]
        constraint = grammars[row] if row < len(grammars) else None
        sampling = SamplingParams(temperature=0.0)
        engine.add(
            BatchRequest(
                row,
                SequenceSpec(
                    prompt=tuple(prompt),
                    max_tokens=_NUM_TOKENS,
                    sampling=sampling,
                    constraint=constraint,
                ),
            )
        )
    while engine.stats().num_waiting or engine.stats().num_prefilling:
        engine.step()
    seconds: list[float] = []
    while engine.stats().num_running == _NUM_ROWS:
        started = perf_counter()
        engine.step()
        seconds.append(perf_counter() - started)
    while engine.has_work:
        engine.step()
    return seconds[1:-1]
