"""Messages of gpt-oss: recognised, constrained and parsed."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.parsing.grammars.marker_tokens import special_tokens, tokens_of
from app.parsing.harmony.harmony_grammar import ROLE, HarmonyGrammar
from app.parsing.harmony.harmony_parser import (
    CHANNEL,
    END,
    ENDS,
    MARKERS,
    MESSAGE,
    REASONING_CHANNEL,
    START,
    HarmonyParser,
)
from app.parsing.message_format import MessageSpec
from app.parsing.output_format import GrammarSpec, OutputFormat
from app.parsing.reasoning.thinking_limit import Closing
from batching import ModelInfo, ThinkingLimit


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """Every part of a message has a header with its channel; all of it can be enforced."""

    model: ModelInfo
    tokens: Mapping[str, int]
    is_native = has_channels = True
    num_id_characters = None

    def output(self, spec: MessageSpec, prompt: str) -> OutputFormat:
        begun = _begun(prompt)
        of_part = begun.removeprefix(START + ROLE)

        def new_parser() -> HarmonyParser:
            return HarmonyParser(
                has_tools=bool(spec.tools),
                is_parallel=spec.is_parallel,
                begun=of_part,
            )

        return OutputFormat(
            grammar=self._grammar(spec, begun),
            new_parser=new_parser,
            visible_special_ids=special_tokens(self.model, MARKERS),
            thinking=self._limit(spec, of_part),
        )

    def _limit(self, spec: MessageSpec, begun: str) -> ThinkingLimit | None:
        if spec.thinking_budget is None:
            return None
        # With tools the answer may be a call, which has another header.
        header = "" if spec.tools else f"{CHANNEL}final{MESSAGE}"
        return ThinkingLimit(
            num_tokens=spec.thinking_budget,
            start=f"{CHANNEL}{REASONING_CHANNEL}{MESSAGE}".encode(),
            ends=tuple(marker.encode() for marker in (START, CHANNEL, *ENDS)),
            closings=Closing("", END, f"{START}{ROLE}{header}").tokens(self.model.tokenizer),
            begun=begun.encode(),
        )

    def _grammar(self, spec: MessageSpec, begun: str) -> GrammarSpec | None:
        text = HarmonyGrammar(self.tokens, self.model.eos_token_ids).of(spec)
        if text is None:
            return None
        param = "tools" if spec.content is None or spec.is_call else spec.content.param
        # A grammar constrains what the completion adds to a text, not the text that it continues.
        header = "".join(begun.rpartition(MESSAGE)[:2]) or begun
        return GrammarSpec(
            text, param, self.model.tokenizer.encode(header, add_special_tokens=False)
        )


def harmony_format(model: ModelInfo) -> HarmonyFormat | None:
    """Return the format of a model that has a token for each of harmony's markers, else None."""
    tokens = tokens_of(model.tokenizer, MARKERS)
    if len(tokens) < len(MARKERS):
        return None
    return HarmonyFormat(model, tokens)


def _begun(prompt: str) -> str:
    """Return the part that a rendered prompt has begun but not ended, from its start on."""
    start = prompt.rfind(START + ROLE)
    begun = prompt[start:] if start >= 0 else ""
    is_open = not any(marker in begun for marker in ENDS)
    return begun if is_open else ""
