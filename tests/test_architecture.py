"""Who may import whom: from the left only, never in a circle; and the core knows no setting."""

import ast
import re
from pathlib import Path

import pytest

from arborl.config import knobs

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "arborl"
ORDER = [
    "core",
    "tools",
    "config",
    "data",
    "models",
    "rewards",
    "worlds",
    "distributed",
    "engine",
    "run",
    "report",
    "compare",
    "verbs",
    "cli",
]  # docs/architecture.md draws it
VERBS = {"trainer", "sample", "export", "doctor", "model_check"}
ROOT = {"__init__", "__main__"}
EXCEPTIONS = {
    ("config", "models"): "the pipeline at model.path names its family, and with it the settings to begin with",
    ("compare", "verbs"): "a run of a comparison is a process of its own, which trains",
    ("compare", "cli"): "and which is told what to do as a user would tell it",
}
MODULES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {name_of(path) for path in MODULES}


def package(module: str) -> str:
    first = module.split(".")[0]
    return "verbs" if first in VERBS else first


def imports(path: Path, nested: bool = True) -> set[str]:
    """The modules of ours that a module imports, anywhere in it or only when it is itself imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    here = path.relative_to(SOURCE).parts[:-1]
    found: set[str] = set()
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("arborl.") for alias in node.names if alias.name.startswith("arborl.")}
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = [*here[: len(here) - node.level + 1], *(node.module.split(".") if node.module else [])]
        elif (node.module or "").split(".")[0] == "arborl":
            base = (node.module or "").split(".")[1:]
        else:
            continue
        for alias in node.names:
            whole = ".".join([*base, alias.name])
            found.add(whole if whole in NAMES else ".".join(base))
    return found - {""}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_package_imports_from_its_left_only(path: Path) -> None:
    mine = package(name_of(path))
    if mine in ROOT:
        return
    rank = ORDER.index(mine)
    for target in imports(path):
        theirs = package(target)
        if theirs not in ROOT and (mine, theirs) not in EXCEPTIONS:
            assert ORDER.index(theirs) <= rank, f"{name_of(path)} imports {target}, which stands to its right"


def test_every_exception_is_needed() -> None:
    used = {(package(name_of(path)), package(target)) for path in MODULES for target in imports(path)}
    assert set(EXCEPTIONS) <= used


def test_nothing_is_imported_in_a_circle() -> None:
    graph = {name_of(path): imports(path, nested=False) for path in MODULES}
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module in done:
            return
        for target in graph.get(module, ()):
            if target != module.rpartition(".")[0]:  # a package's own file is there before its modules
                visit(target, (*above, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_beside_its_packages_the_source_has_at_most_eight_modules() -> None:
    assert len([path for path in MODULES if path.parent == SOURCE]) <= 8


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("__init__.py")), ids=name_of)
def test_every_package_says_what_belongs_there(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", sorted((SOURCE / "core").glob("*.py")), ids=name_of)
def test_the_core_names_no_setting(path: Path) -> None:
    """It raises with its own arguments' names; the engine says which setting that is."""
    text = path.read_text(encoding="utf-8")
    keys = [key for key, _ in knobs() if "." in key]
    assert not [key for key in keys if re.search(rf"\b{re.escape(key)}\b", text)]


def test_tests_lie_as_the_source_does() -> None:
    """In a folder for each package; what is of the whole project, or of a verb, beside them."""
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    folders = {path.parent for path in TESTS.rglob("test_*.py")} - {TESTS}
    assert {folder.name for folder in folders} <= packages
    assert {folder.parent for folder in folders} == {TESTS}


def test_the_page_shows_the_order_and_every_package() -> None:
    page = (SOURCE.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert f"`{' < '.join(ORDER)}`" in page
    for package in ORDER:
        assert package == "verbs" or f"| `{package}/` |" in page
    drawing = (SOURCE.parent.parent / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert all(f"{package}/" in drawing for package in ORDER if package != "verbs")
