"""``omni-components demo``: draw digits, and show who was on the device meanwhile."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..report.files import written_whole
from .checks import check_seed, check_steps, checked_device
from .interrupts import Interrupts
from .output import show_files, show_report, step_bar, write_errors

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from ..report.report import ResidencyReport


def demo(
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Digits in words or numerals; quotes are not needed."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEV", help="Where it computes, such as cuda or cpu; default: the accelerator, else cpu."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Denoising steps; 16 to 32 are good.")] = 24,
    seed: Annotated[int, typer.Option(metavar="S", help="Fixes the handwriting.")] = 0,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The picture, a .png file; the timeline is put beside it.")
    ] = Path("demo.png"),
) -> None:
    """Draw handwritten digits, and show who was on the device meanwhile.

    A text encoder, a reasoner and a generator take turns on the device. The report says what moved;
    FILE.timeline.png shows it.

    Examples:

        omni-components demo three one four

        omni-components demo "a thin 2, a bold 7" --seed 3 --out two_seven.png
    """
    with Interrupts() as interrupts:
        request = _checked(" ".join(prompt or ()), device, steps, seed)
        _refuse_other_formats(out)
        timeline = out.with_suffix(".timeline.png")
        with ExitStack() as files:
            with write_errors(out):
                drafts = files.enter_context(written_whole(out, timeline))
            interrupts.check()
            picture, report = _draw(request, interrupts)
            with write_errors(out):
                _save(picture, report, *drafts)
                interrupts.check()
                files.close()
    show_report(report)
    show_files(picture=out, timeline=timeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked for, checked."""

    prompt: str
    device: torch.device
    steps: int
    seed: int


def _checked(prompt: str, device: str | None, steps: int, seed: int) -> _Request:
    """Everything that can be refused before weights are read.

    Raises:
        typer.BadParameter: It says which argument, and what to do.
    """
    # Imported here: --help need not wait for the demo.
    from ..demo import PromptError, parse_prompt

    try:
        parse_prompt(prompt)
    except PromptError as error:
        raise typer.BadParameter(str(error), param_hint="PROMPT") from error
    check_steps(steps)
    check_seed(seed)
    place = checked_device(device)
    return _Request(prompt=prompt, device=place, steps=steps, seed=seed)


def _refuse_other_formats(out: Path) -> None:
    if out.suffix.lower() != ".png":
        text = f"'{out}' is no name for a picture; choose one that ends in .png."
        raise typer.BadParameter(text, param_hint="--out")


def _draw(request: _Request, interrupts: Interrupts) -> tuple[Image, ResidencyReport]:
    """The picture and the report, with a progress bar over the steps on a terminal."""
    # Imported here: --help need not wait for the demo.
    from ..attach.pipeline import offload
    from ..demo import DemoPipeline

    # On the CPU, mapped weights are what gives load and evict a meaning: loaded means in private memory.
    pipeline = DemoPipeline.from_pretrained(mapped=request.device.type == "cpu")
    with (
        offload(pipeline, request.device) as handle,
        step_bar("drawing") as progress,
    ):
        task = progress.add_task("drawing", total=request.steps)

        def stepped(done: int, total: int) -> None:
            interrupts.check()
            progress.update(task, completed=done, total=total)

        output = pipeline(request.prompt, steps=request.steps, seed=request.seed, callback=stepped)
        return output.images[0], handle.report()


def _save(picture: Image, report: ResidencyReport, picture_file: Path, timeline_file: Path) -> None:
    from ..report.timeline import draw_timeline  # imported here: matplotlib comes with it

    picture.save(picture_file, format="PNG")
    draw_timeline(report, timeline_file)
