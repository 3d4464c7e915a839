"""torch's own operator database, run on the device and on the CPU: equal bit for bit."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from omni_components.testing import SimulatedAccelerator

# What is left out, and why.
NOT_EQUAL = {
    "empty": "has no values to compare",
    "empty_like": "has no values to compare",
    "empty_permuted": "has no values to compare",
    "empty_strided": "has no values to compare",
    "new_empty": "has no values to compare",
    "new_empty_strided": "has no values to compare",
    "as_strided.partial_views": "reads the storage beyond its input, which `to` does not copy",
    "tensor_split": "wants its sections on the CPU, on every accelerator",
    "to_sparse": "sparse tensors are not simulated",
    "sparse.sampled_addmm": "sparse tensors are not simulated",
    "sparse.mm.reduce": "sparse tensors are not simulated",
    "linalg.lstsq": "chooses its LAPACK driver by device type, as it does for CUDA",
    "linalg.lstsq.grad_oriented": "chooses its LAPACK driver by device type, as it does for CUDA",
    "nn.functional.linear_cross_entropy.chunked": "chooses how it accumulates by device type",
    "nn.functional.linear_cross_entropy.chunked_none": "chooses how it accumulates by device type",
}


def _operators() -> list[Any]:
    # The database imports a package that it needs for nothing here.
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        if "expecttest" not in sys.modules:
            patch.setitem(sys.modules, "expecttest", stand_in)
        from torch.testing._internal.common_methods_invocations import op_db
    return list(op_db)


def _name(operator: Any) -> str:
    return ".".join(filter(None, (operator.name, operator.variant_test_name)))


def _moved(values: Any, device: torch.device) -> Any:
    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return device if value == "cpu" or isinstance(value, torch.device) else value

    return tree_map(move, values)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # NaN equals NaN here: compare bytes, not numbers.
    plain = tensor.resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return plain.view(torch.uint8)


def _difference(here: Any, there: Any, device: torch.device) -> str | None:
    ours, theirs = tree_flatten(here), tree_flatten(there)
    if ours[1] != theirs[1]:
        return "another structure"
    for expected, actual in zip(ours[0], theirs[0], strict=True):
        if not isinstance(expected, torch.Tensor):
            if expected != actual and expected == expected:
                return f"{actual} instead of {expected}"
            continue
        if actual.device != device:
            return f"a result on {actual.device}"
        geometry = [(t.dtype, t.shape, t.stride()) for t in (expected, actual)]
        if geometry[0] != geometry[1]:
            return f"{geometry[1]} instead of {geometry[0]}"
        if not torch.equal(_bits(expected), _bits(actual.cpu())):
            return "other values"
    return None


def _check(operator: Any, dtype: torch.dtype, samples: int, device: torch.device) -> str | None:
    torch.manual_seed(0)
    # Not `sample_inputs`: it walks the call stack for each sample.
    inputs = operator.sample_inputs_func(operator, "cpu", dtype, requires_grad=False)
    for sample in islice(inputs, samples):
        arguments = (sample.input, sample.args, sample.kwargs)
        moved = _moved(arguments, device)
        torch.manual_seed(1)
        try:
            here = operator(arguments[0], *arguments[1], **arguments[2])
        except Exception:
            continue  # not a case for the CPU either
        torch.manual_seed(1)
        try:
            there = operator(moved[0], *moved[1], **moved[2])
        except Exception as error:
            return f"{type(error).__name__}: {str(error)[:200]}"
        difference = _difference(here, there, device)
        if difference is not None:
            return difference
    return None


@pytest.fixture(scope="module")
def operators() -> list[Any]:
    return _operators()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("dtype", "samples", "at_least"),
    [(torch.float32, 2, 500), (torch.bfloat16, 1, 400), (torch.int64, 1, 300), (torch.complex64, 1, 200)],
    ids=["float32", "bfloat16", "int64", "complex64"],
)
def test_operators_equal_the_cpus(
    sim: SimulatedAccelerator,
    operators: list[Any],
    dtype: torch.dtype,
    samples: int,
    at_least: int,
    one_thread: None,
) -> None:
    checked = [
        operator
        for operator in operators
        if dtype in operator.supported_dtypes("cpu") and _name(operator) not in NOT_EQUAL
    ]
    results = {_name(operator): _check(operator, dtype, samples, sim.device) for operator in checked}
    wrong = {name: result for name, result in results.items() if result is not None}
    assert wrong == {}
    assert len(results) >= at_least
    assert sim.races == []


def test_the_exceptions_exist(operators: list[Any]) -> None:
    assert NOT_EQUAL.keys() <= {_name(operator) for operator in operators}
