"""``omni-components run``: a model by name, a prompt, a file."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ModelError, PolicyError
from ..report.files import written_whole
from .checks import (
    check_dtype,
    check_frames,
    check_model,
    check_seed,
    check_steps,
    checked_device,
    checked_size,
    wrong_input,
)
from .interrupts import Interrupts
from .media import Format, format_of, refuse_what_it_does_not_make
from .options import Device, Dtype, LocalFilesOnly, Model
from .output import loading_bar, refuse_no_place, show_files, show_report, step_bar, write_errors

if TYPE_CHECKING:
    import torch

    from ..omni import Omni, OmniOutput
    from ..report.report import ResidencyReport

_TYPE = re.compile(r"<class '(?:\w+\.)*(\w+)'>")
_HOST_IS_FULL = "can't allocate memory"  # torch has no type of error for it
_STEPS = ("num_inference_steps", "steps")  # as diffusers' pipelines call them, and the demo


def run(
    model: Model,
    prompt: Annotated[
        list[str], typer.Argument(metavar="PROMPT...", help="What to make; quotes are not needed.")
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="What to write: .png, .gif, .mp4 or .wav; the suffix decides."),
    ],
    device: Device = None,
    dtype: Dtype = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Denoising steps; default: the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Fixes the noise.")] = 0,
    size: Annotated[
        str | None, typer.Option(metavar="WxH", help="Width and height in pixels, such as 832x480.")
    ] = None,
    frames: Annotated[int | None, typer.Option(metavar="N", min=1, help="Frames of a video.")] = None,
    fps: Annotated[
        int, typer.Option(metavar="N", min=1, max=100, help="Frames per second in the file.")
    ] = 16,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a trace for ui.perfetto.dev.")
    ] = None,
    enable_cpu_offload: Annotated[
        bool,
        typer.Option("--enable-cpu-offload/--no-cpu-offload", help="Components take turns on the device."),
    ] = True,
    local_files_only: LocalFilesOnly = False,
) -> None:
    """Make a picture, a video or sound with any diffusers pipeline, and show who was on the device meanwhile.

    Examples:

        omni-components run demo three one four --out digits.png

        omni-components run ./my-pipeline a lighthouse at dusk --size 512x512 --steps 30 --out lighthouse.png
    """
    with Interrupts() as interrupts:
        asked = _Request(
            model=model,
            prompt=" ".join(prompt),
            form=format_of(out),
            device=checked_device(device),
            dtype=dtype,
            steps=steps,
            seed=seed,
            size=None if size is None else checked_size(size, "--size", "832x480"),
            frames=frames,
            fps=fps,
            offload=enable_cpu_offload,
            local=local_files_only,
        )
        asked.check()
        files = _Files.of(out, trace, offload=enable_cpu_offload)
        report = _written(asked, files, interrupts)
    if enable_cpu_offload:
        show_report(report)
    show_files(file=files.out, timeline=files.timeline, trace=files.trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked for."""

    model: str
    prompt: str
    form: Format
    device: torch.device
    dtype: str | None
    steps: int | None
    seed: int
    size: tuple[int, int] | None
    frames: int | None
    fps: int
    offload: bool
    local: bool

    def check(self) -> None:
        """Refuse what no model can do, before weights are read."""
        check_model(self.model)
        check_dtype(self.model, self.dtype)
        if self.steps is not None:
            check_steps(self.steps)
        if self.frames is not None:
            check_frames(self.frames)
        check_seed(self.seed)

    def sampling(self, omni: Omni) -> dict[str, Any]:
        """The pipeline's arguments for it."""
        arguments: dict[str, Any] = {}
        if self.steps is not None:
            name = next((one for one in _STEPS if omni.accepts(one)), None)
            arguments[_known(name, omni, "--steps")] = self.steps
        for name, value in zip(("width", "height"), self.size or (), strict=False):
            arguments[_known(name if omni.accepts(name) else None, omni, "--size")] = value
        if self.frames is not None:
            known = omni.accepts("num_frames")
            arguments[_known("num_frames" if known else None, omni, "--frames")] = self.frames
        if omni.accepts("output_type"):
            arguments["output_type"] = "np" if self.form.holds == "sound" else "pil"
        return arguments


