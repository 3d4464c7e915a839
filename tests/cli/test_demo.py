"""Faults of the command line: wrong input that shows a traceback, files half-written, reports that lie."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from omni_components import TransferError
from omni_components.cli import app
from omni_components.demo import DemoPipeline

SCRIPT = Path(sys.executable).with_name("omni-components")
SECONDS = 180  # torch's import alone takes long on a busy machine


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def refused(*words: str) -> str:
    """The one line that a wrong input gives; it must be all that it gives, with exit code 2 and no file."""
    before = sorted(os.listdir())
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("omni-components: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    assert sorted(os.listdir()) == before
    return result.stderr


# --- what it does ---------------------------------------------------------------------------------------


def test_the_console_script_draws_what_several_words_name(folder):
    """The README's first command, as a person types it: I1, I8 in its report."""
    command = [SCRIPT, "demo", "three", "one", "four", "--steps", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=_calm())
    assert result.returncode == 0, result.stderr
    assert sorted(os.listdir()) == ["demo.png", "demo.timeline.png"]
    with Image.open("demo.png") as picture, Image.open("demo.timeline.png") as timeline:
        assert (picture.format, picture.size) == ("PNG", (384, 128))
        assert timeline.format == "PNG"
        assert timeline.size[0] > 1000
    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if line.strip()}
    for name in ("text_encoder", "reasoner", "generator"):
        assert lines[name][4] == "1"  # loads
    assert lines["picture:"] == ["picture:", "demo.png"]
    assert lines["timeline:"] == ["timeline:", "demo.timeline.png"]
    assert "thrash" not in result.stdout


