"""Faults of ``plan`` as a command: remarks of libraries among its output, errors that are no words."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omni_components import ModelError
from omni_components.cli import app
from tests.diffusers import tiny

SCRIPT = Path(sys.executable).with_name("omni-components")
REMARK = (
    "`SiglipImageProcessor` requires torchvision (not installed); falling back to `SiglipImageProcessorPil` "
    "for backward compatibility."
)
WARNING = "torchvision is broken, and pictures come out wrong"


def test_a_library_that_talks_of_what_is_not_needed(tmp_path):
    tiny.stable_diffusion().save_pretrained(tmp_path)
    done = subprocess.run([SCRIPT, "plan", tmp_path], capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """What the library that talks of torchvision says, as it comes through."""
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    speaker, ear = logging.getLogger("transformers.utils.import_utils"), Ear()
    speaker.addHandler(ear)
    yield said
    speaker.removeHandler(ear)


@pytest.mark.parametrize(
    ("command", "where"),
    [("plan", "omni_components.planning.model.plan"), ("serve", "omni_components.omni.Omni")],
)
def test_a_warning_that_is_kept_from_the_user_or_a_remark_that_is_not(command, where, heard, monkeypatch):
    def talks(*_, **__):
        speaker = logging.getLogger("transformers.utils.import_utils")
        speaker.warning(REMARK)
        speaker.warning(WARNING)
        raise ModelError("x", "is a model for a test.", "Take another.")

    monkeypatch.setattr(where, talks)
    options = ["--device", "cpu", "--port", "0"] if command == "serve" else []
    assert CliRunner().invoke(app, [command, "x", *options]).exit_code == 2
    assert heard == [WARNING]
    logging.getLogger("transformers.utils.import_utils").warning(REMARK)  # in Python it is heard as ever
    assert heard == [WARNING, REMARK]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("",), "for MODEL: it is empty; give a folder of a diffusers pipeline, a hub id, or demo."),
        (("a" * 5000,), f"for MODEL: '{'a' * 40}…' is too long for a name."),
        (("nobody/nothing", "--local-files-only"), "leave out --local-files-only"),
        (
            ("demo", "--dtype", "int8"),
            "for --dtype: 'int8' is not possible; choose one of float32, bfloat16, ",
        ),
        (
            ("demo", "--dtype", "float16"),
            "for --dtype: 'float16' is not possible: the demo computes in float32",
        ),
        (
            ("demo", "--device-memory", "9" * 400),
            f"for --device-memory: '{'9' * 40}…' is too long for a number.",
        ),
        (("demo", "--host-memory", "9" * 400), "for --host-memory: "),
        (("demo", "--activations", "9" * 400), "for --activations: "),
        (("demo", "--link", "9" * 400 + "B/s"), f"for --link: '{'9' * 40}…' is too long for a number."),
        (
            ("demo", "--device-memory", "nan"),
            "for --device-memory: 'nan' is not possible; choose a number of bytes",
        ),
        (
            ("demo", "--device-memory", "-1GiB"),
            "for --device-memory: '-1GiB' is not possible; choose a number",
        ),
    ],
)
def test_wrong_input_that_is_no_line_of_words(words, says):
    ran = CliRunner().invoke(app, ["plan", *words])
    assert (ran.exit_code, ran.stdout, ran.stderr.count("\n")) == (2, "", 1), ran.exception
    assert says in ran.stderr
