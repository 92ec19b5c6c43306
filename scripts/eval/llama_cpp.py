"""lm-evaluation-harness on llama.cpp, with the same GGUF file: the model `llama-cpp`.

`python -m scripts.eval.llama_cpp run --model llama-cpp --model_args model=FILE ...` has the harness's command
line; it needs llama-cpp-python.  Over HTTP llama.cpp cannot be scored: its own server rejects `echo`, and
that of llama-cpp-python gives each token the score of its neighbor where a prompt has no BOS token.
"""

from collections.abc import Sequence
from typing import Any, Final

import llama_cpp
import numpy as np
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model

_CONTEXT: Final = 2048


@register_model("llama-cpp")
class LlamaCpp(TemplateLM):  # type: ignore[misc]  # without annotations
    """llama.cpp as it computes by default, one text at a time; its KV cache is float16."""

    def __init__(self, model: str, **_: object) -> None:
        """`_` is what the harness tells every model: a batch size and a device."""
        super().__init__()
        self._llama = llama_cpp.Llama(model, n_ctx=_CONTEXT, logits_all=True, verbose=False)

    @property
    def eot_token_id(self) -> int:
        return int(self._llama.token_eos())

    @property
    def prefix_token_id(self) -> int:
        """The one that the harness puts before a text over HTTP."""
        return int(self._llama.token_bos())

    def tok_encode(self, string: str, *_: object, **__: object) -> list[int]:
        return list(self._llama.tokenize(string.encode(), add_bos=False, special=True))

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        return [self._score(context, continuation) for _, context, continuation in requests]

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        self._llama.reset()
        self._llama.eval([*context, *continuation])
        rows = np.arange(len(context) - 1, len(context) + len(continuation) - 1)
        logits = self._llama.scores[rows].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        chosen = logprobs[np.arange(len(continuation)), continuation]
        return float(chosen.sum()), bool((logprobs.argmax(axis=-1) == continuation).all())

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return [self._score([self.prefix_token_id], text)[0] for text in texts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._complete(*request.args) for request in requests]

    def _complete(self, prompt: str, options: dict[str, Any]) -> str:
        limits = {"max_tokens": options["max_gen_toks"], "stop": options["until"]}
        reply = self._llama(prompt, temperature=0.0, repeat_penalty=1.0, **limits)
        return str(reply["choices"][0]["text"])


if __name__ == "__main__":
    cli_evaluate()
