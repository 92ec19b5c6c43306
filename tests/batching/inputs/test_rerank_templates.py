"""Templates give the prompts that rerankers were trained with."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batching.inputs.rerank_templates import RERANK_TEMPLATES, known_template

PAIR = [{"role": "query", "content": "A?"}, {"role": "document", "content": "B."}]


def rendered(name: str, *turns: dict[str, str]) -> str:
    # As transformers compiles templates.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(RERANK_TEMPLATES[name]).render(messages=turns)


def qwen3(task: str) -> str:
    return (
        "<|im_start|>system\n"
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
        f"<Instruct>: {task}\n<Query>: A?\n<Document>: B.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_qwen3s_prompt_has_its_task_or_the_instruction() -> None:
    task = "Given a web search query, retrieve relevant passages that answer the query"
    assert rendered("qwen3", *PAIR) == qwen3(task)
    assert rendered("qwen3", {"role": "system", "content": "Find it"}, *PAIR) == qwen3("Find it")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-Reranker-0.6B", "/models/qwen3-reranker-4b-4bit/"])
def test_a_model_is_known_by_a_part_of_its_name(name: str) -> None:
    assert known_template("other", name) == RERANK_TEMPLATES["qwen3"]
    assert known_template("Qwen3-0.6B", "Qwen3-Embedding-0.6B") is None