def test_on_the_cpu_the_weights_are_mapped_and_loaded_means_copied(folder):
    result = run("demo", "seven", "--steps", "1", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "device cpu: peak 2.2 MiB, predicted at most 2.2 MiB" in result.stdout
    assert "0 B pinned, 0 B pageable, 3.3 MiB mapped" in result.stdout


def test_the_accelerator_is_the_default_device_where_there_is_one(folder, sim):
    sim.reset()
    result = run("demo", "seven", "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "device sim:0" in result.stdout
    assert sim.stats().h2d_bytes > 3 * 2**20
    with Image.open("demo.png") as picture:
        assert picture.size == (128, 128)


def test_the_picture_is_the_pipelines_own(folder):
    assert (
        run("demo", "a bold 7", "--steps", "3", "--seed", "5", "--device", "cpu", "--out", "x.png").exit_code
        == 0
    )
    expected = DemoPipeline.from_pretrained()("a bold 7", steps=3, seed=5).images[0]
    with Image.open("x.png") as picture:
        assert picture.tobytes() == expected.tobytes()
    assert sorted(os.listdir()) == ["x.png", "x.timeline.png"]


def test_files_of_an_earlier_run_are_replaced_with_their_permissions_kept(folder):
    Path("demo.png").write_bytes(b"old")
    Path("demo.png").chmod(0o640)
    assert run("demo", "one", "--steps", "1").exit_code == 0
    assert Path("demo.png").stat().st_mode & 0o777 == 0o640
    assert Path("demo.png").read_bytes() != b"old"
    umask = os.umask(0)
    os.umask(umask)
    assert Path("demo.timeline.png").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_link_is_written_through_and_stays_a_link(folder):
    Path("real").mkdir()
    Path("demo.png").symlink_to("real/picture.png")
    assert run("demo", "one", "--steps", "1").exit_code == 0
    assert Path("demo.png").is_symlink()
    with Image.open("real/picture.png") as picture:
        assert picture.size == (128, 128)


# --- wrong input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], [""], ["  "], ["", "!"]])
def test_an_empty_prompt_is_refused_with_an_example(folder, words):
    line = refused("demo", *words)
    assert "The prompt is empty" in line
    assert "'seven'" in line


def test_an_unknown_word_is_refused_with_the_known_ones(folder):
    line = refused("demo", "three", "sevn")
    assert "'sevn' is not a word" in line
    assert "Did you mean 'seven'?" in line
    assert "zero to nine" in line


def test_words_in_no_order_are_refused(folder):
    assert "No digit follows 'thin'" in refused("demo", "seven", "thin")


@pytest.mark.parametrize("steps", ["0", "-3", "1001"])
def test_steps_out_of_range_are_refused_with_the_range(folder, steps):
    line = refused("demo", "one", "--steps", steps)
    assert "--steps" in line
    assert "choose 1 to 1000" in line


@pytest.mark.parametrize(("option", "value"), [("--steps", "many"), ("--steps", "1.5"), ("--seed", "x")])
def test_a_number_that_is_none_is_refused(folder, option, value):
    line = refused("demo", "one", option, value)
    assert option in line
    assert "integer" in line


@pytest.mark.parametrize("seed", ["-1", str(2**63), "9" * 40])
def test_a_seed_out_of_range_is_refused_with_the_range(folder, seed):
    assert "choose 0 to 9223372036854775807" in refused("demo", "one", "--seed", seed)


@pytest.mark.parametrize("device", ["warp", "meta", "cuda:99", "cpu:x", "", "-", "cuda:99999999999999999999"])
def test_an_unknown_device_is_refused_with_those_that_are_here(folder, device):
    line = refused("demo", "one", "--device", device)
    assert "--device" in line
    assert "choose" in line


def test_a_device_index_that_is_not_there_is_refused(folder, sim):
    assert "an index below 1" in refused("demo", "one", "--device", "sim:3")


@pytest.mark.parametrize("name", ["x.jpg", "x", ".png", "x.png.gif", "", "folder/"])
def test_another_suffix_is_refused_with_the_right_one(folder, name):
    assert "choose one that ends in .png" in refused("demo", "one", "--out", name)


def test_a_missing_folder_is_refused_with_what_to_do(folder):
    assert "there is no folder 'no/where'; create it first" in refused(
        "demo", "one", "--out", "no/where/x.png"
    )


def test_a_folder_that_is_a_file_is_refused(folder):
    Path("file").write_text("")
    assert "'file' is not a folder" in refused("demo", "one", "--out", "file/x.png")


def test_a_file_that_is_a_folder_is_refused(folder):
    Path("x.png").mkdir()
    assert "'x.png' is a folder; choose a file name" in refused("demo", "one", "--out", "x.png")


def test_a_timeline_that_is_a_folder_is_refused_before_the_work(folder):
    Path("x.timeline.png").mkdir()
    assert "'x.png' and its timeline cannot be written" in refused("demo", "one", "--out", "x.png")


def test_a_file_that_cannot_be_written_is_refused_before_the_work(folder):
    """A name too long: it is refused to anyone, an administrator too."""
    line = refused("demo", "one", "--out", "a" * 300 + ".png")
    assert "cannot be written (File name too long); choose another file" in line


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="an administrator may write anywhere")
@pytest.mark.parametrize("what", ["folder", "file"])
def test_a_folder_or_file_without_permission_is_refused_before_the_work(folder, what):
    Path("locked").mkdir()
    Path("locked/x.png").write_bytes(b"old")
    Path("locked/x.png").chmod(0o444 if what == "file" else 0o644)
    Path("locked").chmod(0o555 if what == "folder" else 0o755)
    assert "cannot be written (Permission denied)" in refused("demo", "one", "--out", "locked/x.png")
    assert Path("locked/x.png").read_bytes() == b"old"
    Path("locked").chmod(0o755)


@pytest.mark.parametrize("words", [["--stepz", "3"], ["-3"], ["one", "--steps"]])
def test_an_unknown_option_or_a_missing_value_is_one_line_that_points_to_help(folder, words):
    assert "See 'omni-components --help'" in refused("demo", *words)


def test_an_unknown_command_is_one_line_that_points_to_help(folder):
    line = refused("dmo", "one")
    assert "No such command 'dmo'" in line
    assert "See 'omni-components --help'" in line


# --- failures on the way --------------------------------------------------------------------------------


def test_a_device_without_room_is_one_line_and_leaves_no_file(folder, sim):
    """I6: the error of the switch, in its own words; it is no wrong input, so the code is 1."""
    sim.capacity = "1MiB"
    result = run("demo", "one", "--steps", "1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "could not be loaded" in result.stderr
    assert result.stderr.count("\n") == 1
    assert os.listdir() == []


def test_an_error_of_many_lines_is_told_in_one(folder, monkeypatch):
    def fail(*_, **__):
        raise TransferError("generator", 1, None, "driver\nsays\n\n   no")

    monkeypatch.setattr(DemoPipeline, "__call__", fail)
    result = run("demo", "one")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "driver says no" in result.stderr


def test_a_full_disk_is_one_line_and_leaves_the_old_files(folder, monkeypatch):
    def full(self, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    Path("demo.png").write_bytes(b"old")
    monkeypatch.setattr(Image.Image, "save", full)
    assert "No space left on device" in refused("demo", "one", "--steps", "1")
    assert Path("demo.png").read_bytes() == b"old"


def test_a_file_that_cannot_be_replaced_is_one_line_and_stays_as_it_was(folder, monkeypatch):
    replace = os.replace

    def refuse(draft, target):
        if Path(target).name == "demo.png":
            raise PermissionError(13, "Permission denied")
        replace(draft, target)

    Path("demo.png").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", refuse)
    assert "Permission denied" in refused("demo", "one", "--steps", "1")
    assert Path("demo.png").read_bytes() == b"old"


def test_a_weight_file_that_is_gone_is_not_blamed_on_out(folder, monkeypatch):
    monkeypatch.setattr("omni_components.demo.pipeline.WEIGHTS", folder / "gone")
    result = run("demo", "one")
    assert isinstance(result.exception, FileNotFoundError)
    assert "--out" not in result.output
    assert os.listdir() == []


@pytest.mark.parametrize(
    "where",
    [
        "omni_components.demo.DemoPipeline.from_pretrained",
        "omni_components.demo.DemoPipeline.__call__",
        "PIL.Image.Image.save",
        "omni_components.report.timeline.draw_timeline",
    ],
)
def test_an_interrupt_anywhere_leaves_the_old_files_and_no_other(folder, where, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    import omni_components.report.timeline  # noqa: F401 - so that its name can be patched

    Path("demo.png").write_bytes(b"old")
    monkeypatch.setattr(where, interrupt)
    result = run("demo", "one", "--steps", "1")
    assert result.exit_code == 130
    assert result.stderr == "omni-components: interrupted\n"
    assert os.listdir() == ["demo.png"]
    assert Path("demo.png").read_bytes() == b"old"


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_control_c_ends_a_real_run_with_130_and_no_file(folder):
    command = [SCRIPT, "demo", "one", "--steps", "1000"]
    # A shell's background job ignores the signal, and its children would inherit that.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_calm(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + SECONDS
    while not os.listdir() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    assert os.listdir(), "the drafts are made before the work"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out, err) == (130, "", "omni-components: interrupted\n")
    assert os.listdir() == []


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
@pytest.mark.parametrize(
    "where", ["omni_components.demo.parse_prompt", "omni_components.demo.DemoPipeline.from_pretrained"]
)
def test_an_interrupt_that_a_library_swallows_is_not_lost(folder, where, monkeypatch):
    """As torch's native modules do while they are imported: they discard the exception, and the run must end."""
    module, name = where.rsplit(".", 1)
    owner = DemoPipeline if module.endswith("DemoPipeline") else sys.modules[module]
    real = getattr(owner, name)

    def swallows(*args, **options):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, swallows)
    before = signal.getsignal(signal.SIGINT)
    result = run("demo", "one", "--steps", "2")
    assert (result.exit_code, result.stderr) == (130, "omni-components: interrupted\n")
    assert os.listdir() == []
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_a_library_turns_into_its_own_error_is_an_interrupt(folder, monkeypatch):
    def breaks(**_):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise ImportError("half a module")

    monkeypatch.setattr(DemoPipeline, "from_pretrained", breaks)
    result = run("demo", "one")
    assert (result.exit_code, result.stderr) == (130, "omni-components: interrupted\n")


def test_an_ignored_interrupt_stays_ignored(folder, monkeypatch):
    """A shell's background job, or ``nohup``."""
    real = DemoPipeline.from_pretrained

    def interrupted(**options):
        signal.raise_signal(signal.SIGINT)
        return real(**options)

    monkeypatch.setattr(DemoPipeline, "from_pretrained", interrupted)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run("demo", "one", "--steps", "1").exit_code == 0
    finally:
        signal.signal(signal.SIGINT, before)


# --- help and version -----------------------------------------------------------------------------------


def test_without_a_command_it_shows_the_help_with_an_example():
    result = run()
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Usage: omni-components" in result.stdout
    assert "Example: omni-components demo three one four" in result.stdout
    assert result.stdout == run("--help").stdout == run("-h").stdout


def test_the_commands_help_has_examples_and_every_option():
    result = run("demo", "--help")
    assert result.exit_code == 0
    for text in (
        "--device DEV",
        "--steps N",
        "--seed S",
        "--out FILE",
        "omni-components demo three one four",
        "24",
    ):
        assert text in result.stdout


def test_version_is_the_packages():
    from importlib.metadata import version

    assert run("--version").stdout == f"omni-components {version('omni-components')}\n"


def test_help_and_wrong_options_import_no_torch_no_demo_and_no_drawing():
    code = (
        "import sys; from typer.testing import CliRunner; from omni_components.cli import app; "
        "assert CliRunner().invoke(app, ['demo', '--help']).exit_code == 0; "
        "assert CliRunner().invoke(app, ['demo', '--stepz']).exit_code == 2; "
        "heavy = ('torch', 'omni_components.demo', 'matplotlib', 'diffusers'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=SECONDS
    )
    assert result.stdout.strip() == "[]"


def _calm() -> dict[str, str]:
    """The environment, with as many threads as a small machine has."""
    return {**os.environ, "OMP_NUM_THREADS": "2"}
