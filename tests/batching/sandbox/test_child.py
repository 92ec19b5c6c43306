"""The program of a sandboxed process, called in this one."""

import io
import resource
from pathlib import Path

import pytest

from app.prompts.templates import template_process
from batching.constraints import compile_process, lark_process
from batching.media import decode_process, pdf_process
from batching.sandbox import child
from batching.sandbox.child import answer_messages, limit_cpu, limit_process


@pytest.mark.parametrize(
    "module", [child, compile_process, decode_process, lark_process, pdf_process, template_process]
)
def test_it_needs_no_module_of_the_project(module: object) -> None:
    source = Path(str(vars(module)["__file__"])).read_text(encoding="utf-8")
    assert "from app" not in source
    assert "from batching" not in source


def test_a_worker_is_loaded_from_its_file() -> None:
    for module in (template_process, lark_process):
        worker = child.load(str(module.__file__))
        assert worker.answer is not module.answer


def test_a_message_is_answered_with_a_message() -> None:
    messages, answers, limited = io.BytesIO(), io.BytesIO(), []
    for message in (b"a\n", b"", b" b\xff "):
        child.send(messages, message)
    messages.seek(0)
    answer_messages(messages, answers, bytes.strip, lambda: limited.append(1))
    answers.seek(0)
    assert (list(child.received(answers)), len(limited)) == ([b"a", b"", b"b\xff"], 3)


def test_a_process_has_its_seconds_from_now_on() -> None:
    limits: list[tuple[int, tuple[int, int]]] = []
    limit_cpu(5, lambda kind, limit: limits.append((kind, limit)))
    [(kind, (soft, hard))] = limits
    assert (kind, hard) == (resource.RLIMIT_CPU, resource.RLIM_INFINITY)
    assert soft >= 6


def test_a_limit_that_the_system_does_not_know_is_left_out() -> None:
    limits: dict[int, tuple[int, int]] = {}

    def refuse(kind: int, limit: tuple[int, int]) -> None:
        limits[kind] = limit
        raise ValueError("this system knows no such limit")

    limit_process(1 << 30, refuse)
    assert limits[resource.RLIMIT_AS] == (1 << 30, 1 << 30)
    assert limits[resource.RLIMIT_NOFILE] == (0, 0)
