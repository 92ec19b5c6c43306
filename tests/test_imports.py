"""The architecture: who may import whom, read from the source and not from what happens to run.

Every import statement counts: inside a function and under `if TYPE_CHECKING` as well.  A package's
`__init__` is the top of its package: a module that imports a sibling does not import the `__init__`.
"""

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parent.parent
PACKAGES: Final = ("app", "batching", "kernels", "mlx_batch_server", "scripts")
WEB: Final = {
    "app",
    "fastapi",
    "pydantic",
    "pydantic_settings",
    "sse_starlette",
    "starlette",
    "uvicorn",
}
# Folders whose files are rooms by themselves, beside their folders.
ROOTS: Final = (
    "app",
    "app.commands",
    "batching",
    "batching.backend",
    "batching.backend.platforms.cpu",
)
# An API is schemas, a mapping to a GenerationJob, and a writer of events; nothing below knows it.
APP_LAYERS: Final = (
    ("app.turns",),
    ("app.worker_threads", "app.store"),
    ("app.observability", "app.parsing", "app.api.schemas", "app.storage"),
    ("app.http", "app.prompts"),
    ("app.admission",),
    ("app.generation", "app.batches"),
    ("app.warming",),
    ("app.settings",),
    ("app.media",),
    ("app.flags",),
    ("app.server_state",),
    ("app.server",),
    ("app.ranks",),
    ("app.api", "app.web"),
    ("app.main", "app.flags", "app.run_batch"),
    ("app.commands",),
    ("app.cli",),
    ("app.commands.parser",),
    ("app.__main__",),
)
BENCHMARK: Final = "batching.benchmark"
MICROBENCH: Final = "scripts.microbench"
KERNELS: Final = "kernels"
MAKE_MODEL: Final = "scripts.make_model"
GPU_CHECK: Final = "scripts.gpu_check"
EVAL: Final = "scripts.eval"
BACKEND_USERS: Final = {
    "batching.backend_calls",
    BENCHMARK,
    MICROBENCH,
    KERNELS,
    MAKE_MODEL,
    GPU_CHECK,
    EVAL,
    "scripts.bench.adapters",
    "scripts.bench.encoders",
    "scripts.bench.images",
    "scripts.bench.kv_store",
    "scripts.bench.loading",
    "scripts.bench.models",
    "scripts.guidellm",
    "scripts.model_types",
    "scripts.simulation.measure",
}


def module_name(path: Path) -> str:
    """Return the dotted name of a file, given relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*packages: str) -> dict[str, str]:
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {module_name(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in paths}


def imported(source: str, modules: Iterable[str]) -> Iterator[str]:
    """Yield the modules that a source imports; `from package import module` is that module."""
    ours = set(modules)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield member if member in ours else node.module


@cache
def graph() -> dict[str, set[str]]:
    texts = sources(*PACKAGES)
    return {name: set(imported(text, texts)) for name, text in texts.items()}


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def top(module: str) -> str:
    return module.partition(".")[0]


def cycle(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def edges(importers: Iterable[str]) -> list[tuple[str, str]]:
    imports = graph()
    return [(name, target) for name in importers for target in sorted(imports[name])]


def pure_modules() -> list[str]:
    """Return `batching` without the backend, and without the benchmark, which drives everything."""
    return [
        name
        for name in graph()
        if within(name, "batching") and not within(name, "batching.backend", BENCHMARK)
    ]


def room(module: str) -> str:
    """Return the folder of a module; the files right inside of ROOTS are rooms by themselves."""
    if module in ROOTS or (ROOT / module.replace(".", "/")).is_dir():
        return module
    parent = module.rpartition(".")[0]
    return module if parent in ROOTS else parent


def rooms() -> dict[str, set[str]]:
    """Return which folders import which others."""
    modules = graph()
    found: dict[str, set[str]] = {room(name): set() for name in modules}
    for name, targets in modules.items():
        found[room(name)] |= {room(t) for t in targets if t in modules} - {room(name)}
    return found


def layer(module: str) -> int:
    """Return the index of the layer whose prefix of the module's name is the longest."""
    prefixes = {p: index for index, layer in enumerate(APP_LAYERS) for p in layer}
    return prefixes[max((p for p in prefixes if within(module, p)), key=len)]


def test_no_imports_are_cyclic() -> None:
    assert cycle(graph()) == []


def test_no_folders_import_each_other() -> None:
    assert cycle(rooms()) == []


def test_each_layer_of_app_imports_only_from_those_below() -> None:
    app = [name for name in graph() if within(name, "app") and name != "app"]
    assert [
        (name, target)
        for name, target in edges(app)
        if within(target, "app") and target != "app" and layer(target) > layer(name)
    ] == []


