"""The documents say what the code says."""

import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest
from pydantic import AliasChoices

from app.api.anthropic.request import MessagesRequest
from app.api.openai.chat.request import ChatCompletionRequest
from app.api.openai.completions.request import CompletionRequest
from app.api.openai.decisions.request import DecisionRequest
from app.api.openai.embeddings.request import EmbeddingRequest
from app.api.openai.responses.request import ResponseRequest
from app.api.openai.schemas import unsupported
from app.api.openai.schemas.response_options import StreamOptions
from app.api.scoring.request import RerankRequest, ScoreRequest
from app.api.systemone.request import SystemOneRequest
from app.flags import flag_name
from app.settings import Settings, env_name
from scripts.generated_docs import (
    ARCHITECTURE,
    ROOT,
    SETTINGS,
    fields,
    filled,
    main,
    stale_files,
)
from scripts.house.picture import HOUSE

DOCUMENTS: Final = tuple(
    path
    for pattern in ("*.md", "docs/**/*.md", "kernels/**/*.md")
    for path in sorted(ROOT.glob(pattern))
)

CODE_BLOCK: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE: Final = re.compile(r"`([^`\n]+)`")
# The target of a link or of a picture.
LINK: Final = re.compile(r"\]\(([^()\s]+)\)")
HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
PATH: Final = re.compile(
    r"(?:app|batching|docker|docs|kernels|requirements|scripts|tests)/[\w./-]*"
)
# A file of code, by its path from the root or from any folder: `paged/pieces.py`, `step_rows.py`.
SOURCE: Final = re.compile(r"[\w./-]+\.(?:py|pyi|h|cpp|inl|svg)")
# All that ships, without the kernels' own documents.
MAX_BYTES: Final = 270_000
MAX_LINE: Final = 140
# A fixed part of a message, between `…`; shorter ones are found anywhere.
FRAGMENT: Final = re.compile(r"[^…]{8,}")


SHIPPED: Final = tuple(p for p in DOCUMENTS if not p.is_relative_to(ROOT / "kernels"))


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own variables out of the tests."""
    for name in [name for name in os.environ if name.upper().startswith("MLX_SERVER_")]:
        monkeypatch.delenv(name)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    return CODE_BLOCK.sub("", read(path))


def anchors(path: Path) -> set[str]:
    """Return what a link can name after `#`, as hosting sites and the site's builder make it."""
    headings = [re.sub(r"[^\w\- ]", "", h).lower() for h in HEADING.findall(prose(path))]
    return {heading.strip().replace(" ", "-") for heading in headings}


