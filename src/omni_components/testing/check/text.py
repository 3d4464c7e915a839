"""Findings and reports in plain words; every fact comes from the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ...components.declaration import REST
from ...errors import format_bytes
from .records import CheckFinding, CheckReport

_SHOWN = 4  # tensors named in one sentence

_SCOPE_OF_PART = (
    "Put this use inside `with self._offload_context({name!r}):`, or list the tensor under the part that uses it, "
    "or under none: then it stays on the device."
)
_SCOPE_OF_MODULE = (
    "Call the module itself, or open `with handle.scope({name!r}):` around the use, or name the method in "
    "entry_points=, or list the module in _resident_modules."
)


def finding_text(one: CheckFinding) -> str:
    """One finding: what, where, what to do."""
    return " ".join(_SENTENCES[one.kind](one).split())


def error_text(report: CheckReport) -> str:
    """All findings, numbered, and the table below them."""
    count = len(report.findings)
    head = f"check_offload({report.target}): {count} finding{'' if count == 1 else 's'}"
    lines = [f"  {number}. {finding_text(one)}" for number, one in enumerate(report.findings, start=1)]
    return "\n".join([head, *lines, "", *_table(report)])


def report_text(report: CheckReport) -> str:
    """The report as a table."""
    if report.findings:
        return error_text(report)
    return "\n".join([f"check_offload({report.target}): passed", *_table(report)])


# --- findings -------------------------------------------------------------------------------------------


def _who(one: CheckFinding) -> str:
    return f"{'the part' if one.part else 'the component'} {one.component!r}"


def _names(one: CheckFinding) -> str:
    shown = ", ".join(repr(name) for name in one.tensors[:_SHOWN])
    more = len(one.tensors) - _SHOWN
    return shown + (f" and {more} more" if more > 0 else "")


def _place(one: CheckFinding) -> str:
    return (f"at {one.where}" if one.where else "") + (f" in {one.function}()" if one.function else "")


def _held(one: CheckFinding) -> str:
    return (
        f"the device is held by {', '.join(map(repr, one.present))}"
        if one.present
        else "nobody has the device"
    )


def _scope_advice(one: CheckFinding) -> str:
    return (_SCOPE_OF_PART if one.part else _SCOPE_OF_MODULE).format(name=one.component)


def _outside_scope(one: CheckFinding) -> str:
    return (
        f"{_names(one)} of {_who(one)} is used outside its scope {_place(one)}: it is on the host then, and "
        f"{_held(one)}. {_scope_advice(one)}"
    )


def _host_compute(one: CheckFinding) -> str:
    return (
        f"{_names(one)} of {_who(one)} is used outside its scope {_place(one)}: that computes on the host, where "
        f"the inputs are, too ({_held(one)}). {_scope_advice(one)}"
    )


def _old_reference(one: CheckFinding) -> str:
    return (
        f"{_names(one)} of {_who(one)} is used through an old reference {_place(one)}: it was taken before the "
        "component was moved, and its memory may be a rival's by now. Take the tensor from its module at each use, "
        f"inside the scope ({_held(one)})."
    )


def _race(one: CheckFinding) -> str:
    whose = f" of {_who(one)}" if one.component and not one.component.endswith(REST) else ""
    copied = f" The copy is issued at {one.other}." if one.other and one.other != one.where else ""
    return (
        f"missing wait: {_names(one)}{whose} is used {_place(one)} while another stream may still be at work on it "
        f"({one.detail}).{copied} Let the stream wait: `stream.wait_stream(other)`, or wait for an event."
    )


def _unowned(one: CheckFinding) -> str:
    return (
        f"{_names(one)} belongs to nobody and stays on the host, but is used {_place(one)} with tensors on the "
        "device: it is neither a parameter nor a buffer. Register it: `self.register_buffer(name, tensor)`."
    )


def _undeclared(one: CheckFinding) -> str:
    return (
        f"{_names(one)} is in no declared component, and so stays on the host, but is used {_place(one)} with "
        "tensors on the device. List its module in _resident_modules, or under the role that it has."
    )


def _mixed(one: CheckFinding) -> str:
    made = f", made at {one.other}," if one.other else ""
    return (
        f"{_names(one)}{made} is on the host and is used {_place(one)} with tensors on the device. Make it where the "
        "others are: `device=x.device`."
    )


def _error(one: CheckFinding) -> str:
    return f"{one.step} raised {_place(one)}: {one.detail}"


def _outputs(one: CheckFinding) -> str:
    return f"{one.step} gave something else than the resident run: {one.detail}."


def _order(one: CheckFinding) -> str:
    named = f"{_names(one)}: " if one.tensors else ""
    return f"phases in another order went wrong: {named}{one.detail}. {_place(one)}"


def _after(one: CheckFinding) -> str:
    return f"after {one.step}" + (f" ({one.component!r})" if one.component else "")


def _factory(one: CheckFinding) -> str:
    return (
        f"factory() {one.detail}: {_names(one)}. It must make a new target each time, with the same weights: "
        "call torch.manual_seed in it, or load them from a file."
    )


def _thrash(one: CheckFinding) -> str:
    return (
        f"{_who(one)} was loaded {one.detail} in one request: {format_bytes(one.bytes)} more than once each over the "
        f"link. Finish the work of one component before its rival starts: open the scope around the loop. If it "
        f"must be so, say how often: loads={{{one.component!r}: ...}}."
    )


_SENTENCES: dict[str, Callable[[CheckFinding], str]] = {
    "factory": _factory,
    "not_reproducible": lambda one: (
        f"two resident runs differ, so that nothing can be compared: {one.detail}. Draw noise from a generator with "
        "a seed."
    ),
    "declaration": lambda one: f"the declaration cannot be carried out: {one.detail}",
    "outside_scope": _outside_scope,
    "host_compute": _host_compute,
    "old_reference": _old_reference,
    "race": _race,
    "unowned": _unowned,
    "undeclared": _undeclared,
    "mixed": _mixed,
    "error": _error,
    "outputs": _outputs,
    "order": _order,
    "state": lambda one: f"{_after(one)} the state is not whole: {one.detail}.",
    "weights": lambda one: f"{_after(one)} {_names(one)} has lost its weights.",
    "next_request": lambda one: f"{_after(one)} the next request went wrong: {one.detail}.",
    "thrash": _thrash,
    "write_back": lambda one: (
        f"{_who(one)} sent {format_bytes(one.bytes)} home: its weights were written to on the device, by offload and "
        "not without it."
    ),
    "traffic": lambda one: f"{_who(one)} moved {format_bytes(one.bytes)} in a load; {one.detail}.",
    "peak": lambda one: f"the weights took {format_bytes(one.bytes)} of the device; {one.detail}.",
    "capacity": lambda one: (
        f"one request needs {format_bytes(one.bytes)} of the device; {one.detail}. Split the largest component, or "
        "lower the size of the request."
    ),
}


# --- the table ------------------------------------------------------------------------------------------


def _table(report: CheckReport) -> Iterator[str]:
    if report.components:
        rows = [("component", "role", "bytes", "loads", "bytes in", "calls")]
        rows += [
            (
                one.name,
                f"{one.role}{' *' if one.resident else ''}",
                format_bytes(one.bytes),
                str(one.loads),
                format_bytes(one.bytes_in),
                str(one.calls),
            )
            for one in report.components
        ]
        yield from _aligned(rows, left=2)
        yield "one request; * resident: on the device all the time"
        yield _traffic_line(report)
        yield _peak_line(report)
    yield from _aligned(
        [_step_cells(one.name, one.count, one.of, one.seconds) for one in report.steps], left=1
    )
    yield from (f"note: {note}" for note in report.notes)


def _step_cells(name: str, count: int, of: str, seconds: float) -> tuple[str, str, str]:
    return name, f"{count} {of}", f"{seconds:.1f} s"


def _traffic_line(report: CheckReport) -> str:
    return (
        f"traffic: {format_bytes(report.bytes_in)} in (each component once: {format_bytes(report.expected_bytes)}), "
        f"{format_bytes(report.bytes_out)} out"
    )


def _peak_line(report: CheckReport) -> str:
    capacity = "" if report.capacity is None else f", capacity {format_bytes(report.capacity)}"
    return (
        f"peak: {format_bytes(report.peak_bytes)}, of it weights {format_bytes(report.weight_peak)} (predicted at "
        f"most {format_bytes(report.predicted_peak)}); resident {format_bytes(report.resident_peak)}{capacity}"
    )


def _aligned(rows: Sequence[tuple[str, ...]], *, left: int) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
