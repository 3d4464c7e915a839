"""What a viewer of the Trace Event Format asks of a file: a JSON Schema of its events, and what no schema can say.

Written from the public description of the format ("Trace Event Format",
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): the phases, the fields that each needs,
microseconds, what pairs with what. ``chrome://tracing`` and ui.perfetto.dev read it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

_NUMBER, _TEXT, _OBJECT = {"type": "number"}, {"type": "string"}, {"type": "object"}
_NAME_OR_NUMBER = {"type": ["string", "integer"]}
_NUMBERS = {"type": "object", "minProperties": 1, "additionalProperties": _NUMBER}


def _metadata(name: str, argument: str, kind: dict[str, Any]) -> dict[str, Any]:
    args = {"type": "object", "required": [argument], "properties": {argument: kind}}
    return {"properties": {"name": {"const": name}, "args": args}}


def _when(phases: str, **needed: Any) -> dict[str, Any]:
    """Events of these phases need these fields."""
    return {
        "if": {"properties": {"ph": {"enum": list(phases)}}},
        "then": {"required": sorted(needed), "properties": needed},
    }


_EVENT = {
    "type": "object",
    "required": ["ph", "pid"],
    "properties": {
        "ph": {"enum": list("BEXiICbnestfPNODMVvRc()")},
        "name": _TEXT,
        "cat": _TEXT,
        "pid": _NAME_OR_NUMBER,
        "tid": _NAME_OR_NUMBER,
        "ts": {"type": "number", "minimum": 0},
        "args": _OBJECT,
        "cname": _TEXT,
    },
    "allOf": [
        _when("BXiICbnestf", name=_TEXT, ts=_NUMBER),
        _when("BEXi", tid=_NAME_OR_NUMBER, ts=_NUMBER),
        _when("X", dur={"type": "number", "minimum": 0}),
        _when("iI", s={"enum": ["g", "p", "t"]}),
        _when("C", args=_NUMBERS),
        _when("bne", id=_NAME_OR_NUMBER, cat=_TEXT),
        _when("stf", id=_NAME_OR_NUMBER, cat=_TEXT),
        {
            "if": {"properties": {"ph": {"const": "M"}}},
            "then": {
                "required": ["name", "args"],
                "anyOf": [
                    _metadata("process_name", "name", _TEXT),
                    _metadata("process_labels", "labels", _TEXT),
                    _metadata("process_sort_index", "sort_index", _NUMBER),
                    _metadata("thread_name", "name", _TEXT),
                    _metadata("thread_sort_index", "sort_index", _NUMBER),
                ],
            },
        },
    ],
}
SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "traceEvents": {"type": "array", "items": _EVENT},
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "otherData": _OBJECT,
    },
}
_VALIDATOR = jsonschema_rs.validator_for(SCHEMA)


def problems(text: str) -> list[str]:
    """What is wrong with the text of a trace file; nothing, if a viewer shows all of it."""
    try:
        trace = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        return [f"no JSON: {error}"]
    found = [f"{list(one.instance_path)}: {one.message}" for one in _VALIDATOR.iter_errors(trace)]
    return found or [*_structure(trace["traceEvents"])]


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number of JSON")


def _structure(events: list[dict[str, Any]]) -> Iterator[str]:
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] in "BEXiIbne":
            tracks[event["pid"], event.get("tid")].append(event)
    for track, mine in tracks.items():
        yield from _in_order(track, mine)
        yield from _begun_and_ended(track, mine)
        yield from _nested(track, [one for one in mine if one["ph"] == "X"])
    yield from _paired(events, "b", "e")
    yield from _paired(events, "s", "f")
    yield from _named_once(events)


def _in_order(track: object, events: list[dict[str, Any]]) -> Iterator[str]:
    """Viewers sort, but streaming readers of a track need it in the order of time."""
    latest = -math.inf
    for one in events:
        if one["ts"] < latest:
            yield f"track {track}: {one['name']!r} at {one['ts']} comes after {latest}"
        latest = max(latest, one["ts"])


def _begun_and_ended(track: object, events: list[dict[str, Any]]) -> Iterator[str]:
    open_ones: list[str] = []
    for one in events:
        if one["ph"] == "B":
            open_ones.append(one["name"])
        elif one["ph"] == "E" and not open_ones:
            yield f"track {track}: an end at {one['ts']} without a beginning"
        elif one["ph"] == "E" and one.get("name", open_ones[-1]) != open_ones.pop():
            yield f"track {track}: {one['name']!r} ends inside another"
    yield from (f"track {track}: {name!r} never ends" for name in open_ones)


def _nested(track: object, slices: list[dict[str, Any]]) -> Iterator[str]:
    """Complete events of one track lie apart or one inside the other; else a viewer drops some."""
    ends: list[float] = []
    for one in slices:
        end = one["ts"] + one["dur"]
        while ends and ends[-1] <= one["ts"] + _ROUNDING:
            ends.pop()
        if ends and end > ends[-1] + _ROUNDING:
            yield f"track {track}: {one['name']!r} at {one['ts']} overlaps the one before it"
        ends.append(end)


_ROUNDING = 1e-6  # microseconds: a sum of two numbers that are exact to the nanosecond


def _paired(events: list[dict[str, Any]], first: str, last: str) -> Iterator[str]:
    begun: dict[tuple[object, ...], float] = {}
    for one in events:
        if one["ph"] not in (first, last):
            continue
        key = (one["pid"], one["cat"], one["id"], one["name"])
        if one["ph"] == first:
            begun[key] = one["ts"]
        elif key not in begun:
            yield f"{key}: {last!r} without {first!r}"
        elif one["ts"] < begun.pop(key):
            yield f"{key}: ends before it begins"
    yield from (f"{key}: {first!r} without {last!r}" for key in begun)


def _named_once(events: list[dict[str, Any]]) -> Iterator[str]:
    """A track has a name, so that a reader knows whose it is, and not two."""
    names = [(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name" and one["ph"] == "M"]
    yield from (f"track {track} has two names" for track in set(names) if names.count(track) > 1)
    used = {(one["pid"], one["tid"]) for one in events if one["ph"] in "BEXiI"}
    yield from (f"track {track} has no name" for track in used - set(names))
