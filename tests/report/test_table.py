"""Faults of showing: names that break the table, columns that lie, imports that cost."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from omni_components import Offload
from omni_components.protocols import MoverFacts
from omni_components.report.report import ResidencyReport

from .histories import ledger_of, report_of, use


def cells(report: ResidencyReport, name: str) -> list[str]:
    line = next(line for line in str(report).splitlines() if line.startswith(name))
    return line.split()


def on_terminal(report: ResidencyReport, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(report)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_row_shows_every_number_of_its_component():
    ledger = ledger_of({"encoder": 3 * 2**20, "dit": 5 * 2**20, "vae": 2**20}, residents=["vae"])
    ledger.mover.written["encoder"] = 512
    use(ledger, "encoder", "dit")
    report = report_of(ledger)
    row = report.rows[0]
    assert cells(report, "encoder") == [
        *["encoder", "dit", "3.0", "MiB", "1", "1"],
        *[f"{row.seconds:.4f}", "3.0", "MiB", "512", "B"],
    ]
    assert cells(report, "vae")[:6] == ["vae", "vae", "*", "1.0", "MiB", "1"]
    assert cells(report, "total")[1:3] == ["3", "1"]
    assert cells(report, "total")[4:] == ["9.0", "MiB", "512", "B"]


def test_the_lines_below_tell_device_peak_masters_and_binding():
    ledger = ledger_of({"A": 2**20, "B": 2**21})
    use(ledger, "A")
    facts = MoverFacts(pinned_bytes=1024, pageable_bytes=2048, mapped_bytes=4096, binding="slots")
    text = str(report_of(ledger, "cuda:1", facts))
    assert "device cuda:1: peak 1.0 MiB, predicted at most 2.0 MiB" in text
    assert "1.0 KiB pinned, 2.0 KiB pageable, 4.0 KiB mapped" in text
    assert "slots are rebound" in text
    assert "same objects" in str(report_of(ledger, "cuda:1", replace(facts, binding="data")))


def test_what_did_not_happen_takes_no_room():
    ledger = ledger_of({"A": 1, "B": 1})
    use(ledger, "A", "B")
    text = str(report_of(ledger))
    assert not any(word in text for word in ("waited", "thrash", "resident"))


def test_thrash_stands_below_the_table_with_what_to_do():
    ledger = ledger_of({"A": 2**20, "B": 2**20})
    use(ledger, *"ABAB")
    line = str(report_of(ledger)).splitlines()[-1]
    assert line.startswith("thrash: A and B took the device from each other: 2 reloads, 2.0 MiB moved again.")
    assert "handle.release()" in line


@pytest.mark.parametrize(
    "name", ["pipe[0].model", "[red]x[/red]", "a:smile:b", "x" * 300, "naïve.модель", "$a_b$"]
)
def test_no_name_is_folded_or_taken_for_markup_in_plain_text(name):
    ledger = ledger_of({name: 1, "B": 1})
    use(ledger, name, "B", name, "B")
    text = str(report_of(ledger))
    assert text.splitlines()[2].startswith(f"{name} ")
    assert f"thrash: {min(name, 'B')} and {max(name, 'B')}" in text


@pytest.mark.parametrize("name", ["[red]x[/red]", "a:smile:b"])
def test_no_name_is_taken_for_markup_on_a_terminal(name):
    ledger = ledger_of({name: 1, "B": 1})
    assert any(line.startswith(f"{name} ") for line in on_terminal(report_of(ledger), 100))


def test_plain_text_is_ascii_so_that_any_log_takes_it():
    ledger = ledger_of({"A": 1, "B": 1})
    use(ledger, *"ABAB")
    assert str(report_of(ledger)).isascii()


@pytest.mark.parametrize("where", ["notebook", "forced colours"])
def test_plain_text_is_the_same_wherever_it_is_made(where, monkeypatch):
    ledger = ledger_of({"A": 1, "B": 1})
    use(ledger, *"ABAB")
    expected = str(report_of(ledger))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: where == "notebook")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(report_of(ledger)) == expected


def test_a_report_in_a_debugger_is_one_short_line():
    ledger = ledger_of({"A": 1, "B": 1})
    use(ledger, *"AB" * 500)
    assert repr(report_of(ledger, "cpu")) == "<ResidencyReport of 2 components on cpu, 2001 events>"


def test_eighty_columns_are_enough_for_usual_names():
    sizes = {"text_encoder_2": 900 * 2**20, "transformer": 1000 * 2**20, "vae": 500 * 2**20}
    ledger = ledger_of(sizes, residents=["vae"])
    use(ledger, "text_encoder_2", "transformer")
    lines = on_terminal(report_of(ledger), 80)
    assert all(len(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines[2:5]] == list(sizes)


def test_a_narrow_terminal_folds_names_and_never_numbers():
    ledger = ledger_of({"a_component_with_a_very_long_name_indeed": 900 * 2**20, "B": 1})
    lines = on_terminal(report_of(ledger), 72)
    assert any("900.0 MiB" in line for line in lines)
    assert "indeed" in "".join(line.split()[0] for line in lines if line.strip())


def test_a_target_that_keeps_its_own_offload_says_so():
    class Own:
        """Brings its own pair, which this package only drives."""

        def enable_omni_model_cpu_offload(self, *, device, **_):
            pass

        def disable_omni_model_cpu_offload(self):
            pass

    from omni_components import offload

    handle: Offload = offload(Own(), "cpu")
    assert str(handle.report()) == "device cpu: no components are recorded: the target keeps its own offload"
    handle.disable()
    assert handle.report().to_dict()["rows"] == []


def test_importing_the_package_imports_neither_rich_nor_matplotlib_nor_typer():
    code = (
        "import sys, omni_components, omni_components.report.timeline as t; "
        "print([m for m in ('rich', 'matplotlib', 'typer', 'PIL') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "[]"
