"""Models are foreign files: what comes with them is data, and is not run unless that is allowed."""

import sys
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import pytest
import transformers.dynamic_module_utils

from app.prompts.templates import template_sandbox
from app.prompts.templates.template_sandbox import SANDBOX, TemplateFailed
from batching.backend import loader
from batching.backend.gguf.tokenizer import build_tokenizer
from batching.backend.loader import load_model
from batching.model_files.gguf_header import read_header
from tests.support.gguf_models import BPE
from tests.support.gguf_writer import write_gguf
from tests.support.model_files import edit_config, rejection

WITNESS: Final = "witness"

MODEL_CODE: Final = """
open({witness!r}, "w").close()
from mlx_lm.models.llama import Model, ModelArgs
"""
TOKENIZER_CODE: Final = """
open({witness!r}, "w").close()
from transformers import PreTrainedTokenizerFast
class T(PreTrainedTokenizerFast):
    pass
"""
CONFIG_CODE: Final = """
open({witness!r}, "w").close()
from transformers import LlamaConfig
class C(LlamaConfig):
    pass
"""

TOKENIZER_MAP: Final = {"AutoTokenizer": ["tokenizer.T", "tokenizer.T"]}
CONFIG_MAP: Final = {"AutoConfig": "configuration.C", "AutoModelForCausalLM": "model.Model"}


@pytest.fixture
def witness(directory: Path) -> Path:
    """Return a file that the code beside a model makes when it is run."""
    witness = directory / WITNESS
    codes = {"model": MODEL_CODE, "tokenizer": TOKENIZER_CODE, "configuration": CONFIG_CODE}
    for name, code in codes.items():
        (directory / f"{name}.py").write_text(code.format(witness=str(witness)))
    return witness


@pytest.fixture(autouse=True)
def modules_of_this_test(tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any) -> None:
    """Transformers copies the code that it runs; not into this user's home."""
    modules = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", list(sys.path))


# What needs code of the model's own


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("config.json", {"model_file": "model.py"}, "custom module"),
        ("config.json", {"model_file": ""}, "custom module"),
        ("config.json", {"model_file": "/dev/null"}, "custom module"),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "T", "auto_map": TOKENIZER_MAP},
            "contains custom code",
        ),
        (
            "tokenizer_config.json",
            {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": "some/where--tokenizer.T"}},
            "custom code",
        ),
        ("tokenizer_config.json", {"chat_template_type": "template"}, "No module named"),
        ("tokenizer_config.json", {"chat_template_type": "..tokenizer"}, "No module named"),
        ("tokenizer_config.json", {"tool_parser_type": "tokenizer"}, "No module named"),
        ("config.json", {"model_type": "model", "auto_map": CONFIG_MAP}, "not supported"),
        ("config.json", {"model_type": "../model"}, "not supported"),
        ("config.json", {"model_type": "cache"}, "has no attribute 'Model'"),
    ],
)
def test_a_model_that_needs_its_own_code_is_rejected(
    directory: Path,
    witness: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changes: dict[str, Any],
    reason: str,
) -> None:
    # Also not from where the server is started.
    monkeypatch.chdir(directory)
    edit_config(directory, name, **changes)
    assert reason in rejection(directory)
    assert not witness.exists()


def test_code_that_a_model_does_not_need_is_left_alone(directory: Path, witness: Path) -> None:
    """Many name code for other programs, that mlx-lm and transformers have themselves."""
    edit_config(directory, auto_map=CONFIG_MAP | TOKENIZER_MAP)
    edit_config(directory, "tokenizer_config.json", auto_map=TOKENIZER_MAP)
    assert load_model(str(directory), dtype=None).model_type == "llama"
    edit_config(directory, "tokenizer_config.json", tokenizer_class=None, auto_map=None)
    assert load_model(str(directory), dtype=None).tokenizer.encode("a b") == [0, 1]
    assert not witness.exists()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"model_file": "model.py"}),
        ("tokenizer_config.json", {"tokenizer_class": "T", "auto_map": TOKENIZER_MAP}),
    ],
)
def test_who_trusts_a_model_runs_its_code(
    directory: Path, witness: Path, name: str, changes: dict[str, Any]
) -> None:
    edit_config(directory, name, **changes)
    loaded = load_model(str(directory), dtype=None, trust_remote_code=True)
    assert loaded.tokenizer.encode("a b") == [0, 1]
    assert witness.exists()


@pytest.mark.parametrize("is_trusted", [False, True])
def test_code_is_downloaded_only_if_it_is_trusted(
    directory: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool
) -> None:
    requested: list[list[str]] = []

    def download(repository: str, *, allow_patterns: list[str], **_: Any) -> str:
        requested.append(allow_patterns)
        return str(directory)

    monkeypatch.setattr(loader, "snapshot_download", download)
    load_model("some/model", dtype=None, trust_remote_code=is_trusted)
    (patterns,) = requested
    assert ("*.py" in patterns) == is_trusted
    assert "model*.safetensors" in patterns


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pkl", "model.npz"])
def test_weights_that_are_programs_are_not_read(directory: Path, name: str) -> None:
    """A pickle runs what it says; that of a model is not even opened."""
    (directory / "model.safetensors").rename(directory / name)
    assert "No safetensors found" in rejection(directory)
    assert "neither a .gguf file nor" in rejection(directory / name)


