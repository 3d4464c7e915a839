"""Faults of ``omni-components run``: tracebacks, half-written files, work done before a refusal."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from omni_components import ModelError, Omni, OmniOutput
from omni_components.cli import app, media
from omni_components.cli.media import FORMATS
from omni_components.cli.run import _quiet
from omni_components.demo import DemoPipeline
from tests.diffusers import tiny

from .test_trace import check_schema

SMALL = ("--size", "32x32", "--steps", "2")


def run(*words: object):
    return CliRunner().invoke(app, ["run", *map(str, words)])


def refused(*words: object, code: int = 2) -> str:
    """The one line that it gives, all that it gives, with no file."""
    before = sorted(os.listdir())
    result = run(*words)
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("omni-components: ")
    assert result.stderr.count("\n") == 1
    assert sorted(os.listdir()) == before
    return result.stderr


def loads(stdout: str) -> dict[str, str]:
    """How often each component was loaded, as the table says."""
    lines = [line.split() for line in stdout.splitlines() if line.strip()]
    columns = {"part": 4, "encoder": 4, "dit": 4, "vae": 4}
    return {line[0]: line[columns[line[1]]] for line in lines if len(line) > 4 and line[1] in columns}


# --- what it does ---------------------------------------------------------------------------------------


def test_the_demo_gives_a_picture_a_timeline_a_trace_and_the_report(folder):
    """I1, I8 in the report."""
    words = ("demo", "a", "bold", "7", "--steps", 3, "--seed", 5, "--device", "cpu", "--out", "x.png")
    result = run(*words, "--trace", "x.json")
    assert result.exit_code == 0, result.output
    assert sorted(os.listdir()) == ["x.json", "x.png", "x.timeline.png"]
    expected = DemoPipeline.from_pretrained()("a bold 7", steps=3, seed=5).images[0]
    with Image.open("x.png") as picture:
        assert picture.tobytes() == expected.tobytes()
    check_schema(json.loads(Path("x.json").read_text()))
    found = loads(result.stdout)
    assert {found[name] for name in ("text_encoder", "reasoner", "generator")} == {"1"}
    assert "mapped" in result.stdout
    assert result.stdout.endswith("file:     x.png\ntimeline: x.timeline.png\ntrace:    x.json\n")


def test_a_real_folder_on_the_accelerator_gives_what_omni_gives(folder, picture_folder, sim):
    result = run(picture_folder, "a", "lighthouse", "--seed", 3, "--out", "x.PNG", *SMALL)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "device sim:0" in result.stdout
    with Omni(picture_folder, device="cpu") as omni:
        expected = omni.generate("a lighthouse", seed=3, num_inference_steps=2, height=32, width=32).images[0]
    with Image.open("x.PNG") as picture:
        assert np.abs(np.asarray(picture, int) - np.asarray(expected, int)).max() <= 1
    assert sim.stats().allocated < 4096  # a scheduler keeps its time steps


def test_without_offload_nothing_is_reported_and_only_the_picture_is_written(folder, sim):
    result = run("demo", "one", "--steps", 1, "--no-cpu-offload", "--out", "x.png")
    assert (result.exit_code, result.stdout) == (0, "file: x.png\n"), result.output
    assert os.listdir() == ["x.png"]
    assert sim.stats().h2d_bytes > 3 * 2**20


def test_a_video_is_a_gif_with_all_its_frames_and_a_single_frame_a_picture(folder, video_folder):
    words = (video_folder, "a", "boat", "--device", "cpu", *SMALL, "--out")
    result = run(*words, "x.gif", "--frames", 5, "--fps", 10)
    assert result.exit_code == 0, result.output
    with Image.open("x.gif") as picture:
        shown = 0
        for frame in range(picture.n_frames):
            picture.seek(frame)
            shown += picture.info["duration"]
        assert picture.size == (32, 32)
    assert shown == 500  # equal frames in a row are stored as one that is shown longer
    assert run(*words, "one.png", "--frames", 1).exit_code == 0
    assert sorted(os.listdir()) == ["one.png", "one.timeline.png", "x.gif", "x.timeline.png"]


def test_a_real_sound_model_gives_a_wav_file_of_what_omni_gives(folder, sound_folder, sim):
    words = (sound_folder, "a", "dog", "--seed", 2, "--steps", 2, "--out", "x.wav")
    result = run(*words)
    assert result.exit_code == 0, result.output
    with Omni(sound_folder, device="cpu") as omni:
        output = omni.generate("a dog", seed=2, num_inference_steps=2)
    assert (output.images, output.frames, output.sample_rate) == (None, None, 16_000)
    with wave.open("x.wav") as file:
        assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
        found = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert found.shape == output.audio[0].shape
    assert np.abs(found / 32767 - np.clip(output.audio[0], -1, 1)).max() < 1e-3
    assert sim.stats().h2d_bytes > 5 * 2**20


def test_help_imports_no_torch_and_no_diffusers():
    code = (
        "import sys; from typer.testing import CliRunner; from omni_components.cli import app; "
        "results = [CliRunner().invoke(app, [name, '--help']).exit_code for name in ('run', 'doctor')]; "
        "print(results, [m for m in ('torch', 'diffusers', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[0, 0] []"


def test_a_video_is_an_mp4_with_its_frames_and_its_rate(folder, video_folder):
    from imageio_ffmpeg import get_ffmpeg_exe

    words = (video_folder, "a", "boat", "--device", "cpu", "--seed", 1, *SMALL, "--frames", 5, "--fps", 10)
    assert run(*words, "--out", "x.mp4").exit_code == 0
    assert sorted(os.listdir()) == ["x.mp4", "x.timeline.png"]
    with Omni(video_folder, device="cpu") as omni:
        drawn = omni.generate("a boat", seed=1, num_frames=5, num_inference_steps=2, height=32, width=32)
    command = [get_ffmpeg_exe(), "-i", "x.mp4", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    decoded = subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL, timeout=60)
    found = np.frombuffer(decoded.stdout, np.uint8).reshape(5, 32, 32, 3) / 255
    expected = np.asarray(drawn.frames[0])
    assert b" 10 fps" in decoded.stderr
    assert expected.shape == found.shape
    assert np.abs(found - expected).mean() < 0.05  # noise, encoded with loss


@pytest.mark.parametrize("shape", [(1, 2, 100), (2, 100), (1, 100), (100,)])
@pytest.mark.parametrize("form", [torch.tensor, np.array])
def test_sound_is_a_wav_file_with_its_channels_in_order_and_clipped(folder, shape, form):
    samples = np.linspace(-1.5, 1.5, int(np.prod(shape)), dtype="float32").reshape(shape)
    FORMATS[".wav"].write(OmniOutput(audio=form(samples), sample_rate=16_000), Path("x.wav"), 1, "m")
    with wave.open("x.wav") as file:
        channels = file.getnchannels()
        assert (file.getframerate(), file.getsampwidth(), file.getnframes()) == (16_000, 2, 100)
        found = np.frombuffer(file.readframes(100), "<i2").reshape(100, channels).T
    expected = np.clip(samples.reshape(channels, 100), -1, 1)
    assert np.abs(found / 32767 - expected).max() < 1e-4


@pytest.mark.parametrize("shape", [(1, 3, 8, 8, 3), (3, 8, 8, 3)])
def test_frames_as_numbers_are_written_too(folder, shape):
    frames = np.linspace(0, 1, int(np.prod(shape))).reshape(shape)
    FORMATS[".gif"].write(OmniOutput(frames=frames), Path("x.gif"), 10, "m")
    with Image.open("x.gif") as picture:
        assert picture.n_frames == 3


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_model_that_gave_something_else_says_so(folder, suffix):
    with pytest.raises(ModelError, match="gave no"):
        FORMATS[suffix].write(OmniOutput(), Path(f"x{suffix}"), 10, "m")


# --- wrong input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.jpg", "x", ".png", "x.webm"])
def test_a_suffix_that_tells_no_format_is_refused_with_those_that_do(folder, name):
    assert ".png, .gif, .mp4, .wav" in refused("demo", "one", "--out", name)


def test_mp4_without_an_encoder_is_refused_with_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(media, "find_spec", lambda name: None)
    assert "pip install 'omni-components[video]'" in refused("demo", "one", "--out", "x.mp4")


@pytest.mark.parametrize(("name", "makes"), [("x.gif", "no video"), ("x.wav", "no sound")])
def test_a_suffix_that_the_model_does_not_make_is_refused_before_the_work(folder, name, makes, monkeypatch):
    monkeypatch.setattr(DemoPipeline, "_denoise", lambda *_: pytest.fail("it was computed"))
    line = refused("demo", "one", "--device", "cpu", "--out", name)
    assert f"demo makes {makes}; choose .png" in line


@pytest.mark.parametrize(("name", "makes"), [("x.png", "sound"), ("x.gif", "no video")])
def test_what_a_sound_model_does_not_make_is_refused_before_the_work(
    folder, sound_folder, name, makes, monkeypatch
):
    monkeypatch.setattr(Omni, "generate", lambda *_, **__: pytest.fail("it was computed"))
    line = refused(sound_folder, "x", "--device", "cpu", "--out", name)
    assert f"makes {makes}; choose .wav" in line


def test_a_picture_of_a_video_model_is_refused_with_the_two_ways(folder, video_folder):
    assert "choose .gif, or pass --frames 1" in refused(
        video_folder, "x", "--device", "cpu", "--out", "x.png"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--steps", "0"), "choose 1 to 1000"),
        (("--seed", "-1"), "choose 0 to"),
        (("--size", "32"), "such as 832x480"),
        (("--size", "0x32"), "such as 832x480"),
        (("--size", "32x32"), "--size: demo has no such choice"),
        (("--frames", "3"), "--frames: demo has no such choice"),
        (("--frames", "0"), "--frames"),
        (("--fps", "0"), "--fps"),
        (("--device", "warp"), "--device"),
        (("--dtype", "int8"), "float32, bfloat16, float16"),
        (("--dtype", "bfloat16"), "the demo computes in float32"),
        (("--trace", "x.png"), "'x.png' is written already"),
        (("--trace", "x.timeline.png"), "is written already"),
        (("--trace", "t.json", "--no-cpu-offload"), "leave out --no-cpu-offload"),
        (("--trace", "no/where/t.json"), "for --trace: there is no folder 'no/where'; create it first"),
        (("--trace", ""), "for --trace: '.' is a folder; choose a file name"),
        (("--trace", "t" * 300), "and its timeline and trace cannot be written"),
        (
            ("--dtype", "float8"),
            "'float8' is not possible; choose one of float32, bfloat16, float16, or leave it",
        ),
        (("--dtype", "float16"), "'float16' is not possible: the demo computes in float32; leave it out"),
        (("--frames", "9" * 50), f"--frames: {'9' * 40}… is not possible; choose 1 to 100000"),
        (("--frames", "-2"), "-2 is not possible; choose 1 or more"),
        (("--fps", "1000"), "1000 is not possible; choose 100 or less"),
        (("--steps", "many"), "'many' is not a valid integer"),
        (("--steps", "x" * 50), f"'{'x' * 40}…' is not a valid integer"),
        (("--size", "1٢x32"), "'1٢x32' is no size; write width x height in pixels, such as 832x480"),
        (("--stepz", "1"), "See 'omni-components --help'"),
    ],
)
def test_an_option_that_cannot_be_is_one_line_that_says_what_to_do(folder, words, says):
    line = refused("demo", "one", "--out", "x.png", *words)
    assert says in line.replace("'--size'", "--size").replace("'--frames'", "--frames")


def test_a_prompt_that_the_model_refuses_is_told_in_its_own_words(folder, picture_folder):
    assert "Did you mean 'seven'?" in refused("demo", "sevn", "--device", "cpu", "--out", "x.png")
    words = (picture_folder, "x", "--device", "cpu", "--size", "33x33", "--out", "x.png")
    assert "divisible by" in refused(*words)


def test_an_image_that_a_pipeline_needs_is_asked_for_in_one_line(folder, tmp_path):
    place = tmp_path / "control"
    tiny.stable_diffusion_control_net().save_pretrained(place)
    line = refused(place, "x", "--device", "cpu", *SMALL, "--out", "x.png")
    assert f"Invalid value for MODEL: '{place}' needs image, which run has no option for; use Python:" in line
    assert "Omni(...).generate(prompt, image=...)." in line


@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_a_pipeline_that_names_types_is_told_in_plain_words(folder, kind, monkeypatch):
    def refuses(*_):
        raise kind(f"only {torch.Tensor}, but it is {type(None)}")

    monkeypatch.setattr(DemoPipeline, "_denoise", refuses)
    line = refused("demo", "one", "--device", "cpu", "--out", "x.png")
    assert "only Tensor, but it is NoneType" in line


def test_a_host_without_room_is_one_line_and_leaves_no_file(folder, monkeypatch):
    monkeypatch.setattr(DemoPipeline, "_denoise", lambda *_: torch.empty(2**60))
    line = refused("demo", "one", "--device", "cpu", "--out", "x.png", code=1)
    assert "'demo' does not fit in memory" in line
    assert "choose a smaller --size" in line


def test_another_error_of_the_library_is_not_taken_for_lack_of_memory(folder, monkeypatch):
    monkeypatch.setattr(DemoPipeline, "_denoise", lambda *_: torch.ones(2) @ torch.ones(3))
    result = run("demo", "one", "--device", "cpu", "--out", "x.png")
    assert isinstance(result.exception, RuntimeError)
    assert os.listdir() == []


@pytest.mark.parametrize("words", [(), ("demo",), ("demo", "one")])
def test_a_missing_argument_is_one_line(folder, words):
    assert "Missing" in refused(*words)


@pytest.mark.parametrize("model", ["nowhere", "./nowhere", ".", "", " ", "a" * 5000, "a/b/c", "-x/ü"[1:]])
def test_a_model_that_is_not_there_is_one_line(folder, model):
    assert "MODEL" in refused(model, "x", "--out", "x.png")


def test_a_hub_model_without_a_cache_is_one_line_and_libraries_are_silent(folder):
    line = refused("nobody/nothing", "x", "--local-files-only", "--out", "x.png")
    assert "'nobody/nothing' could not be loaded" in line
    assert "Fetch it once without --local-files-only, or pass a folder" in line
    assert "local_files_only" not in line


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_sees_a_download_grow_and_a_file_holds_no_bars(folder, terminal, monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled

    shown = []

    def fetch(*_, **__):
        shown.append(not are_progress_bars_disabled())
        raise OSError("no network")

    monkeypatch.setattr("diffusers.DiffusionPipeline.download", fetch)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with _quiet("nobody/nothing"), pytest.raises(ModelError, match="no network"):
        Omni("nobody/nothing")
    assert shown == [terminal]
    assert not are_progress_bars_disabled()


# --- failures on the way --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["--enable-cpu-offload", "--no-cpu-offload"])
def test_a_device_without_room_is_one_line_and_leaves_no_file(folder, sim, how):
    """I6: no wrong input, so the code is 1."""
    sim.capacity = "1MiB"
    line = refused("demo", "one", "--steps", 1, how, "--out", "x.png", code=1)
    assert "could not be loaded" in line or "does not fit on the device" in line


@pytest.mark.parametrize(
    "where",
    [
        "omni_components.demo.DemoPipeline.from_pretrained",
        "omni_components.demo.DemoPipeline._denoise",
        "PIL.Image.Image.save",
        "omni_components.report.timeline.draw_timeline",
        "omni_components.report.trace.write_trace",
    ],
)
def test_an_interrupt_anywhere_leaves_the_old_file_and_no_other(folder, where, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    import omni_components.report.timeline
    import omni_components.report.trace  # noqa: F401 - so that their names can be patched

    Path("x.png").write_bytes(b"old")
    monkeypatch.setattr(where, interrupt)
    words = ("demo", "one", "--steps", 1, "--device", "cpu", "--out", "x.png", "--trace", "x.json")
    assert refused(*words, code=130) == "omni-components: interrupted\n"
    assert Path("x.png").read_bytes() == b"old"


@pytest.mark.skipif(os.name != "posix", reason="sends a POSIX signal")
def test_control_c_between_two_steps_ends_the_run_even_if_a_library_swallows_it(folder, monkeypatch):
    real, steps = DemoPipeline.__call__, []

    @functools.wraps(real)
    def swallows(*args, callback, **options):
        def stepped(done, total):
            steps.append(done)
            if done == 2:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            callback(done, total)

        return real(*args, callback=stepped, **options)

    monkeypatch.setattr(DemoPipeline, "__call__", swallows)
    words = ("demo", "one", "--steps", 9, "--device", "cpu", "--out", "x.png")
    assert refused(*words, code=130) == "omni-components: interrupted\n"
    assert steps == [1, 2]


def test_a_full_disk_is_one_line_and_leaves_the_old_file(folder, monkeypatch):
    def full(self, path, **_):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    Path("x.png").write_bytes(b"old")
    monkeypatch.setattr(Image.Image, "save", full)
    words = ("demo", "one", "--steps", 1, "--device", "cpu", "--out", "x.png")
    assert "No space left on device" in refused(*words)
    assert Path("x.png").read_bytes() == b"old"
