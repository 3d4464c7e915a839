"""The timeline as SVG for the page: lanes above, device bytes below; bars tell their facts when pointed at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import floor, log10

from ..errors import format_bytes
from .report import ResidencyReport
from .spans import Span, ends_at, layers, spans, starts_at

COLOURS = 6
"""How many classes ``c0``, ``c1``, … the bars have; a resident's is ``resident``."""

_LEFT, _RIGHT, _WIDTH = 190, 12, 1000
_LANE, _GAP, _PILE, _FOOT = 30, 26, 130, 26
_NAME = 24  # characters that stand beside a lane; all of them are told when it is pointed at
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def timeline(report: ResidencyReport) -> str:
    """The picture; empty where nothing happened."""
    return "".join(_Drawing.of(report).parts()) if report.events else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    report: ResidencyReport
    stays: list[Span]
    lanes: dict[str, int]
    colours: dict[str, str]
    origin: float
    seconds: float

    @classmethod
    def of(cls, report: ResidencyReport) -> _Drawing:
        residents = [row.name for row in report.rows if row.resident]
        stays = spans(report.events, until=report.taken_at)
        # As in the picture of ``draw_timeline``: in the order of their first load, residents last.
        named = [*(one.component for one in stays), *(row.name for row in report.rows)]
        order = [*dict.fromkeys(one for one in named if one not in residents), *residents]
        swapped = [one for one in order if one not in residents]
        colours = {name: f"c{at % COLOURS}" for at, name in enumerate(swapped)}
        origin = starts_at(report.events)
        return cls(
            report=report,
            stays=stays,
            lanes={name: at for at, name in enumerate(order)},
            colours=colours | dict.fromkeys(residents, "resident"),
            origin=origin,
            seconds=max(ends_at(report.events, report.taken_at) - origin, 1e-9),
        )

    def parts(self) -> Iterator[str]:
        """From the back to the front."""
        height = self._base + _FOOT + 16
        label = f"Who was on the device when, {self.seconds:.4f} s"
        yield f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        yield from self._time_axis()
        yield from self._names()
        for stay in self.stays:
            yield from self._bars(stay)
        yield from self._bytes_axis()
        yield from self._pile()
        yield from self._limits()
        yield "</svg>"

    # --- places ---------------------------------------------------------------------------------------------

    def _x(self, at: float) -> float:
        return _LEFT + (at - self.origin) / self.seconds * (_WIDTH - _LEFT - _RIGHT)

    @property
    def _top(self) -> int:
        return len(self.lanes) * _LANE + _GAP

    @property
    def _base(self) -> int:
        return self._top + _PILE

    @property
    def _most(self) -> int:
        return max(self.report.peak_bytes, self.report.predicted_peak, 1)

    def _y(self, value: float) -> float:
        return self._base - value / (1.2 * self._most) * _PILE

    # --- axes -----------------------------------------------------------------------------------------------

    def _time_axis(self) -> Iterator[str]:
        scale, unit = (1.0, "s") if self.seconds >= 2 else (1e3, "ms")
        for value in _ticks(self.seconds * scale, 8):
            x = self._x(self.origin + value / scale)
            yield f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="0" y2="{self._base}"/>'
            yield f'<text class="tick" x="{x:.2f}" y="{self._base + 16}" text-anchor="middle">{value:g}</text>'
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        text = f"time since the first event ({unit})"
        yield f'<text class="axis" x="{middle}" y="{self._base + 36}" text-anchor="middle">{text}</text>'

    def _bytes_axis(self) -> Iterator[str]:
        name = format_bytes(self._most).split()[1]
        divisor = 1024 ** _UNITS.index(name)
        yield f'<text class="axis" x="0" y="{self._top + 12}">device memory ({name})</text>'
        for value in _ticks(1.2 * self._most / divisor, 4):
            y = self._y(value * divisor)
            yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.2f}" y2="{y:.2f}"/>'
            yield f'<text class="tick" x="{_LEFT - 8}" y="{y + 4:.2f}" text-anchor="end">{value:g}</text>'

    def _names(self) -> Iterator[str]:
        for name, at in self.lanes.items():
            short = name if len(name) <= _NAME else f"{name[: _NAME // 2]}…{name[-_NAME // 2 + 1 :]}"
            place = f'x="0" y="{at * _LANE + 19}"'
            yield f'<text class="name" {place}>{escape(short)}<title>{escape(name)}</title></text>'

    # --- what happened --------------------------------------------------------------------------------------

    def _bars(self, stay: Span) -> Iterator[str]:
        top = self.lanes[stay.component] * _LANE + 5
        title = f"<title>{escape(self._told(stay))}</title>"
        if stay.wanted:
            pieces = [("ahead", stay.start, stay.asked), ("loading", stay.asked, stay.ready)]
            pieces.append(("stay", stay.ready, stay.end))
        else:
            pieces = [("ahead", stay.start, stay.end)]
        for kind, low, high in pieces:
            if high > low or kind == "stay":
                # Half a unit at least: what is shorter than a pixel is to be seen, too.
                width = max(self._x(high) - self._x(low), 0.5)
                place = f'x="{self._x(low):.3f}" y="{top}" width="{width:.3f}" height="{_LANE - 10}"'
                yield f'<rect class="{kind} {self.colours[stay.component]}" {place}>{title}</rect>'

    def _told(self, stay: Span) -> str:
        begin = f"{stay.component}: from {stay.start - self.origin:.4f} s"
        there = f"there {stay.end - stay.ready:.4f} s"
        if stay.cause is None:
            return f"{begin}, {there} (since before the record)"
        if not stay.wanted:
            return f"{begin}, copied ahead, there {stay.end - stay.ready:.4f} s, and not asked for"
        ahead = f"copied ahead {stay.asked - stay.start:.4f} s, " if stay.asked > stay.start else ""
        return f"{begin}, {ahead}loaded in {stay.ready - stay.asked:.4f} s, {there} ({stay.cause})"

    def _pile(self) -> Iterator[str]:
        residents = [name for name, kind in self.colours.items() if kind == "resident"]
        order = (*residents, *(name for name in self.lanes if name not in residents))
        for one in layers(self.report.events, order=order, until=self.report.taken_at):
            width = max(self._x(one.end) - self._x(one.start), 0.5)
            top, low = self._y(one.high), self._y(one.low)
            place = f'x="{self._x(one.start):.3f}" y="{top:.3f}" width="{width:.3f}" height="{low - top:.3f}"'
            title = f"<title>{escape(one.component)}: {format_bytes(one.high - one.low)}</title>"
            yield f'<rect class="bytes {self.colours.get(one.component, "resident")}" {place}>{title}</rect>'

    def _limits(self) -> Iterator[str]:
        peak, predicted = self.report.peak_bytes, self.report.predicted_peak
        if peak == predicted:
            yield from self._limit(peak, "peak, as predicted", above=True)
            return
        yield from self._limit(predicted, "predicted at most", above=predicted > peak)
        yield from self._limit(peak, "peak", above=peak > predicted)

    def _limit(self, value: int, label: str, *, above: bool) -> Iterator[str]:
        y, right = self._y(value), _WIDTH - _RIGHT
        yield f'<line class="limit" x1="{_LEFT}" x2="{right}" y1="{y:.2f}" y2="{y:.2f}"/>'
        place = f'x="{right - 4}" y="{y - 5 if above else y + 13:.2f}" text-anchor="end"'
        yield f'<text class="limit-name" {place}>{label}: {format_bytes(value)}</text>'


def _ticks(length: float, about: int) -> list[float]:
    """Round numbers from 0 up to ``length``, about so many."""
    rough = length / about
    base: float = 10 ** floor(log10(rough))
    step = next(base * factor for factor in (1, 2, 5, 10) if base * factor >= rough)
    return [round(step * at, 12) for at in range(int(length / step) + 1)]