@cache
def known_names(folder: Path) -> set[str]:
    """Return the files of the repository, by each end of their path, and those beside a document."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [Path(name) for name in listed.stdout.decode().split("\0") if name]
    ends = {"/".join(file.parts[i:]) for file in files for i in range(len(file.parts))}
    return ends | {str(path.relative_to(folder)) for path in folder.glob("*")}


def broken_links(path: Path) -> Iterator[str]:
    for link in LINK.findall(CODE.sub("", prose(path))):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def test_what_is_generated_is_fresh() -> None:
    assert list(stale_files(ROOT)) == [], "run: python -m scripts.generated_docs"


def test_the_example_has_the_defaults_and_all_of_them(tmp_path: Path) -> None:
    lines = [line[1:] for line in read(ROOT / ".env.example").splitlines() if line[:2] > "# "]
    assert [line.partition("=")[0] for line in lines] == [env_name(field) for field, _ in fields()]
    path = tmp_path / ".env"
    path.write_text("\n".join(lines), encoding="utf-8")
    assert Settings(_env_file=path) == Settings(_env_file=None)


def test_the_tables_have_every_setting() -> None:
    rows = re.findall(r"^\| `(MLX_SERVER_\w+)` \|", read(ROOT / SETTINGS), re.MULTILINE)
    assert rows == [env_name(field) for field in Settings.model_fields]


def test_the_page_says_how_a_flag_is_made_of_a_variable() -> None:
    assert "with `--max-num-seqs` for `MLX_SERVER_MAX_NUM_SEQS`" in read(ROOT / SETTINGS)
    for field in Settings.model_fields:
        name = env_name(field).removeprefix("MLX_SERVER_").lower()
        assert flag_name(field) == f"--{name.replace('_', '-')}"


def test_a_stale_file_is_reported_and_then_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (SETTINGS, ARCHITECTURE, HOUSE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    fresh = read(ROOT / SETTINGS)
    (tmp_path / SETTINGS).write_text(fresh.replace("_PORT`", "_PROT`"), encoding="utf-8")
    assert main(["--check"], tmp_path) == 1
    output = capsys.readouterr().out
    assert output == "docs/settings.md is out of date\n.env.example is out of date\n"
    assert main([], tmp_path) == 0
    assert read(tmp_path / SETTINGS) == fresh
    assert main(["--check"], tmp_path) == 0


def test_a_document_without_markers_is_rejected() -> None:
    with pytest.raises(ValueError, match="there is no <!-- settings -->"):
        filled("# Title\n\n<!-- settings -->\n", "settings", "")


def test_the_api_page_names_every_parameter() -> None:
    names = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    names |= {*unsupported.CHAT, *unsupported.COMPLETIONS, *StreamOptions.model_fields}
    names |= {
        str(alias)
        for field in {
            **ChatCompletionRequest.model_fields,
            **CompletionRequest.model_fields,
        }.values()
        if isinstance(field.validation_alias, AliasChoices)
        for alias in field.validation_alias.choices
    }
    names |= {*ResponseRequest.model_fields, *ResponseRequest.defaults}
    names |= {*MessagesRequest.model_fields, *MessagesRequest.defaults}
    for request in (
        EmbeddingRequest,
        RerankRequest,
        ScoreRequest,
        DecisionRequest,
        SystemOneRequest,
    ):
        names |= {*request.model_fields, *request.defaults}
    known = set(re.findall(r"`([a-z_]+\d?)", read(ROOT / "docs" / "api.md"))) | {"stream_options"}
    assert names <= known, sorted(names - known)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8_000


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    assert list(broken_links(path)) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A `title`, here\n", encoding="utf-8")
    page = tmp_path / "page.md"
    good = "[a](there.md#a-title-here) [b](https://example.org/x) `[c](no.md)`\n"
    page.write_text(f"{good}[d](no.md) [e](there.md#no) ![f](no.png) [g](#no)\n", encoding="utf-8")
    assert list(broken_links(page)) == ["no.md", "there.md#no", "no.png", "#no"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_is_named_is_there(path: Path) -> None:
    named = [code for code in CODE.findall(prose(path)) if PATH.fullmatch(code)]
    roots = ROOT, ROOT / "kernels" / "src"
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_source_that_is_named_is_there(path: Path) -> None:
    named = {code for code in CODE.findall(prose(path)) if SOURCE.fullmatch(code)}
    assert sorted(named - known_names(path.parent)) == []


def test_a_source_that_is_gone_is_found() -> None:
    assert {"batching/scheduler.py", "scheduler.py", "blocks/free_runs.py"} <= known_names(ROOT)
    assert not {"layers/gone.py", "uler.py", "batching/free_runs.py"} & known_names(ROOT)


def test_no_line_of_prose_is_a_wall() -> None:
    """Tables and links to pictures have lines of their own."""
    walls = [
        f"{path.relative_to(ROOT)}: {line[:60]}"
        for path in SHIPPED
        for line in prose(path).splitlines()
        if len(line) > MAX_LINE and not line.startswith(("|", "![", "[!["))
    ]
    assert walls == []


def test_all_documents_that_ship_are_read_in_an_afternoon() -> None:
    assert sum(len(path.read_bytes()) for path in SHIPPED) <= MAX_BYTES


def test_the_site_has_every_page() -> None:
    pages = re.findall(r"(\S+\.md)$", read(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert sorted(pages) == sorted(str(path.relative_to(ROOT)) for path in DOCUMENTS)


def test_troubleshooting_quotes_the_code() -> None:
    """What stands between the varying parts of a message is in one of the sources."""
    rows = re.findall(r"^\| ([^|]+) \|", read(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE)
    codes = [code for row in rows for code in CODE.findall(row)]
    quoted = [part.strip(" ;:") for code in codes for part in FRAGMENT.findall(code)]
    assert len(quoted) > 30
    files = [path for package in ("app", "batching") for path in (ROOT / package).rglob("*.py")]
    # A message may stand in several string literals, one on each line.
    texts = [re.sub(r'"\s*\n\s*f?"', "", read(path)) for path in (ROOT / "Makefile", *files)]
    assert [part for part in quoted if not any(part in text for text in texts)] == []
