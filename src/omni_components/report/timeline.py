"""The timeline picture: a lane per component, and the device bytes below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import PolicyError, format_bytes
from ..residency.events import EventKind, ResidencyEvent
from .files import written_whole
from .spans import Layer, Span, ends_at, layers, spans, starts_at

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .report import ResidencyReport

FORMATS = (".png", ".svg")

# Okabe and Ito's palette for all kinds of colour vision (jfly.uni-koeln.de/color), its yellow left out as too
# pale on white; neighbours in this order also differ in lightness.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_RESIDENT, _INK, _FAINT = "#B8BCC2", "#23272E", "#8A9099"
_BAR = 0.62  # of a lane's height
_PALE = 0.6  # how much white is in a bar while the bytes travel
_MARKS = {
    EventKind.WRITE_BACK: ("v", "written back"),
    EventKind.ADOPT: ("P", "adopted"),
    EventKind.ROLLBACK: ("X", "rolled back"),
}
_MARK: dict[str, Any] = {"color": _INK, "markersize": 6.5, "markeredgecolor": "white", "markeredgewidth": 0.8}
_Of = TypeVar("_Of", ResidencyEvent, Span, Layer)


def draw_timeline(report: ResidencyReport, path: Path | str) -> None:
    """Draw who was on the device when, and how much of its memory was taken; no half-written file is left.

    Args:
        report: What happened.
        path: A ``.png`` or ``.svg`` file.

    Raises:
        PolicyError: Another suffix.
        OSError: The file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() not in FORMATS:
        raise PolicyError("path", str(path), f"a file name that ends in {' or '.join(FORMATS)}")
    kind = target.suffix.lower().removeprefix(".")
    figure = timeline_figure(report)
    with written_whole(target) as (draft,):
        # No date in it: a picture that shows the same need not look changed to git.
        figure.savefig(draft, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})


def timeline_figure(report: ResidencyReport) -> Figure:
    """The picture before it becomes a file: two axes, lanes above bytes."""
    # Imported here: `import omni_components` must not pay for matplotlib. The figure draws itself (no pyplot), so
    # that nothing of a program that plots is touched, and no display is needed.
    from matplotlib.figure import Figure

    plan = _Plan.of(report)
    high = max(3, len(plan.lanes)) * (0.34 if len(plan.lanes) <= 14 else 0.25)
    figure = Figure(figsize=(9.6, high + 3.3), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(high, 1.9))
    for axes in (above, below):
        _tidy(axes)
    _draw_lanes(above, plan)
    _draw_bytes(below, plan, report)
    below.set_xlim(0.0, plan.length or 1.0)
    title = f"Who was on the device ({report.device}), and when"
    figure.suptitle(title, x=0.01, ha="left", color=_INK, parse_math=False)
    _draw_legend(figure, above, plan)
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is drawn where: lanes from the top, colours, and times in a unit that suits the length."""

    lanes: tuple[str, ...]
    colours: dict[str, str]
    events: dict[str, list[ResidencyEvent]]
    spans: dict[str, list[Span]]
    layers: dict[str, list[Layer]]
    origin: float
    scale: float
    unit: str
    length: float

    @classmethod
    def of(cls, report: ResidencyReport) -> _Plan:
        residents = [row.name for row in report.rows if row.resident]
        swapped = [row.name for row in report.rows if not row.resident]
        stays = _by_component(spans(report.events, until=report.taken_at))
        # In the order of their first load, as a request goes; then who was never loaded, then the residents.
        lanes = (*dict.fromkeys(one for one in [*stays, *swapped] if one not in residents), *residents)
        coloured = [name for name in lanes if name not in residents]
        colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(coloured)}
        origin = starts_at(report.events)
        seconds = ends_at(report.events, report.taken_at) - origin if report.events else 0.0
        scale, unit = (1.0, "s") if seconds >= 2 else (1e3, "ms")
        return cls(
            lanes=lanes,
            colours=colours,
            events=_by_component(report.events),
            spans=stays,
            layers=_by_component(layers(report.events, order=(*residents, *coloured), until=report.taken_at)),
            origin=origin,
            scale=scale,
            unit=unit,
            length=seconds * scale,
        )

    def time(self, at: float) -> float:
        return (at - self.origin) * self.scale

    def colour(self, name: str) -> str:
        return self.colours.get(name, _RESIDENT)


def _by_component(records: Iterable[_Of]) -> dict[str, list[_Of]]:
    sorted_out: dict[str, list[_Of]] = defaultdict(list)
    for one in records:
        sorted_out[one.component].append(one)
    return sorted_out


# --- lanes ----------------------------------------------------------------------------------------------


def _draw_lanes(axes: Axes, plan: _Plan) -> None:
    for index, name in enumerate(plan.lanes):
        axes.axhline(index, color=_FAINT, linewidth=0.6, alpha=0.35, zorder=0)
        _draw_bars(axes, plan, index, name)
        _draw_marks(axes, plan, index, plan.events[name])
    axes.set_yticks(range(len(plan.lanes)), [_shortened(name) for name in plan.lanes])
    for tick, name in zip(axes.yaxis.get_major_ticks(), plan.lanes, strict=True):
        tick.label1.set(parse_math=False, fontsize=9, color=_INK if name in plan.colours else _FAINT)
    axes.set_ylim(max(len(plan.lanes), 1) - 0.5, -0.7)
    axes.set_ylabel("component", color=_INK)


def _draw_bars(axes: Axes, plan: _Plan, index: int, name: str) -> None:
    """Two collections per lane: while it was loaded (pale), and while it was there."""
    mine = plan.spans[name]
    place = (index - _BAR / 2, _BAR)
    loading = [_bar(plan, one.start, one.ready) for one in mine if one.cause is not None]
    present = [_bar(plan, one.ready, one.end) for one in mine]
    # The edge keeps a stay visible that is shorter than a pixel.
    pale, full = _pale(plan.colour(name)), plan.colour(name)
    axes.broken_barh(loading, place, facecolor=pale, edgecolor=pale, linewidth=0.8, gid=f"loading {name}")
    axes.broken_barh(present, place, facecolor=full, edgecolor=full, linewidth=0.8, gid=f"present {name}")


def _draw_marks(axes: Axes, plan: _Plan, index: int, events: Sequence[ResidencyEvent]) -> None:
    for kind, (marker, label) in _MARKS.items():
        times = [plan.time(event.at) for event in events if event.kind is kind]
        if times:
            place = [index - 0.5 * _BAR] * len(times)
            axes.plot(times, place, marker, linestyle="", label=label, zorder=4, **_MARK)
    waits = [event for event in events if event.kind is EventKind.WAIT]
    if waits:
        begin, end = [plan.time(one.at - one.seconds) for one in waits], [plan.time(one.at) for one in waits]
        axes.hlines([index] * len(waits), begin, end, color=_INK, linestyle=":", label="waited for its turn")


def _pale(colour: str) -> str:
    """A colour mixed with white: opaque, so that the lane's line does not show through."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * _PALE):02x}" for part in parts)


