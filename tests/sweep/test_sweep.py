"""The sweep's pipelines, one of a kind, each run resident, by diffusers' own offload, and by ours; and its command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import diffusers_sweep
from benchmarks.sweep import page, reasons
from benchmarks.sweep.classes import found
from benchmarks.sweep.compare import Row, compare
from benchmarks.sweep.families import cases

from omni_components.testing.plugin import require_simulated_accelerator

# What diffusers, transformers and torch say of themselves while old families are imported.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
FAILS_WITH_DIFFUSERS = {"LEditsPPPipelineStableDiffusionXL"}  # a component used outside of forward


@pytest.fixture(scope="module", params=diffusers_sweep.QUICK)
def row(request: pytest.FixtureRequest) -> Row:
    """Once per class: the tests below look at different columns."""
    require_simulated_accelerator()
    return compare(cases()[request.param], found()[request.param])


def test_both_requests_give_what_the_resident_run_gives(row: Row) -> None:
    """I2, I7."""
    assert (row.runs_resident, row.runs_ours, row.equal, row.second_equal) == (True,) * 4, row.reason


def test_diffusers_own_offload_agrees_where_it_runs(row: Row) -> None:
    """Else the two would not have been asked the same."""
    assert row.runs_diffusers == row.equal_diffusers == (row.name not in FAILS_WITH_DIFFUSERS), row.reason


def test_nothing_comes_back_and_no_more_goes_in_than_with_diffusers_own(row: Row) -> None:
    """I8: and never more weights together."""
    assert row.bytes_back <= 0
    assert page.no_worse(row.as_json())
    if row.runs_diffusers:
        assert 0 < row.peak <= row.peak_diffusers
        assert row.bytes_back_diffusers > 0  # the measure would see it


def test_the_command_writes_rows_and_a_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_simulated_accelerator()
    file = tmp_path / "sweep.json"
    assert diffusers_sweep.main(["--only", "DDIMPipeline", "NoSuchPipeline", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["summary"]["classes"] == 2
    assert written["summary"]["equal"] == written["summary"]["no_worse"] == 1
    by_class = {one["class"]: one for one in written["rows"]}
    assert by_class["NoSuchPipeline"]["reason"] == reasons.NO_CASE
    assert by_class["DDIMPipeline"]["second_equal"]
    assert "yyyyyy DDIMPipeline" in capsys.readouterr().out


def test_every_case_names_a_class_that_declares_an_order() -> None:
    """A case for a class that is gone would never run."""
    assert set(cases()) <= set(found())
    assert len(cases()) >= 280


def test_the_page_tells_every_row_and_why_one_does_not_run() -> None:
    good = Row(name="GoodPipeline", runs_resident=True, runs_diffusers=True, runs_ours=True, equal=True)
    good.second_equal, good.weights, good.bytes_in, good.bytes_in_diffusers = True, 100, 200, 210
    bad = Row(name="BadPipeline", reason="resident: ImportError: no such library")
    text = page.text([good.as_json(), bad.as_json()])
    assert "| `GoodPipeline` | yes | yes |" in text
    assert "ImportError: no such library" in text
    assert page.summary([good.as_json(), bad.as_json()])["run"] == 1
