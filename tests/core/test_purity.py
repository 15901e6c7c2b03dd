"""The core imports torch and a few modules of the standard library, and nothing of ours but itself."""

import ast

from conftest import ROOT

SOURCE = ROOT / "src" / "arborl"


def test_core_imports_nothing_of_the_project_outside_itself():
    for path in (SOURCE / "core").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{path.name} imports from outside core"
                assert node.level == 1 or not (node.module or "").startswith("arborl"), path.name
            if isinstance(node, ast.Import):
                assert all(not alias.name.startswith("arborl") for alias in node.names), path.name
            if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                allowed = {"torch", "jaxtyping", "math", "typing", "dataclasses", "functools", "collections", "abc"}
                assert {str(name).split(".")[0] for name in names} <= allowed, path.name