def _bar(plan: _Plan, start: float, end: float) -> tuple[float, float]:
    return plan.time(start), (end - start) * plan.scale


# --- bytes ----------------------------------------------------------------------------------------------


def _draw_bytes(axes: Axes, plan: _Plan, report: ResidencyReport) -> None:
    most = max(report.peak_bytes, report.predicted_peak, 1)
    unit, divisor = _byte_unit(most)
    for name in plan.layers:
        _draw_pile(axes, plan, name, divisor)
    axes.set_ylim(0, most / divisor * 1.3)
    for value, label, style, above in _limits(report, most):
        axes.axhline(value / divisor, color=_INK, linewidth=1.2, linestyle=style, label=label, zorder=5)
        axes.annotate(
            label,
            (0.995, value / divisor),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3 if above else -3),
            textcoords="offset points",
            ha="right",
            va="bottom" if above else "top",
            fontsize=8.5,
            color=_INK,
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8},
            zorder=6,
        )
    axes.set_ylabel(f"device memory ({unit})", color=_INK)
    axes.set_xlabel(f"time since the first event ({plan.unit})", color=_INK)


def _draw_pile(axes: Axes, plan: _Plan, name: str, divisor: int) -> None:
    from matplotlib.collections import PolyCollection  # imported here: see timeline_figure

    corners = []
    for one in plan.layers[name]:
        left, right = plan.time(one.start), plan.time(one.end)
        low, high = one.low / divisor, one.high / divisor
        corners.append([(left, low), (left, high), (right, high), (right, low)])
    colour = plan.colour(name)
    pile = PolyCollection(corners, facecolor=colour, edgecolor=colour, linewidth=0.4, gid=f"bytes {name}")
    axes.add_collection(pile, autolim=False)


def _limits(report: ResidencyReport, most: int) -> Iterator[tuple[int, str, str, bool]]:
    """The lines: value, label, style, and whether the label stands above its line."""
    peak, predicted = report.peak_bytes, report.predicted_peak
    if peak == predicted:
        yield peak, f"peak, as predicted: {format_bytes(peak)}", "--", True
        return
    apart = (
        abs(predicted - peak) > 0.2 * most
    )  # else the upper line takes its label above, the lower one below
    yield predicted, f"predicted peak: {format_bytes(predicted)}", "--", apart or predicted > peak
    yield peak, f"peak: {format_bytes(peak)}", "-", apart or peak > predicted


def _byte_unit(most: int) -> tuple[str, int]:
    name = format_bytes(most).split()[1]
    return name, 1024 ** ("B", "KiB", "MiB", "GiB", "TiB").index(name)


# --- both -----------------------------------------------------------------------------------------------


def _draw_legend(figure: Figure, lanes: Axes, plan: _Plan) -> None:
    from matplotlib.patches import Patch  # imported here: see timeline_figure

    swatches: dict[str, Artist] = {
        "loading": Patch(facecolor=_pale(_COLOURS[0])),
        "on the device": Patch(facecolor=_COLOURS[0]),
    }
    if len(plan.colours) < len(plan.lanes):
        swatches["resident: never swapped"] = Patch(facecolor=_RESIDENT)
    handles, labels = lanes.get_legend_handles_labels()
    swatches |= dict(zip(labels, handles, strict=True))  # each label once
    figure.legend(
        list(swatches.values()),
        list(swatches),
        loc="outside lower center",
        ncols=len(swatches),
        frameon=False,
        fontsize=8.5,
        labelcolor=_INK,
        handlelength=1.4,
        columnspacing=1.3,
    )


def _tidy(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT)
    axes.grid(axis="x", color=_FAINT, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0, labelsize=9)


def _shortened(name: str, limit: int = 36) -> str:
    """A name that leaves room for the picture: both its ends tell more than its middle."""
    half = (limit - 1) // 2
    return name if len(name) <= limit else f"{name[:half]}…{name[-half:]}"