def test_a_panic_of_a_foreign_library_is_a_rejection(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """What pyo3 makes of a panic of Rust: no Exception."""

    def panic(*_: Any, **__: Any) -> None:
        raise Panic("index out of bounds\nin a line of its own")

    monkeypatch.setattr(loader, "load_tokenizer", panic)
    assert "Panic: index out of bounds in a line of its own" in rejection(directory)


def test_layers_without_number_are_rejected_at_once(directory: Path) -> None:
    edit_config(directory, num_hidden_layers=10**9)
    assert "declares 1000000000 layers" in rejection(directory)
    edit_config(directory, num_hidden_layers=2, text_config={"num_layers": 10**9})
    assert "declares 1000000000 layers" in rejection(directory)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "vocab_size", "head_dim"])
def test_sizes_without_measure_are_rejected_at_once(directory: Path, key: str) -> None:
    changes: dict[str, Any] = {key: 1 << 30}
    edit_config(directory, **changes)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    assert str(directory) in rejection(directory)
    assert mx.get_peak_memory() - before < 1 << 24


def test_a_config_without_end_is_rejected(directory: Path) -> None:
    (directory / "config.json").write_text("[" * 100_000)
    assert str(directory) in rejection(directory)


# Chat templates

ATTACKS: Final = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '%(x)s'.format_map({'x': ''.__class__}) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ cycler.__init__.__globals__.os.system('touch WITNESS') }}",
    "{{ joiner.__init__.__globals__['os'].system('touch WITNESS') }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__['os'].system('touch WITNESS') }}",
    "{{ raise_exception.__globals__ }}{{ raise_exception.__code__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ self.__init__.__globals__.__builtins__.open('WITNESS', 'w') }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ (messages|tojson).__class__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{% include '/etc/hostname' %}",
    "{% import 'os' as os %}{{ os.getcwd() }}",
    "{% set x = messages.append({'role': 'system', 'content': 'OWNED'}) %}{{ messages }}",
    "{% set x = messages[0].update({'content': 'OWNED'}) %}{{ messages }}",
    "{{ messages.__getitem__.__self__.clear() }}",
]
# What only Python's own objects say of themselves.
LEAKS: Final = ("<class", "<function", "<module", "<built-in", "object at 0x", "OWNED", "/")


def rendered(tokenizer: Any) -> str:
    """Render a conversation; what the sandbox rejects renders as nothing."""
    messages = [{"role": "user", "content": "a"}]
    try:
        return template_sandbox.rendered(
            SANDBOX, tokenizer.get_chat_template(None, None), messages, {}
        )
    except TemplateFailed:
        return ""


def template_of_directory(directory: Path, template: str) -> Any:
    (directory / "chat_template.jinja").write_text(template)
    return load_model(str(directory), dtype=None).tokenizer


def template_of_gguf(directory: Path, template: str) -> Any:
    metadata = BPE | {"tokenizer.chat_template": template}
    return build_tokenizer(read_header(write_gguf(directory / "t.gguf", metadata, {})))


both_sources = pytest.mark.parametrize("source", [template_of_directory, template_of_gguf])


@both_sources
def test_a_template_is_rendered(directory: Path, source: Any) -> None:
    tokenizer = source(directory, "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}")
    assert rendered(tokenizer) == "user:a"


@both_sources
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_reaches_nothing_but_its_conversation(
    directory: Path, source: Any, attack: str
) -> None:
    witness = directory / WITNESS
    text = rendered(source(directory, attack.replace("WITNESS", str(witness))))
    assert not any(leak in text for leak in LEAKS)
    assert not witness.exists()


@both_sources
def test_a_loop_without_end_is_rejected(directory: Path, source: Any) -> None:
    tokenizer = source(directory, "{% for i in range(10**9) %}{% endfor %}")
    with pytest.raises(TemplateFailed, match="OverflowError"):
        template_sandbox.rendered(SANDBOX, tokenizer.get_chat_template(None, None), [], {})


def test_a_template_in_a_config_is_rendered_in_the_same_sandbox(directory: Path) -> None:
    template = "{{ ''.__class__.__mro__ }}|{{ messages[0].content }}"
    edit_config(directory, "tokenizer_config.json", chat_template=template)
    assert rendered(load_model(str(directory), dtype=None).tokenizer) in ("", "|a")


def test_a_template_of_the_operator_replaces_the_models(directory: Path) -> None:
    """How calls are written follows from it, as it does from a template of the model."""
    (directory / "chat_template.jinja").write_text("{{ messages }}<tool_call>{{ tool_call.name }}")
    model = load_model(str(directory), dtype=None)
    assert model.has_jinja_template
    own = model.tokenizer
    template = "{{ messages[0].content }}[TOOL_CALLS]"
    other = load_model(str(directory), dtype=None, chat_template=template).tokenizer
    assert (own.tool_call_start, other.tool_call_start) == ("<tool_call>", "[TOOL_CALLS]")
    assert other.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == (
        "a[TOOL_CALLS]"
    )
    assert other.eos_token_ids == own.eos_token_ids
    edit_config(directory, "tokenizer_config.json", chat_template_type="deepseek_v32")
    assert load_model(
        str(directory), dtype=None, chat_template=template
    ).tokenizer.chat_template == (template)


def test_a_template_of_mlx_lm_is_taken_by_name(directory: Path) -> None:
    """Its templates in Python are part of mlx-lm, and no other model's are."""
    edit_config(directory, "tokenizer_config.json", chat_template_type="deepseek_v32")
    loaded = load_model(str(directory), dtype=None)
    assert loaded.tokenizer.has_chat_template
    assert not loaded.has_jinja_template
