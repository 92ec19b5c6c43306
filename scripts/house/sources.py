"""The modules of the house, what each imports or includes, and the line that says what it is.

`a/__init__.py` is the module `a`, and the header and the source of a C++ class are one module.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

# The packages that are floors; a module is on that of the longest name.
FLOORS: Final = ("app", "batching", "batching.backend", "kernels")
# The folders of sources, each with the package that its modules are in.
PYTHON: Final = {
    "app": "app",
    "batching": "batching",
    "kernels/mlx_cpu_kernels": "kernels.mlx_cpu_kernels",
}
CPP: Final = Path("kernels", "src")
CPP_PACKAGE: Final = "kernels"

_INCLUDE: Final = re.compile(r'^#include "(.+)"', re.MULTILINE)

Files = dict[str, list[Path]]


def python_modules(root: Path) -> Files:
    """Return the Python modules, each with its file."""
    return {
        ".".join([package, *_parts(path, root / folder)]): [path]
        for folder, package in PYTHON.items()
        for path in sorted((root / folder).rglob("*.py"))
    }


def cpp_modules(root: Path) -> Files:
    """Return the C++ modules, each with its header before its source."""
    files: Files = {}
    for path in sorted((root / CPP).rglob("*.[hc]*"), key=lambda p: (p.suffix != ".h", p)):
        files.setdefault(".".join([CPP_PACKAGE, *_parts(path, root / CPP)]), []).append(path)
    return files


def _parts(path: Path, folder: Path) -> list[str]:
    parts = path.relative_to(folder).with_suffix("").parts
    return [part for part in parts if part != "__init__"]


def imports(files: Mapping[str, list[Path]], root: Path) -> dict[str, frozenset[str]]:
    """Return which modules import or include which."""
    found = {}
    for name, paths in files.items():
        targets = [target for path in paths for target in _targets(path, root)]
        # `from package import name` is a module, or a name in one.
        known = {t if t in files else t.rpartition(".")[0] for t in targets}
        found[name] = frozenset(known & files.keys()) - {name}
    return found


def _targets(path: Path, root: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return list(_included(path, _INCLUDE.findall(text), root / CPP))
    tree = ast.parse(text)
    # To look through expressions, too, takes three times as long.
    nodes = ast.walk(tree) if "import_module(" in text else _statements(tree.body)
    names = [name for node in nodes for name in _imported(node)]
    return [re.sub(r"^mlx_cpu_kernels\b", "kernels.mlx_cpu_kernels", name) for name in names]


def _included(path: Path, headers: Iterable[str], folder: Path) -> Iterator[str]:
    for header in headers:
        for target in (folder / header, (path.parent / header).resolve()):
            if target.exists():
                yield ".".join([CPP_PACKAGE, *_parts(target, folder)])


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements and those in them."""
    for node in body:
        yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, block, ()))


def _imported(node: ast.AST) -> list[str]:
    """Return the dotted names that a statement imports, or a call of `import_module`."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module)):
            return [f"{module}.{alias.name}" for alias in node.names]
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(str(name))]):
            return [name]
    return []


def about(path: Path) -> str:
    """Return the first line of a module's docstring, or of the comment at a header's top."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return text.partition("\n")[0].removeprefix("// ")
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
