"""``omni-components doctor``: what this machine has, how fast it is, and what is missing for what."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from ..errors import format_bytes
from .media import writes_mp4

if TYPE_CHECKING:
    import torch

PACKAGES = ("omni-components", "torch", "diffusers", "transformers", "safetensors")
_PROBE = 32 << 20  # bytes copied: enough to fill a link, little enough for any machine
_TRIES = 3  # the best counts: what else runs on the machine only slows it down
_UNLIMITED = 1 << 60  # control groups of version 1 write a huge number where there is no limit
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """A device that torch sees; ``None`` is what it does not tell."""

    name: str
    model: str | None
    total_bytes: int | None
    free_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFacts:
    """Bytes per second between host and device, with one copy of some size; ``problem`` if it failed."""

    device: str
    pinned: bool
    to_device: float | None
    to_host: float | None
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinningFacts:
    """Whether host memory can be pinned, and how fast, in bytes per second; ``problem`` if not."""

    works: bool
    speed: float | None
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """Host memory; a limit is ``None`` where there is none."""

    total: int | None
    available: int
    container_limit: int | None
    container_used: int | None
    lock_limit: int | None
    pinnable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """What is not here, what it would be good for, and how to get it."""

    what: str
    good_for: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that the doctor finds."""

    versions: dict[str, str | None]
    devices: tuple[DeviceFacts, ...]
    links: tuple[LinkFacts, ...]
    pinning: PinningFacts
    memory: MemoryFacts
    simulator_problem: str | None
    missing: tuple[Missing, ...]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say what this machine has, how fast it is, and what is missing for what.

    It changes nothing, and does not fail on a machine that lacks things: it names them.
    """
    diagnosis = examine()
    typer.echo(json.dumps(asdict(diagnosis), indent=2) if as_json else as_text(diagnosis))


def examine() -> Diagnosis:
    """Look at everything; whatever fails becomes a problem in words."""
    versions = {name: _version(name) for name in PACKAGES}
    devices, devices_problem = _tried(_devices)
    links = tuple(_link(one.name) for one in devices or ())
    simulator, problem = _tried(_simulator_problem)
    simulator = simulator or problem
    return Diagnosis(
        versions=versions,
        devices=devices or (),
        links=links,
        pinning=_pinning(),
        memory=_memory(),
        simulator_problem=simulator,
        missing=tuple(_missing(versions, bool(devices), devices_problem, simulator)),
    )


# --- looking --------------------------------------------------------------------------------------------


def _tried(look: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    """A result, or why there is none, in one line."""
    try:
        return look(), None
    except Exception as error:  # drivers and missing libraries fail in ways of their own
        return None, " ".join(str(error).split())[:300] or type(error).__name__


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> tuple[DeviceFacts, ...]:
    import torch  # imported here: --help need not wait for it

    if not torch.accelerator.is_available():
        return ()
    found = torch.accelerator.current_accelerator()
    kind = "" if found is None else found.type
    return tuple(_device(torch.device(kind, index)) for index in range(torch.accelerator.device_count()))


def _device(device: torch.device) -> DeviceFacts:
    import torch  # imported here, as above

    model, _ = _tried(lambda: str(torch.get_device_module(device).get_device_name(device.index)))
    memory, _ = _tried(lambda: torch.accelerator.get_memory_info(device))
    free, total = memory or (None, None)
    return DeviceFacts(name=str(device), model=model, total_bytes=total, free_bytes=free)


def _pinning() -> PinningFacts:
    def pin() -> float:
        import torch  # imported here, as above

        if not torch.accelerator.is_available():
            raise RuntimeError("no accelerator: there is nothing to pin for")
        host = torch.ones(_PROBE, dtype=torch.uint8)
        return _PROBE / _best(lambda: host.pin_memory())

    speed, problem = _tried(pin)
    return PinningFacts(works=problem is None, speed=speed, problem=problem)


def _link(device: str) -> LinkFacts:
    import torch  # imported here, as above

    host = torch.ones(_PROBE, dtype=torch.uint8)
    pinned, _ = _tried(host.pin_memory)
    source = host if pinned is None else pinned

    def measure() -> tuple[float, float]:
        there = torch.empty(_PROBE, dtype=torch.uint8, device=device)

        def copy(to: torch.Tensor, origin: torch.Tensor) -> None:
            to.copy_(origin, non_blocking=True)
            torch.accelerator.synchronize(device)

        copy(there, source)  # the first one also starts the device up
        return _PROBE / _best(lambda: copy(there, source)), _PROBE / _best(lambda: copy(source, there))

    speeds, problem = _tried(measure)
    to_device, to_host = speeds or (None, None)
    return LinkFacts(
        device=device, pinned=pinned is not None, to_device=to_device, to_host=to_host, problem=problem
    )


def _best(act: Callable[[], object]) -> float:
    """Seconds of the fastest of some tries."""
    times = []
    for _ in range(_TRIES):
        start = time.perf_counter()
        act()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def _memory() -> MemoryFacts:
    from ..transfer.hostmemory import available_bytes, container_limits, pinnable_bytes

    limits = [one for one in container_limits() if one[0] < _UNLIMITED]
    limit, used = min(limits, default=(None, None))
    return MemoryFacts(
        total=_tried(lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))[0],
        available=available_bytes(),
        container_limit=limit,
        container_used=used,
        lock_limit=_lock_limit(),
        pinnable=pinnable_bytes(),
    )


def _lock_limit() -> int | None:
    """``ulimit -l`` in bytes, where the system has such a thing."""
    with suppress(ImportError):
        import resource  # not everywhere

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return None if soft == resource.RLIM_INFINITY else soft
    return None


def _simulator_problem() -> str | None:
    from ..testing.simulated.build import unavailable_reason  # imported here: it imports torch

    return unavailable_reason()


def _missing(
    versions: dict[str, str | None], device: bool, device_problem: str | None, simulator: str | None
) -> list[Missing]:
    absent = [
        Missing(
            what=name,
            good_for="everything" if name == "torch" else "real pipelines",
            advice=f"pip install {name}",
        )
        for name, version in versions.items()
        if version is None
    ]
    if not device:
        why = f" ({device_problem})" if device_problem else ""
        advice = (
            "install the torch build for it, and its driver; the simulated accelerator stands in for tests."
        )
        absent.append(Missing(what=f"an accelerator{why}", good_for="speed", advice=advice))
    if simulator is not None:
        absent.append(
            Missing(what="the simulated accelerator", good_for="tests without a GPU", advice=simulator)
        )
    if not writes_mp4():
        advice = "pip install 'omni-components[video]'"
        absent.append(Missing(what="an MP4 encoder", good_for="run --out FILE.mp4", advice=advice))
    return absent


# --- telling --------------------------------------------------------------------------------------------


def as_text(found: Diagnosis) -> str:
    """The diagnosis for people."""
    sections = {
        "versions": [f"{name} {version or 'not installed'}" for name, version in found.versions.items()],
        "devices": [_device_line(one) for one in found.devices] or ["no accelerator; the CPU only"],
        "link": [_link_line(one) for one in found.links] or ["not measured: no accelerator"],
        "pinning": [_pinning_line(found.pinning)],
        "host memory": _memory_lines(found.memory),
        "simulated accelerator": [found.simulator_problem or "can be built, or is built already"],
        "missing": [f"{one.what}, for {one.good_for}: {one.advice}" for one in found.missing] or ["nothing"],
    }
    return "\n".join(
        f"{title if first else '':22} {line}"
        for title, lines in sections.items()
        for first, line in ((index == 0, line) for index, line in enumerate(lines))
    )


def _device_line(one: DeviceFacts) -> str:
    memory = (
        ""
        if one.total_bytes is None
        else f", {format_bytes(one.free_bytes or 0)} of {format_bytes(one.total_bytes)} free"
    )
    return f"{one.name}{f' ({one.model})' if one.model else ''}{memory}"


def _link_line(one: LinkFacts) -> str:
    if one.to_device is None or one.to_host is None:
        return f"{one.device}: not measured: {one.problem}"
    kind = "pinned" if one.pinned else "pageable"
    return f"{one.device}: {_speed(one.to_device)} to the device, {_speed(one.to_host)} back ({kind})"


def _pinning_line(one: PinningFacts) -> str:
    return f"works, {_speed(one.speed)}" if one.speed is not None else f"does not work: {one.problem}"


def _memory_lines(one: MemoryFacts) -> list[str]:
    total = "" if one.total is None else f" of {format_bytes(one.total)}"
    lines = [f"{format_bytes(one.available)}{total} available, {format_bytes(one.pinnable)} may be pinned"]
    if one.container_limit is not None:
        used = format_bytes(one.container_used or 0)
        lines.append(f"container: {used} of {format_bytes(one.container_limit)} used")
    if one.lock_limit is not None:
        lines.append(f"ulimit -l: {format_bytes(one.lock_limit)}")
    return lines


def _speed(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"
