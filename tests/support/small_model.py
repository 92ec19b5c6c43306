"""A chat model of a few kilobytes: a server starts on it in a second or two, and answers in milliseconds.

Every byte is a token, its weights are random, and mlx-lm's plain forward pass says what it answers.
"""

import atexit
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

# Before MLX: a fast BLAS must be loaded first.
import batching.backend  # noqa: F401

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from mlx_lm.utils import save_config, save_model
from transformers import PreTrainedTokenizerFast

from tests.support.byte_tokenizers import byte_vocabulary

START, END = "<|im_start|>", "<|im_end|>"
CONTEXT: Final = 8192
_SPECIAL: Final = (START, END)
_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_NUM_BYTES: Final = 256
_CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": _NUM_BYTES + len(_SPECIAL),
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "eos_token_id": _NUM_BYTES + _SPECIAL.index(END),
}
# What it is asked, and how many tokens its answer has: the last one ends a character, so that a stream has it, too.
_QUESTIONS: Final = (("What is it?", 8), ("Name three.", 13), ("Tell me all.", 13))
# The lead of each token over the next: far more than what the order of a sum changes.
_MARGIN: Final = 0.01


@dataclass(frozen=True)
class Case:
    """A question, and the tokens that the model alone answers it with, greedily."""

    messages: list[dict[str, str]]
    num_tokens: int
    text: str


@cache
def small_model() -> Path:
    """Return the directory of the model, which is there until this process ends."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    directory = Path(folder.name) / "small"
    directory.mkdir()
    save_model(directory, _model())
    save_config(_CONFIG, directory / "config.json")
    _tokenizer().save_pretrained(directory)
    return directory


@cache
def cases() -> tuple[Case, ...]:
    return tuple(answered(question, num_tokens) for question, num_tokens in _QUESTIONS)


def answered(question: str, num_tokens: int) -> Case:
    """Ask the model alone, without a cache."""
    model, tokenizer = _model(), _tokenizer()
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    token_ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(mx.array([token_ids]))[0, -1]
        best, lead = _first_and_lead(logits)
        assert lead > _MARGIN, f"{question}: a near tie at {len(token_ids)}"
        token_ids.append(best)
    answer = token_ids[-num_tokens:]
    assert _CONFIG["eos_token_id"] not in answer, f"{question}: the answer ends by itself"
    return Case(messages, num_tokens, tokenizer.decode(answer))


def _first_and_lead(logits: mx.array) -> tuple[int, float]:
    values = np.array(logits)
    second, first = np.argsort(values)[-2:]
    return int(first), float(values[first] - values[second])


@cache
def _model() -> nn.Module:
    mx.random.seed(5)
    model: nn.Module = llama.Model(llama.ModelArgs.from_dict(_CONFIG))
    # Normal initial weights make answers that hardly differ from token to token.
    model.apply(lambda weight: weight * 3 if weight.ndim > 1 else weight)
    model.eval()
    return model


@cache
def _tokenizer() -> Any:
    make: Any = PreTrainedTokenizerFast  # it has no annotations
    tokenizer = make(tokenizer_object=byte_vocabulary(_SPECIAL), eos_token=END)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer
