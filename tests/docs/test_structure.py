"""The house stands as the design says: who imports whom, what is public, and what the docs must name."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import omni_components
from omni_components import OffloadPolicy, errors, testing

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "omni_components"
FILES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))

# The house, from top to bottom: a file imports only what stands above it. A folder stands for its files, in
# any order, where no line below names them one by one. Deviations from the design: docs/decisions.md.
_ROWS = """
errors sizes
protocols
policy
components/component components/wrappers components/unread components/tensors components/grouping components/computed
components/roster components/area components/patterns
components/paths components/declaration components/unmovable components/nested components/seating
components/recipe components/omni_models components/discovery components/recipes
residency/events residency/scope residency/threads residency/graph residency/book residency/turns residency/checks
residency/order residency/switch residency/gate residency/nesting residency/ledger
transfer/device transfer/hostmemory transfer/masters transfer/home transfer/arena transfer/cargo
transfer/ahead transfer/inspection transfer/staging transfer/mover
loading/classes loading/files loading/readahead loading/deferred loading/checkpoint loading/keys loading/build
loading/fill loading/load
report
attach/hooks attach/methods attach/adapters attach/mixin attach/split attach/diffusers attach/modular attach/inventory
attach/fleet attach/auto attach/pipeline
models
testing
demo
planning/skeleton planning/paper planning/plan planning/text planning/model
omni
serve
cli
"""
HOUSE = _ROWS.split()

# Imports inside a function, run long after all files are there; each has its reason in the code.
DEFERRED = {("attach/mixin", "attach/pipeline")}
FACADE = "__init__"  # the public face gathers names from below
TORCH_FREE = ("residency/ledger", "residency/scope")
ONE_FILE_NAMES_ACCELERATORS = "transfer/device"
ACCELERATORS = {"cuda", "xpu", "mps", "npu", "hip"}

_PUBLIC = """
AbsentComponentError BudgetError Component ComponentNotFoundError DeclarationError InvariantError LedgerStrategy
ModelError Offload OffloadPolicy OffloadScope Omni OmniComponentsError OmniOffloadMixin OmniOutput OwnershipError
PolicyError Recipe ResidencyDeadlockError ResidencyEvent ResidencyLedger ResidencyTimeoutError ResidencyWarning
Role ScopeError SplitModel SupportsComponentDiscovery SupportsOmniOffload TransferError UnknownComponentError
UnsupportedTensorError WeightsError declares_components load_components offload plan
"""
PUBLIC = _PUBLIC.split()


# --- imports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [one for one in FILES if one != FACADE])
def test_a_file_that_imports_what_stands_below_it(file: str) -> None:
    upward = [other for other in imports(file) if rank(other) > rank(file) and (file, other) not in DEFERRED]
    assert upward == [], f"{file} imports from below"


@pytest.mark.parametrize("file", TORCH_FREE)
def test_deciding_that_depends_on_torch(file: str) -> None:
    closure, todo = set(), [file]
    while todo:
        one = todo.pop()
        if one not in closure:
            closure.add(one)
            todo += imports(one)
    guilty = [one for one in closure if "torch" in {name.partition(".")[0] for name in imported_names(one)}]
    assert guilty == []


@pytest.mark.parametrize("file", [one for one in FILES if one != ONE_FILE_NAMES_ACCELERATORS])
def test_a_second_file_that_names_an_accelerator(file: str) -> None:
    named = [
        f"{file}:{node.lineno}: torch.{node.attr}"
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Attribute) and node.attr in ACCELERATORS
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    assert named == []


def test_the_order_itself_can_be_broken() -> None:
    """The test of imports must be able to fail."""
    assert (
        rank("components/tensors") < rank("transfer/mover") < rank("attach/pipeline") < rank("demo/pipeline")
    )
    assert "errors" in list(imports("policy"))
    assert set(imports("attach/pipeline")) >= {"attach/fleet", "residency/ledger", "components/discovery"}


# --- names ----------------------------------------------------------------------------------------------


def test_the_public_names_are_those_on_the_list() -> None:
    assert sorted(omni_components.__all__) == sorted(PUBLIC)
    assert all(hasattr(omni_components, name) for name in PUBLIC)


def test_a_public_name_without_a_docstring() -> None:
    bare = [name for name in PUBLIC if not inspect.getdoc(getattr(omni_components, name))]
    assert bare == []


# --- what the docs must name ----------------------------------------------------------------------------


def test_a_public_name_that_the_reference_lacks() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    directives = set(re.findall(r"^::: omni_components\.(?:\w+\.)*(\w+)", text, re.MULTILINE))
    listed = set(re.findall(r"^ {8}- (\w+)$", text, re.MULTILINE))
    assert sorted({*PUBLIC, *testing.__all__} - directives - listed) == []


def test_an_error_that_the_page_of_errors_lacks() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    kinds = [
        one for one in vars(errors).values() if inspect.isclass(one) and one.__module__ == errors.__name__
    ]
    assert [kind.__name__ for kind in kinds if f"## {kind.__name__}" not in text] == []


def test_a_policy_field_that_its_page_lacks() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    assert [one.name for one in dataclasses.fields(OffloadPolicy) if f"| `{one.name}` |" not in text] == []


def test_a_link_to_a_page_that_is_not_there() -> None:
    fences = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in re.findall(
            r"\]\(([^)#\s]+)(?:#[^)]*)?\)", fences.sub("", page.read_text(encoding="utf-8"))
        )
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


# --- reading the source ---------------------------------------------------------------------------------


def rank(file: str) -> int:
    """A file's place in the house."""
    package = file.removesuffix("/__init__")
    for name in (package, package.partition("/")[0]):
        if name in HOUSE:
            return HOUSE.index(name)
    # An empty __init__ of a folder whose files are named one by one stands with the first of them.
    first = next((index for index, one in enumerate(HOUSE) if one.startswith(f"{package}/")), None)
    assert first is not None, f"{file} has no place in the house: name it in HOUSE"
    return first


def tree(file: str) -> ast.Module:
    """The syntax tree of a file, without what only type checkers see."""
    parsed = ast.parse((PACKAGE / f"{file}.py").read_text(encoding="utf-8"))
    for node in ast.walk(parsed):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if isinstance(body, list):
                body[:] = [one for one in body if not _for_type_checkers(one)]
    return parsed


def _for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_names(file: str) -> Iterator[str]:
    """Absolute dotted names of the modules, or of the names in them, that a file imports."""
    here = ["omni_components", *file.split("/")]
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{one.name}" for one in node.names)


def imports(file: str) -> Iterator[str]:
    """The files of this package that a file imports."""
    for name in imported_names(file):
        if not name.startswith("omni_components."):
            continue
        path = name.removeprefix("omni_components.").replace(".", "/")
        known = [path, f"{path}/__init__", path.rpartition("/")[0], f"{path.rpartition('/')[0]}/__init__"]
        yield from [one for one in known if one in FILES][:1]
