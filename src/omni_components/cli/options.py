"""Arguments and options that several commands take, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder of a diffusers pipeline, a hub id, or demo.")
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="DEV", help="Where it computes, such as cuda or cpu; default: the accelerator, else cpu."
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(metavar="TYPE", help="Of the weights: float32, bfloat16 or float16."),
]
LocalFilesOnly = Annotated[bool, typer.Option("--local-files-only", help="Never ask the hub for files.")]
