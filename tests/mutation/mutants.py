"""The mutants of a source file: mutmut's, and two kinds of our own.

mutmut puts a function between a mutant and its caller. That adds a frame to every call, and this package looks
at frames (a hook's scope is found by the frame of its module call, a warning points at the user's line), so a
mutant is made by changing the whole file instead. Thereby properties and class bodies have mutants, too, which
mutmut leaves out.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import OPERATORS_TYPE, mutation_operators
from mutmut.mutation.pragma_handling import get_ignored_lines


@dataclass(frozen=True)
class Mutant:
    """A changed source file.

    Attributes:
        module: The module's dotted name.
        path: Its file.
        number: Which mutant of the file.
        line: The first line that differs.
        function: The function that it is in, with its class; empty outside.
        before: The lines that were taken out, without indentation.
        after: The lines that came in.
        source: The changed text.
    """

    module: str
    path: Path
    number: int
    line: int
    function: str
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.path.name}#{self.number}"


def negated(node: cst.If | cst.While | cst.CompIf) -> Iterable[cst.CSTNode]:
    """``if x`` to ``if not x``; mutmut inverts comparisons, and leaves conditions without an operator alone."""
    test = node.test
    if isinstance(test, cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.BooleanOperation):
        grouped = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        yield node.with_changes(test=cst.UnaryOperation(cst.Not(), grouped))


def dropped(node: cst.SimpleStatementLine) -> Iterable[cst.CSTNode]:
    """A call that is a statement of its own is left out."""
    (statement,) = node.body if len(node.body) == 1 else (None,)
    if isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call):
        yield node.with_changes(body=[cst.Pass()])


OPERATORS: OPERATORS_TYPE = [
    *mutation_operators,
    (cst.If, negated),
    (cst.While, negated),
    (cst.CompIf, negated),
    (cst.SimpleStatementLine, dropped),
]


class _Visitor(MutationVisitor):
    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return False  # decorated ones, too; the decorators themselves are skipped
        return super()._skip_node_and_children(node)


def mutants(path: Path, module: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of the file; each changed text comes once."""
    code = path.read_text()
    wrapper = MetadataWrapper(cst.parse_module(code))
    visitor = _Visitor(OPERATORS, get_ignored_lines(str(path), code, wrapper, None), None)
    tree = wrapper.visit(visitor)
    body = ast.parse(code)
    seen = {code}
    for mutation in visitor.mutations:
        source = deep_replace(tree, mutation.original_node, mutation.mutated_node).code
        if source not in seen:
            line, before, after = _difference(code, source)
            yield Mutant(module, path, len(seen), line, _function(body, line), before, after, source)
            seen.add(source)


def _function(parent: ast.AST, line: int) -> str:
    for node in ast.walk(parent):
        inside = node is not parent and isinstance(node, ast.ClassDef | ast.FunctionDef)
        if inside and node.lineno <= line <= (node.end_lineno or 0):
            return f"{node.name}.{_function(node, line)}".rstrip(".")
    return ""


def _difference(code: str, source: str) -> tuple[int, str, str]:
    old, new = code.splitlines(), source.splitlines()
    changes = [
        one for one in difflib.SequenceMatcher(None, old, new, False).get_opcodes() if one[0] != "equal"
    ]
    start, end, new_start, new_end = changes[0][1], changes[-1][2], changes[0][3], changes[-1][4]
    return start + 1, _joined(old[start:end]), _joined(new[new_start:new_end])


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)
