"""A runner that gets its plans as bytes, as one on another machine does."""

from batching.constraints.grammar import Grammar
from batching.constraints.thinking import TokenBytes
from batching.steps.codec import decode, encode
from batching.steps.model_runner import ModelRunner
from batching.steps.step_plan import SliceOutput, StepPlan


def not_compiled(grammar: Grammar) -> Grammar:
    raise AssertionError("no grammar is expected")


class RemoteRunner:
    """Runs what it has read; that must be the plan that was written."""

    def __init__(self, runner: ModelRunner, token_bytes: TokenBytes | None = None) -> None:
        self._runner = runner
        self._token_bytes = token_bytes
        self.reset = runner.reset

    def run(self, plan: StepPlan) -> list[SliceOutput]:
        read = decode(encode(plan), not_compiled, self._token_bytes)
        assert read == plan
        assert str(read) == str(plan)
        return list(self._runner.run(read))
