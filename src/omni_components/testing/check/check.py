"""check_offload: the public face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...components.recipe import Recipe
from ...policy import OffloadPolicy
from ...sizes import parse_bytes
from .records import CheckReport, OffloadCheckError
from .runs import Options
from .steps import Check
from .targets import own_random_numbers


def check_offload(
    factory: Callable[[], Any],
    inputs: Any,
    *,
    capacity: int | str | None = None,
    call: Callable[..., Any] | None = None,
    seed: int = 0,
    orders: int = 25,
    faults: bool | int = True,
    loads: Mapping[str, int] | None = None,
    recipe: Recipe | None = None,
    policy: OffloadPolicy | None = None,
    **fields: Any,
) -> CheckReport:
    """Show, on the simulated accelerator, that a pipeline or split model can be offloaded.

    It runs the target resident and offloaded and compares bit for bit; lets every component leave as soon as its
    scope closes; enters scopes in random orders with late copies; fails at every fault point of every switch of one
    request; checks traffic and peak; and looks for tensors that nobody owns.

    Args:
        factory: Makes a new target each time, with the same weights; random numbers are seeded before.
        inputs: Of one request: keyword arguments as a dict, positional ones as a tuple, or a function of the device
            that gives either. Tensors of a dict or tuple are put on the device.
        capacity: Device bytes that one offloaded request may use, such as ``"64MiB"``.
        call: Makes a request, as ``call(target, **inputs)``; by default the target is called, or its ``generate``.
        seed: Of all random numbers.
        orders: How many random phase orders; more than 0 needs Hypothesis.
        faults: Whether to walk the faults; a number walks so many at most.
        loads: How often one request may load a component, by name; once if not named.
        recipe: The declaration of a target whose class cannot be changed.
        policy: How components take turns.
        **fields: Single fields of the policy, such as ``vae="exclusive"``.

    Returns:
        What was checked; prints as a table.

    Raises:
        OffloadCheckError: Something is wrong; it lists all of it.
        SimulatedAcceleratorUnavailable: There is no C++ compiler here.
        PolicyError: A field of the policy is not possible.
    """
    __tracebackhide__ = True
    options = Options(
        factory=factory,
        inputs=inputs,
        capacity=None if capacity is None else parse_bytes(capacity),
        call=call,
        seed=seed,
        orders=orders,
        faults=faults,
        loads=dict(loads or {}),
        recipe=recipe,
        policy=OffloadPolicy.of(policy, fields),
    )
    with own_random_numbers():
        check = Check(options)
        check.run()
    report = check.report()
    if report.findings:
        raise OffloadCheckError(report)
    return report
