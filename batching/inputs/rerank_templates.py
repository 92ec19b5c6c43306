"""Prompts of rerankers whose files have no template of them; each is the format of its training."""

from typing import Final

_QWEN3: Final = (
    "{%- set found = namespace(task='Given a web search query, retrieve relevant passages that "
    "answer the query', query='', document='') -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'query' -%}{%- set found.query = message.content -%}"
    "{%- elif message.role == 'document' -%}{%- set found.document = message.content -%}"
    "{%- else -%}{%- set found.task = message.content -%}{%- endif -%}"
    "{%- endfor -%}"
    "{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query "
    'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n'
    "<|im_start|>user\\n<Instruct>: ' + found.task + '\\n<Query>: ' + found.query"
    " + '\\n<Document>: ' + found.document"
    " + '<|im_end|>\\n<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' -}}"
)

RERANK_TEMPLATES: Final = {"qwen3": _QWEN3}

# A part of the names of models that have such a prompt, in small letters.
_NAMES: Final = {"qwen3-reranker": _QWEN3}


def known_template(*names: str) -> str | None:
    """Return the template of a model of these names; None if none is known."""
    for part, template in _NAMES.items():
        if any(part in name.lower() for name in names):
            return template
    return None
