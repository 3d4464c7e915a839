"""Faults of drawing: lanes, bars or marks that are missing, pictures that break on names, sizes or file errors."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from omni_components.errors import PolicyError
from omni_components.report.report import ResidencyReport
from omni_components.report.timeline import draw_timeline, timeline_figure

from .histories import ledger_of, report_of, use

ROOT = Path(__file__).parents[2]


def drawn(figure: Figure, kind: str) -> dict[str, list]:
    """The shapes of the collections named ``<kind> <component>``, by component."""
    found = {}
    for axes in figure.axes:
        for one in axes.collections:
            if (one.get_gid() or "").startswith(f"{kind} "):
                found[one.get_gid().removeprefix(f"{kind} ")] = one.get_paths()
    return found


def counts(figure: Figure, kind: str) -> dict[str, int]:
    return {name: len(paths) for name, paths in drawn(figure, kind).items()}


def lanes(figure: Figure) -> list[str]:
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def marks(figure: Figure) -> dict[str, list[float]]:
    """Lanes in which each kind of mark stands, by the legend's word for it."""
    found: dict[str, list[float]] = {}
    for line in figure.axes[0].get_lines():
        if line.get_linestyle() == "None":
            found.setdefault(str(line.get_label()), []).extend(round(y) for y in line.get_ydata())
    return found


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.fixture
def ledger():
    ledger = ledger_of({"encoder": 3 * 2**20, "dit": 5 * 2**20, "vae": 2**20}, residents=["vae"])
    use(ledger, "encoder", "dit", "encoder", "dit", "encoder")
    return ledger


def test_there_is_a_lane_per_component_and_a_bar_per_stay(ledger):
    figure = timeline_figure(report_of(ledger))
    assert lanes(figure) == ["encoder", "dit", "vae"]
    assert counts(figure, "present") == {"encoder": 3, "dit": 2, "vae": 1}
    assert counts(figure, "loading") == {"encoder": 3, "dit": 2, "vae": 1}


def test_lanes_stand_in_the_order_of_the_first_load_and_residents_last():
    ledger = ledger_of({"vae": 1, "dit": 1, "unused": 1, "encoder": 1}, residents=["vae"])
    use(ledger, "encoder", "dit")
    figure = timeline_figure(report_of(ledger))
    assert lanes(figure) == ["encoder", "dit", "unused", "vae"]
    assert figure.axes[0].get_ylim()[0] > figure.axes[0].get_ylim()[1]  # the first lane is at the top


def test_bars_lie_where_the_events_say_in_the_axis_unit(ledger):
    """I1: bars of rivals do not overlap."""
    report = report_of(ledger)
    figure = timeline_figure(report)
    origin = min(one.at - one.seconds for one in report.events)
    evictions = [one.at for one in report.events if str(one.kind) == "evict" and one.component == "dit"]
    ends = [path.vertices[:, 0].max() for path in drawn(figure, "present")["dit"]]
    assert figure.axes[1].get_xlabel() == "time since the first event (ms)"
    assert ends == pytest.approx([(at - origin) * 1e3 for at in evictions])
    bars = sorted(
        (path.vertices[:, 0].min(), path.vertices[:, 0].max())
        for name in ("encoder", "dit")
        for path in drawn(figure, "present")[name]
    )
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(bars))


def test_bytes_are_piled_up_to_the_peak_in_the_axis_unit(ledger):
    """I8: nothing is drawn above the peak line."""
    figure = timeline_figure(report_of(ledger))
    below = figure.axes[1]
    tops = {
        name: max(path.vertices[:, 1].max() for path in paths)
        for name, paths in drawn(figure, "bytes").items()
    }
    assert tops == {"vae": 1.0, "encoder": 4.0, "dit": 6.0}
    assert counts(figure, "bytes") == {"vae": 1, "encoder": 3, "dit": 2}
    assert below.get_ylabel() == "device memory (MiB)"
    assert [line.get_ydata()[0] for line in below.get_lines()] == [6.0]
    assert [text.get_text() for text in below.texts] == ["peak, as predicted: 6.0 MiB"]