def test_what_the_apis_share_knows_none_of_them() -> None:
    shared = [name for name in graph() if room(name) in ("app.api", "app.api.schemas")]
    vendors = tuple(sorted({n for n in rooms() if within(n, "app.api")} - {*map(room, shared)}))
    assert len(vendors) >= 3
    assert [edge for edge in edges(shared) if within(edge[1], *vendors)] == []


def test_only_the_backend_imports_mlx() -> None:
    users = "batching.backend", KERNELS, MICROBENCH, MAKE_MODEL, GPU_CHECK, EVAL
    outside = [n for n in graph() if not within(n, *users)]
    assert [edge for edge in edges(outside) if within(edge[1], "mlx", "mlx_lm")] == []


def test_the_scheduler_and_all_around_it_need_little_but_the_standard_library() -> None:
    """Masks, pixels and weights of adapters are arrays, llguidance fills masks, `gguf` knows how large its types are, xxhash makes checksums."""
    allowed = {*sys.stdlib_module_names, "batching"}
    needed = {(name, top(target)) for name, target in edges(pure_modules())}
    assert {edge for edge in needed if edge[1] not in allowed} == {
        ("batching.adapters.files.adapter_file", "numpy"),
        ("batching.adapters.files.numbers", "numpy"),
        # It downloads them.
        ("batching.adapters.files.references", "huggingface_hub"),
        ("batching.adapters.low_rank", "numpy"),
        ("batching.block_store.entry_file", "xxhash"),
        ("batching.block_store.file_digests", "xxhash"),
        ("batching.constraints.protocol", "numpy"),
        ("batching.constraints.grammar", "numpy"),
        ("batching.constraints.grammar", "llguidance"),
        ("batching.constraints.grammar_text", "llguidance"),
        ("batching.constraints.compile_process", "llguidance"),
        ("batching.constraints.matcher", "numpy"),
        ("batching.constraints.matcher", "llguidance"),
        ("batching.constraints.token_texts", "numpy"),
        ("batching.media.decode_process", "PIL"),
        ("batching.media.image_decoder", "numpy"),
        ("batching.media.image_processor", "numpy"),
        ("batching.media.pdf_process", "pypdfium2"),
        ("batching.media.pdf_reader", "numpy"),
        ("batching.model_files.gguf_header", "gguf"),
        # It knows where its cache is.
        ("batching.models.needs", "huggingface_hub"),
    }


def test_batching_knows_nothing_of_http() -> None:
    batching = [name for name in graph() if within(name, "batching")]
    assert [edge for edge in edges(batching) if top(edge[1]) in WEB] == []


def test_few_modules_import_the_backend() -> None:
    others = [name for name in graph() if not within(name, "batching.backend", *BACKEND_USERS)]
    assert [edge for edge in edges(others) if within(edge[1], "batching.backend")] == []


def test_only_the_builder_knows_which_platforms_there_are() -> None:
    platforms = "batching.backend.platforms"
    others = [
        name
        for name in graph()
        if within(name, "batching.backend")
        and not within(name, platforms, "batching.backend.builder")
    ]
    assert [edge for edge in edges(others) if within(edge[1], platforms)] == []


def test_app_uses_only_what_batching_offers() -> None:
    app = [name for name in graph() if within(name, "app")]
    assert [
        edge for edge in edges(app) if within(edge[1], "batching") and edge[1] != "batching"
    ] == []


def test_no_part_of_batching_imports_the_whole() -> None:
    parts = [name for name in graph() if within(name, "batching") and name != BENCHMARK]
    assert [edge for edge in edges(parts) if edge[1] == "batching"] == []


def test_the_kernels_package_needs_nothing_of_the_server() -> None:
    package = [name for name in graph() if within(name, "kernels.mlx_cpu_kernels")]
    assert package
    assert [edge for edge in edges(package) if within(edge[1], *PACKAGES)] == []


def test_no_test_file_imports_another() -> None:
    """What they share lies in `tests.support`."""
    texts = sources("tests")
    files = {name for name in texts if name.rpartition(".")[2].startswith(("test_", "conftest"))}
    assert len(files) > 50
    assert [(n, t) for n, text in texts.items() for t in imported(text, texts) if t in files] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import os.path, mlx.core as mx", ["os.path", "mlx.core"]),
        ("from batching import EngineConfig", ["batching"]),
        ("from batching import scheduler", ["batching.scheduler"]),
        ("from batching.scheduler import StepPlan", ["batching.scheduler"]),
        ("def f():\n    import json", ["json"]),
        ("if TYPE_CHECKING:\n    from a.b import C", ["a.b"]),
    ],
)
def test_every_kind_of_import_is_seen(source: str, found: list[str]) -> None:
    assert list(imported(source, ["batching", "batching.scheduler"])) == found


def test_a_circle_is_seen() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
