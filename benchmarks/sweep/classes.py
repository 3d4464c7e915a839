"""Which pipeline classes diffusers has, read from its files: nothing of it is imported for that."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ATTRIBUTE = "model_cpu_offload_seq"


@cache
def found() -> dict[str, str]:
    """The classes of the installed diffusers that declare an offload order, and the module of each."""
    spec = importlib.util.find_spec("diffusers")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    classes = {}
    for file in sorted((root / "pipelines").rglob("*.py")):
        module = ".".join(("diffusers", *file.relative_to(root).with_suffix("").parts))
        classes.update(dict.fromkeys(_declaring(ast.parse(file.read_text())), module))
    del classes["DiffusionPipeline"]  # the base class, which declares that there is none
    return classes


def _declaring(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(ATTRIBUTE in _assigned(one) for one in node.body):
            yield node.name


def _assigned(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [one.id for one in statement.targets if isinstance(one, ast.Name)]
    plain = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    return [statement.target.id] if plain else []
