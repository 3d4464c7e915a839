"""``omni-components plan``: what a model would need under each policy, before any weight is loaded."""

from __future__ import annotations

import atexit
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from .checks import check_amount, check_dtype, check_model, wrong_input
from .options import Dtype, LocalFilesOnly, Model
from .remarks import no_remarks


def plan(
    model: Model,
    device_memory: Annotated[
        str | None, typer.Option(help="Memory of the accelerator, such as 24GiB.", metavar="SIZE")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Memory of the host, such as 64GiB.", metavar="SIZE")
    ] = None,
    link: Annotated[str, typer.Option(help="Speed of a copy to the device.", metavar="SPEED")] = "25GB/s",
    activations: Annotated[
        str | None,
        typer.Option(help="Device memory for computing; default: a fifth of the device.", metavar="SIZE"),
    ] = None,
    dtype: Dtype = None,
    variant: Annotated[str | None, typer.Option(help="Of the weight files, such as fp16.")] = None,
    local_files_only: LocalFilesOnly = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say what a model would need: bytes, conflicts, peaks, traffic, and the cheapest policy that fits.

    It reads the configuration and the headers of the weight files; no weight is loaded, no accelerator needed.

    Example: omni-components plan Wan-AI/Wan2.2-T2V-A14B-Diffusers --dtype bfloat16 --device-memory 48GiB
    """
    amounts = {"--device-memory": device_memory, "--host-memory": host_memory, "--activations": activations}
    for option, amount in {**amounts, "--link": link}.items():
        check_amount(amount, option)
    check_model(model)
    with _no_collection(), no_remarks(), wrong_input():
        check_dtype(model, dtype)
        # Imported here: --help need not wait for torch.
        from ..omni import as_dtype
        from ..planning.model import plan as planned
        from ..planning.text import as_text

        found = planned(
            model,
            device_memory=device_memory,
            host_memory=host_memory,
            link=link,
            activations=activations,
            dtype=as_dtype(dtype),
            variant=variant,
            local_files_only=local_files_only,
        )
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else as_text(found))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Importing the libraries makes millions of objects that stay; looking for garbage among them takes seconds."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # All are old now, without having been looked at; else the next allocation would look at each of them.
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()
        atexit.register(gc.freeze)  # nor at the end of the process, where all memory goes at once
