"""A report back from the trace file that it was written to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..protocols import MoverFacts
from ..residency.events import Cause, EventKind, ResidencyEvent
from .report import ComponentRow, Request, ResidencyReport
from .trace import RECORD, VERSION

_MAKE_ONE = "Make one with: omni-components run MODEL PROMPT --out FILE --trace TRACE."


def read_json(path: Path, advice: str) -> Any:
    """What a JSON file holds.

    Raises:
        ModelError: It cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(str(path), f"cannot be read ({error.strerror or error}).", advice) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(str(path), f"is no JSON, or was cut short ({error}).", advice) from error


def read_trace(path: Path | str) -> ResidencyReport:
    """The report of a trace file, with its whole history.

    Raises:
        ModelError: It is no trace of this package, or nothing happened in it.
    """
    found = read_json(Path(path), _MAKE_ONE)
    if not isinstance(found, dict) or not isinstance(found.get("traceEvents"), list):
        raise ModelError(str(path), "is not a trace.", _MAKE_ONE)
    other = found.get("otherData")
    record = other.get(RECORD) if isinstance(other, dict) else None
    if not isinstance(record, dict) or record.get("version") != VERSION:
        raise ModelError(str(path), "is a trace of another program or version.", _MAKE_ONE)
    try:
        report = _report(record)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(str(path), f"holds a damaged record ({error}).", _MAKE_ONE) from error
    if all(one.kind in (EventKind.ENABLE, EventKind.DISABLE) for one in report.events):
        raise ModelError(str(path), "is an empty trace: nothing moved.", _MAKE_ONE)
    return report


def _report(record: dict[str, Any]) -> ResidencyReport:
    return ResidencyReport(
        device=str(record["device"]),
        rows=tuple(ComponentRow(**row) for row in record["rows"]),
        peak_bytes=int(record["peak_bytes"]),
        predicted_peak=int(record["predicted_peak"]),
        facts=MoverFacts(**record["facts"]),
        events=tuple(map(_event, record["events"])),
        taken_at=float(record["taken_at"]),
        notes=tuple(map(str, record["notes"])),
        # Traces of 0.1.0's first days lack these two.
        policy=None if record.get("policy") is None else dict(record["policy"]),
        requests=tuple(Request(**one) for one in record.get("requests", ())),
    )


def _event(one: dict[str, Any]) -> ResidencyEvent:
    return ResidencyEvent(
        kind=EventKind(one["kind"]),
        component=str(one["component"]),
        cause=Cause(one["cause"]),
        bytes=int(one["bytes"]),
        seconds=float(one["seconds"]),
        at=float(one["at"]),
        device_bytes=int(one["device_bytes"]),
    )