def test_peak_and_predicted_peak_are_two_lines_where_they_differ(ledger):
    report = replace(report_of(ledger), predicted_peak=8 * 2**20)
    below = timeline_figure(report).axes[1]
    assert [(line.get_label(), line.get_ydata()[0], line.get_linestyle()) for line in below.get_lines()] == [
        ("predicted peak: 8.0 MiB", 8.0, "--"),
        ("peak: 6.0 MiB", 6.0, "-"),
    ]
    assert [text.get_va() for text in below.texts] == ["bottom", "bottom"]


@pytest.mark.parametrize(("predicted", "sides"), [(6.2, ["bottom", "top"]), (5.8, ["top", "bottom"])])
def test_labels_of_lines_that_lie_close_do_not_cover_each_other(ledger, predicted, sides):
    report = replace(report_of(ledger), predicted_peak=int(predicted * 2**20))
    assert [text.get_va() for text in timeline_figure(report).axes[1].texts] == sides


def test_write_backs_and_rollbacks_are_marked_in_their_lanes(ledger):
    ledger.mover.written["encoder"] = 64
    use(ledger, "dit")
    ledger.mover.broken.add("encoder")
    with pytest.raises(RuntimeError):
        use(ledger, "encoder")
    figure = timeline_figure(report_of(ledger))
    assert marks(figure) == {"written back": [0], "rolled back": [0]}
    assert legend(figure) == [
        "loading",
        "on the device",
        "resident: never swapped",
        "written back",
        "rolled back",
    ]


def test_a_wait_is_drawn_as_long_as_it_took():
    ledger = ledger_of({"A": 1, "B": 1})
    started = threading.Event()

    def other():
        started.set()
        use(ledger, "B")

    with ledger.scope("A"):
        thread = threading.Thread(target=other)
        thread.start()
        started.wait(10)
        thread.join(0.05)
    thread.join(10)
    figure = timeline_figure(report_of(ledger))
    (waits,) = [one for one in figure.axes[0].collections if one.get_label() == "waited for its turn"]
    ((start, lane), (end, _)) = waits.get_segments()[0]
    (wait,) = [one for one in ledger.history if str(one.kind) == "wait"]
    assert (end - start, lane) == (pytest.approx(wait.seconds * 1e3), 1)
    assert "waited for its turn" in legend(figure)


def test_residents_are_muted_and_neighbours_have_different_colours(ledger):
    above = timeline_figure(report_of(ledger)).axes[0]
    colours = {
        one.get_gid().removeprefix("present "): to_hex(one.get_facecolor()[0])
        for one in above.collections
        if (one.get_gid() or "").startswith("present ")
    }
    assert len(set(colours.values())) == 3
    red, green, blue = (int(colours["vae"][place : place + 2], 16) for place in (1, 3, 5))
    assert max(red, green, blue) - min(red, green, blue) < 16  # a grey


def test_the_device_is_in_the_title(ledger):
    figure = timeline_figure(report_of(ledger, "cuda:3"))
    assert figure.get_suptitle() == "Who was on the device (cuda:3), and when"


def test_a_component_that_left_the_ledger_keeps_its_lane(ledger):
    """A report of a shared ledger after another pipeline was disabled."""
    ledger.retire(["dit"])
    figure = timeline_figure(report_of(ledger))
    assert "dit" in lanes(figure)
    assert counts(figure, "present")["dit"] == 2


def test_a_release_that_waited_makes_no_lane():
    """Its event names nobody: the waiter wanted to evict whatever is there."""
    ledger = ledger_of({"A": 1, "B": 1})
    started = threading.Event()

    def other():
        started.wait(10)
        ledger.release()

    thread = threading.Thread(target=other)
    load = ledger.mover.load

    def slow(name):
        started.set()
        thread.join(0.05)
        return load(name)

    ledger.mover.load = slow
    thread.start()
    use(ledger, "A")
    thread.join(10)
    assert any(str(one.kind) == "wait" for one in ledger.history)
    assert lanes(timeline_figure(report_of(ledger))) == ["A", "B"]