def _known(name: str | None, omni: Omni, option: str) -> str:
    if name is None:
        raise typer.BadParameter(f"{omni.model} has no such choice; leave it out.", param_hint=option)
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What is written; what is ``None`` is not."""

    out: Path
    timeline: Path | None
    trace: Path | None

    @classmethod
    def of(cls, out: Path, trace: Path | None, *, offload: bool) -> _Files:
        if trace is not None and not offload:
            text = "there is nothing to trace where nothing moves; leave out --no-cpu-offload."
            raise typer.BadParameter(text, param_hint="--trace")
        if trace is not None:
            refuse_no_place(trace, "--trace")
        files = cls(out=out, timeline=out.with_suffix(".timeline.png") if offload else None, trace=trace)
        if len({path.resolve() for path in files.paths}) < len(files.paths):
            text = f"'{trace}' is written already; choose another name."
            raise typer.BadParameter(text, param_hint="--trace")
        return files

    @property
    def paths(self) -> list[Path]:
        """Those that are written."""
        return [one for one in (self.out, self.timeline, self.trace) if one is not None]

    @property
    def others(self) -> str:
        """The others than ``out``, for a sentence."""
        named = [name for name in ("timeline", "trace") if getattr(self, name) is not None]
        return f" and its {' and '.join(named)}" if named else ""

    def among(self, drafts: tuple[Path, ...]) -> _Files:
        """The same, under the names that are written to first."""
        named = iter(drafts)
        return _Files(
            out=next(named),
            timeline=None if self.timeline is None else next(named),
            trace=None if self.trace is None else next(named),
        )


def _written(asked: _Request, files: _Files, interrupts: Interrupts) -> ResidencyReport:
    """Make what is asked for, and write it whole or not at all."""
    with ExitStack() as stack:
        with write_errors(files.out, files.others):
            drafts = stack.enter_context(written_whole(*files.paths))  # before the work: no file, no work
        interrupts.check()
        output, report = _generated(asked, files.out, interrupts)
        with write_errors(files.out, files.others):
            _save(asked, output, report, files.among(drafts))
            interrupts.check()
            stack.close()
    return report


def _generated(asked: _Request, out: Path, interrupts: Interrupts) -> tuple[OmniOutput, ResidencyReport]:
    with _quiet(asked.model), _loaded(asked) as omni:
        interrupts.check()
        _refuse_other_needs(omni)
        refuse_what_it_does_not_make(omni, out, asked.frames)
        sampling = asked.sampling(omni)
        with step_bar("generating") as progress:
            task = progress.add_task("generating", total=asked.steps)

            def stepped(done: int, total: int) -> None:
                interrupts.check()
                progress.update(task, completed=done, total=total)

            with _told(asked.model):
                output = omni.generate(asked.prompt, seed=asked.seed, on_step=stepped, **sampling)
        return output, omni.report()


def _refuse_other_needs(omni: Omni) -> None:
    from ..serve.needs import in_python, unmet  # imported here: --help need not wait for it

    missing = unmet(type(omni.pipeline))
    if missing:
        text = f"'{omni.model}' needs {' and '.join(missing)}, which run has no option for; use Python: "
        raise typer.BadParameter(f"{text}{in_python(missing)}.", param_hint="MODEL")


@contextmanager
def _loaded(asked: _Request) -> Iterator[Omni]:
    from ..omni import Omni  # imported here: --help need not wait for it

    with loading_bar(f"loading {asked.model}") as on_bytes, _told(asked.model), wrong_input():
        omni = Omni(
            asked.model,
            enable_cpu_offload=asked.offload,
            device=asked.device,
            dtype=asked.dtype,
            local_files_only=asked.local,
            on_bytes=on_bytes,
        )
    with omni:
        if hasattr(omni.pipeline, "set_progress_bar_config"):
            omni.pipeline.set_progress_bar_config(disable=True)  # ours shows the steps
        yield omni


@contextmanager
def _told(model: str) -> Iterator[None]:
    """What a pipeline says about its arguments, and a device about its memory, as errors of one line."""
    import torch  # imported here: --help need not wait for it

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _full(model, "on the device", error) from error
    except PolicyError:
        raise
    except RuntimeError as error:
        if _HOST_IS_FULL not in str(error):
            raise
        raise _full(model, "in memory", error) from error
    except ValueError as error:  # how diffusers' pipelines, and the demo, refuse arguments
        raise typer.BadParameter(_plain(error)) from error
    except TypeError as error:  # how they ask for one that is missing
        cause = _plain(error).rstrip(".")
        raise typer.BadParameter(f"{cause}. What run has no option for, Omni takes in Python.") from error


def _full(model: str, where: str, error: RuntimeError) -> ModelError:
    cause = str(error).partition("\n")[0].rstrip(".")
    advice = "Let components take turns (--enable-cpu-offload), or choose a smaller --size."
    return ModelError(model, f"does not fit {where}: {cause}.", advice)


def _plain(error: Exception) -> str:
    """What it says, with the names of types as people write them."""
    return _TYPE.sub(r"\1", str(error))


@contextmanager
def _quiet(model: str) -> Iterator[None]:
    """Libraries keep their remarks and bars to themselves: an error is one line here."""
    from ..omni import DEMO  # imported here: --help need not wait for it

    with ExitStack() as undo:
        if model != DEMO:
            import diffusers
            import transformers
            from huggingface_hub import utils

            hub: Any = utils
            fetching = sys.stderr.isatty() and not hub.are_progress_bars_disabled()
            for library in (diffusers.utils.logging, transformers.utils.logging):
                undo.callback(library.set_verbosity, library.get_verbosity())
                library.set_verbosity(library.CRITICAL)
                undo.callback(library.enable_progress_bar)
                library.disable_progress_bar()
            if fetching:
                hub.enable_progress_bars()  # transformers has switched off the hub's too, and a download may take hours
        yield


def _save(asked: _Request, output: OmniOutput, report: ResidencyReport, files: _Files) -> None:
    # Imported here: matplotlib comes with it.
    from ..report.timeline import draw_timeline
    from ..report.trace import write_trace

    asked.form.write(output, files.out, asked.fps, asked.model)
    if files.timeline is not None:
        draw_timeline(report, files.timeline)
    if files.trace is not None:
        write_trace(report, files.trace)
