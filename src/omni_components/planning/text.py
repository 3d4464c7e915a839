"""A plan as text: ASCII, to read in a terminal or paste into an issue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..errors import format_bytes
from .plan import Option, Plan


def as_text(plan: Plan) -> str:
    """The components, every policy, and which one to take."""
    return "\n".join(_lines(plan))


def _lines(plan: Plan) -> Iterator[str]:
    yield f"{plan.model}: nothing was loaded; shapes from {_sources(plan)}"
    yield ""
    yield from _aligned(_components(plan), left=(0, 1, 4))
    yield ""
    yield from _aligned(_options(plan), left=(0, 6))
    yield ""
    others = [one for one in plan.options if _at_first(one) != _later(one)]
    if others:
        yield from _aligned(_firsts(others), left=(0,))
        yield ""
    room = plan.room
    activations = format_bytes(room.for_activations())
    if room.device is not None:
        kind = (
            "given"
            if room.activations is not None
            else "an estimate: a fifth of the device; --activations sets it"
        )
        yield f"device memory {format_bytes(room.device)}, of which {activations} for activations ({kind})"
    if room.host is not None:
        yield f"host memory {format_bytes(room.host)}"
    yield f"seconds at {room.link / 1e9:g} GB/s, one request: each component that takes turns, once"
    yield from (f"left out: {name}: {reason}" for name, reason in plan.skipped.items())
    yield from (f"{one.name}: {one.reason}" for one in plan.options if one.reason)
    yield _advice(plan)


def _sources(plan: Plan) -> str:
    kinds = sorted(set(plan.sources.values())) or ["the loaded model"]
    names = {"headers": "the headers of the weight files", "configuration": "the configuration alone"}
    return " and ".join(names.get(one, one) for one in kinds)


def _components(plan: Plan) -> Iterator[Sequence[str]]:
    yield "component", "role", "bytes", "a load", "never on the device with"
    for one in plan.components:
        rivals = ", ".join(one.rivals) or ("-" if not one.resident else "- (always there)")
        yield one.name, one.role, format_bytes(one.bytes), format_bytes(one.link_bytes), rivals


def _options(plan: Plan) -> Iterator[Sequence[str]]:
    yield "policy", "device peak", "pinned", "host", "link", "seconds", "fits"
    for one in plan.options:
        sizes = (one.device_peak, one.pinned_bytes, one.host_bytes, one.link_bytes)
        yield one.name, *map(format_bytes, sizes), f"{one.link_seconds:.3f}", _fits(one)


def _firsts(options: Iterable[Option]) -> Iterator[Sequence[str]]:
    yield "first request", "pinned", "link", "seconds"
    for one in options:
        pinned, link = _at_first(one)
        yield one.name, format_bytes(pinned), format_bytes(link), f"{one.first.link_seconds:.3f}"


def _at_first(option: Option) -> tuple[int, int]:
    return option.first.pinned_bytes, option.first.link_bytes


def _later(option: Option) -> tuple[int, int]:
    return option.pinned_bytes, option.link_bytes


def _fits(option: Option) -> str:
    return {None: "", True: "yes", False: "no"}[option.fits]


def _advice(plan: Plan) -> str:
    best = next((one for one in plan.options if one.name == plan.best), None)
    if best is None and plan.room.device is None and plan.room.host is None:
        return "say --device-memory and --host-memory to see what fits"
    if best is None:
        return "nothing fits: a smaller dtype, a quantised model, or a larger device"
    if best.arguments is None:
        return "take: everything resident; there is nothing to offload"
    arguments = "".join(f", {name}={value!r}" for name, value in best.arguments.items())
    return f"take: {best.name}: Omni(model, enable_cpu_offload=True{arguments})"


def _aligned(rows: Iterable[Sequence[str]], left: Sequence[int]) -> Iterator[str]:
    table = [list(row) for row in rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for index, row in enumerate(table):
        cells = [
            one.ljust(width) if i in left else one.rjust(width)
            for i, (one, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
        if index == 0:
            yield "  ".join("-" * width for width in widths)