@pytest.mark.parametrize("count", [2, 40])
def test_two_to_forty_components_are_readable(count, tmp_path):
    """No label is higher than its lane, and the lanes keep most of the picture's width."""
    ledger = ledger_of({f"pipe.stages.{i}.transformer_blocks_of_it": i + 1 for i in range(count)})
    use(ledger, *[one.name for one in ledger.components])
    figure = timeline_figure(report_of(ledger))
    draw_timeline(report_of(ledger), tmp_path / "many.png")
    figure.draw_without_rendering()
    above = figure.axes[0]
    boxes = [label.get_window_extent() for label in above.get_yticklabels()]
    assert len(boxes) == count
    assert all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(boxes))
    assert above.get_window_extent().width > 0.6 * figure.bbox.width
    with Image.open(tmp_path / "many.png") as picture:
        assert picture.size[0] == 1440
        assert picture.size[1] < 2200


@pytest.mark.parametrize("name", ["$x", "$a_{$", "x" * 200, "a\\b", "pipe[0]"])
def test_any_name_can_be_drawn(name, tmp_path):
    ledger = ledger_of({name: 1, "B": 1})
    use(ledger, name, "B")
    draw_timeline(report_of(ledger), tmp_path / "out.svg")
    assert (tmp_path / "out.svg").stat().st_size > 1000


def test_a_report_without_events_can_be_drawn(tmp_path):
    draw_timeline(ResidencyReport.empty("cpu"), tmp_path / "empty.png")
    draw_timeline(report_of(ledger_of({"A": 1, "B": 1})), tmp_path / "unused.png")
    assert sorted(os.listdir(tmp_path)) == ["empty.png", "unused.png"]


def test_a_history_of_thousands_of_switches_can_be_drawn(tmp_path):
    ledger = ledger_of({"A": 1, "B": 1}, history=4_000)
    use(ledger, *("AB" * 2_000))
    figure = timeline_figure(report_of(ledger))
    assert sum(counts(figure, "present").values()) == 2_001


# --- the file -------------------------------------------------------------------------------------------


def test_a_png_is_a_picture_of_the_figure(ledger, tmp_path):
    draw_timeline(report_of(ledger), tmp_path / "out.PNG")
    with Image.open(tmp_path / "out.PNG") as picture:
        assert picture.format == "PNG"
        colours = {colour for _, colour in picture.convert("RGB").getcolors(maxcolors=1 << 24)}
    assert {(0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00), (0xB8, 0xBC, 0xC2)} <= colours


def test_an_svg_has_the_bars_by_name(ledger, tmp_path):
    draw_timeline(report_of(ledger), str(tmp_path / "out.svg"))
    root = ElementTree.parse(tmp_path / "out.svg").getroot()
    bars = {one.get("id"): one for one in root.iter("{http://www.w3.org/2000/svg}g")}
    uses = "{http://www.w3.org/2000/svg}path"
    assert len(list(bars["present encoder"].iter(uses))) >= 1
    assert {"present dit", "present vae", "loading dit", "bytes vae"} <= set(bars)


@pytest.mark.parametrize("name", ["out.jpg", "out", ".png", "out.png.txt"])
def test_another_suffix_is_refused_and_nothing_is_written(ledger, name, tmp_path):
    with pytest.raises(PolicyError, match=r"a file name that ends in \.png or \.svg"):
        draw_timeline(report_of(ledger), tmp_path / name)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_a_drawing_that_fails_leaves_the_old_file_and_no_other(ledger, error, tmp_path, monkeypatch):
    def half(self, path, **_):
        path.write_bytes(b"half a pict")
        raise error

    (tmp_path / "out.png").write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", half)
    with pytest.raises(error):
        draw_timeline(report_of(ledger), tmp_path / "out.png")
    assert os.listdir(tmp_path) == ["out.png"]
    assert (tmp_path / "out.png").read_bytes() == b"old"


def test_a_folder_that_is_not_there_is_an_os_error_that_names_it(ledger, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        draw_timeline(report_of(ledger), tmp_path / "nowhere" / "out.png")


def test_drawing_leaves_pyplot_and_the_users_settings_alone(tmp_path):
    code = """
import sys, matplotlib
before = matplotlib.rcParams.copy()
from tests.report.histories import ledger_of, report_of, use
from omni_components.report.timeline import draw_timeline
ledger = ledger_of({"A": 1, "B": 2})
use(ledger, "A", "B")
draw_timeline(report_of(ledger), sys.argv[1])
print("matplotlib.pyplot" in sys.modules, dict.__eq__(before, matplotlib.rcParams))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out.png")]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, cwd=ROOT)
    assert result.stdout.split() == ["False", "True"]
