"""The prompts of a reranker: a query and a document in its template.  Blocking."""

from collections.abc import Sequence
from dataclasses import dataclass

from app.prompts.render import completion_prompt
from app.prompts.templates.model_template import render_turns, template_variables
from app.prompts.templates.template_sandbox import SANDBOX, RendererLost, TemplateFailed, rendered
from batching import InvalidRequest, ModelInfo, Reranker, check_input


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankPrompts:
    """Writes the prompts of one request.

    instruction: says when a document is relevant; None leaves that to the template.
    max_prompt_tokens, max_document_tokens: beyond these a document loses its end; None is no limit.
    """

    model: ModelInfo
    reranker: Reranker
    instruction: str | None = None
    max_prompt_tokens: int | None = None
    max_document_tokens: int | None = None

    def write(self, param: str, query: str, document: str) -> list[int]:
        """Return the tokens of a prompt.

        Raises:
            InvalidRequest: the template fails.
            RendererLost: the process that renders was killed, or had no time.
            InputTooLong: the prompt does not fit the context; the error names `param`.
        """
        document_ids = self._encode(document)
        num_kept = len(document_ids)
        if self.max_document_tokens is not None:
            num_kept = min(num_kept, self.max_document_tokens)
        prompt = self._prompt(query, document, document_ids, num_kept)
        limit = self.max_prompt_tokens
        while limit is not None and len(prompt) > limit and num_kept > 0:
            num_kept = max(0, num_kept - (len(prompt) - limit))
            prompt = self._prompt(query, document, document_ids, num_kept)
        # One more token says what the model makes of it.
        check_input(self.model, param, prompt, self.model.max_model_len - 1)
        return prompt

    def _prompt(
        self, query: str, document: str, document_ids: Sequence[int], num_kept: int
    ) -> list[int]:
        if num_kept < len(document_ids):
            document = self.model.tokenizer.decode(document_ids[:num_kept])
        return self._encode(self._rendered(query, document))

    def _encode(self, text: str) -> list[int]:
        return completion_prompt(self.model, text, add_special_tokens=False)

    def _rendered(self, query: str, document: str) -> str:
        turns = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        if self.instruction is not None:
            turns = [{"role": "system", "content": self.instruction}, *turns]
        template = self.reranker.template
        try:
            if template is None:
                return render_turns(self.model, turns, add_generation_prompt=True)
            variables = template_variables(self.model.tokenizer, {"add_generation_prompt": True})
            return rendered(SANDBOX, template, turns, variables)
        except RendererLost:
            raise
        # A template is a program of the model's authors, which may raise anything.
        except Exception as error:
            kind = error.kind if isinstance(error, TemplateFailed) else type(error).__name__
            message = f"the reranker's template fails with this request ({kind})"
            raise InvalidRequest("query", message) from None
