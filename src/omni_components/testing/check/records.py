"""What a check found, as records; the text is made from them in ``text.py``. No torch here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ...errors import OmniComponentsError

FindingKind = Literal[
    "factory",
    "not_reproducible",
    "declaration",
    "outside_scope",
    "host_compute",
    "old_reference",
    "race",
    "unowned",
    "undeclared",
    "mixed",
    "error",
    "outputs",
    "order",
    "state",
    "weights",
    "next_request",
    "thrash",
    "write_back",
    "traffic",
    "peak",
    "capacity",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One thing that is wrong.

    Attributes:
        kind: What kind of thing.
        component: The component it is about; empty if none.
        part: It is a part of a split model, which opens its scopes itself.
        tensors: Dotted paths of the parameters, buffers or attributes it is about, or what they are called.
        where: ``file:line`` of the source of the pipeline's author; empty if no line is to blame.
        other: The other ``file:line``, such as the copy that nobody waited for.
        function: The function around ``where``.
        present: The components that had the device then.
        step: What the check was doing.
        detail: The facts that only this kind has, in words.
        bytes: How many bytes it is about.
    """

    kind: FindingKind
    component: str = ""
    part: bool = False
    tensors: tuple[str, ...] = ()
    where: str = ""
    other: str = ""
    function: str = ""
    present: tuple[str, ...] = ()
    step: str = ""
    detail: str = ""
    bytes: int = 0

    def __str__(self) -> str:
        from .text import finding_text

        return finding_text(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedComponent:
    """One component in one request.

    Attributes:
        name: Unique in its ledger.
        role: ``encoder``, ``dit``, ``part``, ``vae`` or ``resident``.
        resident: It is on the device all the time.
        bytes: Its device bytes.
        loads: How often one request loaded it.
        bytes_in: What that sent over the link.
        calls: Calls of its modules that the phase orders can repeat.
    """

    name: str
    role: str
    resident: bool
    bytes: int
    loads: int
    bytes_in: int
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckStep:
    """One thing that was checked: its name, how many of what, and the seconds it took."""

    name: str
    count: int
    of: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CheckReport:
    """What ``check_offload`` checked and found; prints as a table.

    Attributes:
        target: The class of the pipeline or model.
        steps: What was checked, in order.
        components: What there is to swap, and what one request moved.
        findings: What is wrong; empty if the check passed.
        notes: What is not wrong but worth knowing.
        bytes_in: Bytes of weights that one request sends to the device.
        expected_bytes: Those that the formula asks for: each swapped component that is used, once.
        bytes_out: Bytes of weights that one request sends home.
        peak_bytes: Most device bytes of one offloaded request, activations and inputs included.
        weight_peak: Most device bytes of weights.
        predicted_peak: Most that the declaration allows.
        resident_peak: Most device bytes of a request without offload.
        capacity: The device bytes that were asked for; ``None`` for no limit.
    """

    target: str
    steps: tuple[CheckStep, ...] = ()
    components: tuple[CheckedComponent, ...] = ()
    findings: tuple[CheckFinding, ...] = ()
    notes: tuple[str, ...] = ()
    bytes_in: int = 0
    expected_bytes: int = 0
    bytes_out: int = 0
    peak_bytes: int = 0
    weight_peak: int = 0
    predicted_peak: int = 0
    resident_peak: int = 0
    capacity: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)

    def count(self, name: str) -> int:
        """How many a step counted; 0 if it did not run."""
        return sum(step.count for step in self.steps if step.name == name)

    def __repr__(self) -> str:
        state = f"{len(self.findings)} findings" if self.findings else "passed"
        return f"<CheckReport of {self.target}: {state}, {len(self.steps)} steps>"

    def __str__(self) -> str:
        from .text import report_text

        return report_text(self)


class OffloadCheckError(OmniComponentsError, AssertionError):
    """``check_offload`` found something wrong; the text lists all of it.

    Attributes:
        report: What was checked and found.
    """

    def __init__(self, report: CheckReport) -> None:
        self.report = report

    @property
    def findings(self) -> tuple[CheckFinding, ...]:
        """What is wrong."""
        return self.report.findings

    def __str__(self) -> str:
        from .text import error_text

        return error_text(self.report)
