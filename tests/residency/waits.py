"""Every wait of the transfer code, found in its source, and taken out one at a time.

A wait is a call that orders work: of a method of torch's streams and events, or of a backend's method that makes
such a call. A new one is found the next time. To take it out, the function around it is compiled again without it,
and its code put in the place of the old: whoever holds the function runs the new code.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import omni_components.transfer

FOLDER = Path(omni_components.transfer.__file__).parent
RECORDS = {"record_event", "record"}  # their answer is what others will wait for
QUESTIONS = {"query"}  # whose answer decides whether to wait
PRIMITIVES = {"wait", "wait_event", "wait_stream", "synchronize", *RECORDS, *QUESTIONS}
BACKEND = "AcceleratorBackend"


@dataclass(frozen=True)
class Wait:
    """One call that orders work.

    Attributes:
        module: The file's name, without suffix.
        function: The class and method around it.
        call: What is called, as written.
        line: Where.
        nth: Which such call of the function it is.
    """

    module: str
    function: str
    call: str
    line: int
    nth: int

    def __str__(self) -> str:
        return f"{self.module}.{self.function} {self.call}" + (f" #{self.nth + 1}" if self.nth else "")

    def remove(self, patch: pytest.MonkeyPatch) -> None:
        """Run the function without it."""
        module = importlib.import_module(f"omni_components.transfer.{self.module}")
        tree = _tree(self.module)
        function = _functions(tree)[self.function]
        _Without(self).visit(function)
        ast.fix_missing_locations(tree)
        patch.setattr(module, "_nobody_recorded", _nobody_recorded, raising=False)
        code = _code_of(compile(tree, str(FOLDER / f"{self.module}.py"), "exec"), self.function.split("."))
        patch.setattr(_plain(module, self.function), "__code__", code)


def waits() -> list[Wait]:
    """All of them, in the order of the files."""
    names = PRIMITIVES | _ordering_methods()
    return [
        Wait(file.stem, name, *one)
        for file in sorted(FOLDER.glob("*.py"))
        for name, function in _functions(_tree(file.stem)).items()
        for one in _calls(function, names)
    ]


def _ordering_methods() -> set[str]:
    """The backend's methods that order work: the mover calls them instead of torch's."""
    functions = _functions(_tree("device"))
    return {
        name.partition(".")[2]
        for name, function in functions.items()
        if name.startswith(f"{BACKEND}.") and next(_calls(function, PRIMITIVES), None) is not None
    }


def _calls(function: ast.AST, names: set[str]) -> Iterator[tuple[str, int, int]]:
    seen: dict[str, int] = {}
    found = [one for one in ast.walk(function) if _called(one) in names]
    for one in sorted(found, key=lambda one: (one.lineno, one.col_offset)):  # type: ignore[attr-defined]
        written = ast.unparse(one.func)  # type: ignore[attr-defined]
        yield written, one.lineno, seen.setdefault(written, 0)  # type: ignore[attr-defined]
        seen[written] += 1


def _called(node: ast.AST) -> str:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


class _Without(ast.NodeTransformer):
    """Takes the call out: a statement is dropped, an event is one that nobody recorded, a question is answered yes."""

    def __init__(self, wait: Wait) -> None:
        self.wait = wait

    def _is(self, node: ast.AST) -> bool:
        if _called(node) == "" or ast.unparse(node.func) != self.wait.call:  # type: ignore[attr-defined]
            return False
        return node.lineno == self.wait.line  # type: ignore[attr-defined]

    def visit_Expr(self, node: ast.Expr) -> Any:
        return ast.copy_location(ast.Pass(), node) if self._is(node.value) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if not self._is(node):
            return self.generic_visit(node)
        if _called(node) in QUESTIONS:
            return ast.copy_location(ast.Constant(True), node)
        call = ast.Call(ast.Name("_nobody_recorded", ast.Load()), [node.func], [])
        return ast.copy_location(call, node)


def _nobody_recorded(record: Callable[[], Any]) -> Any:
    """An event to wait for which is to wait for nothing."""
    holder: Any = record.__self__  # type: ignore[attr-defined]
    return torch.Event(holder.device) if holder.device.type != "cpu" else record()


def _tree(module: str) -> ast.Module:
    return ast.parse((FOLDER / f"{module}.py").read_text())


def _functions(tree: ast.Module) -> dict[str, ast.AST]:
    """Functions and methods by name; what is defined inside one belongs to it."""
    found: dict[str, ast.AST] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}": one for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


def _code_of(code: types.CodeType, names: list[str]) -> types.CodeType:
    for name in names:
        code = next(one for one in code.co_consts if isinstance(one, types.CodeType) and one.co_name == name)
    return code


def _plain(module: Any, path: str) -> Any:
    """The function itself, under whatever decorators."""
    found = module
    for name in path.split("."):
        found = vars(found)[name]
    found = found.fget if isinstance(found, property) else found
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found
