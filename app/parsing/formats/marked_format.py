"""Messages in which markers set reasoning and calls off from the content."""

from dataclasses import dataclass, replace

from app.parsing.formats.either_grammar import either
from app.parsing.formats.message_parser import MessageParser
from app.parsing.grammars.marker_tokens import special_tokens
from app.parsing.message_format import MessageSpec
from app.parsing.output_format import GrammarSpec, OutputFormat
from app.parsing.reasoning.reasoning_grammar import (
    ReasoningState,
    after_reasoning,
    reasoning_state,
)
from app.parsing.reasoning.reasoning_markers import ReasoningMarkers
from app.parsing.reasoning.reasoning_parser import ReasoningParser
from app.parsing.reasoning.thinking_limit import marked_limit
from app.parsing.tool_spec import AllowedTools, ToolChoice
from app.parsing.tools.tool_format import ToolFormat
from batching import ModelInfo, ThinkingLimit


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """Reasoning between two markers, if the model reasons, and calls in a format of their own."""

    model: ModelInfo
    reasoning: ReasoningMarkers | None
    tools: ToolFormat
    has_channels = False

    @property
    def is_native(self) -> bool:
        return self.tools.is_native

    @property
    def num_id_characters(self) -> int | None:
        return self.tools.num_id_characters

    def output(self, spec: MessageSpec, prompt: str) -> OutputFormat:
        markers = self.reasoning
        state = "none" if markers is None else reasoning_state(prompt, spec.begun, markers)
        grammar = self._grammar(spec)
        if grammar is not None and markers is not None:
            text = after_reasoning(grammar.grammar, markers, self.model.tokenizer, state)
            grammar = replace(grammar, grammar=text)

        new_calls = None
        if spec.tools:
            new_calls = self.tools.parsers(spec.tools, is_parallel=spec.is_parallel)

        def new_parser() -> MessageParser:
            reasoning = None
            if markers is not None:
                reasoning = ReasoningParser(
                    markers.start,
                    markers.end,
                    around_content=markers.around_content,
                    is_open=state == "open",
                )
            return MessageParser(reasoning, None if new_calls is None else new_calls())

        visible = [*(markers.all if markers else ()), *(self.tools.markers if spec.tools else ())]
        return OutputFormat(
            grammar=grammar,
            new_parser=new_parser,
            visible_special_ids=special_tokens(self.model, visible),
            thinking=self._limit(spec, prompt, state),
        )

    def _limit(self, spec: MessageSpec, prompt: str, state: ReasoningState) -> ThinkingLimit | None:
        budget, markers = spec.thinking_budget, self.reasoning
        if budget is None or markers is None:
            return None
        if budget == 0 and state == "closed":
            # The template has skipped it.
            return None
        begun = spec.begun
        if state == "open":
            begun = prompt[prompt.rfind(markers.start) :]
        return marked_limit(
            budget,
            markers,
            self.model.tokenizer,
            begun=begun,
            is_first_only=bool(spec.tools) or spec.content is not None,
        )

    def _grammar(self, spec: MessageSpec) -> GrammarSpec | None:
        content = None if spec.is_call else spec.content
        if not spec.tools:
            return content
        choice = spec.tool_choice if content is None else _required(spec.tool_choice)
        calls = self.tools.grammar(spec.tools, choice, is_parallel=spec.is_parallel)
        if content is None or calls is None:
            return content if calls is None else GrammarSpec(calls, "tools")
        return replace(content, grammar=either(calls, content.grammar))


def _required(choice: ToolChoice) -> ToolChoice:
    """Return the choice that lets the same tools be called, and nothing else."""
    return replace(choice, mode="required") if isinstance(choice, AllowedTools) else "required"
