"""``omni-components serve``: a model by name, over HTTP."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ModelError, PolicyError
from .checks import checked_device
from .options import Device, Dtype, LocalFilesOnly, Model

if TYPE_CHECKING:
    from ..omni import Omni
    from ..serve import ServeSettings

_OPTIONS = {"hosts": "allowed-host"}  # where an option is not called as the setting is
_LOCAL = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Model,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 to 65535; 0 takes any that is free.")] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keys that clients must send, one a line.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name that clients may call it by; may be repeated. Default: without keys, on an address of "
            "this machine alone, localhost; else any. Addresses always work.",
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's id for clients; default: MODEL.")
    ] = None,
    max_queue: Annotated[int, typer.Option(metavar="N", help="Requests that may wait.")] = 64,
    max_batch: Annotated[int, typer.Option(metavar="N", help="Pictures that are made together.")] = 8,
    max_pictures: Annotated[int, typer.Option(metavar="N", help="Pictures in one request.")] = 10,
    max_prompt: Annotated[int, typer.Option(metavar="N", help="Characters of a prompt.")] = 4000,
    max_steps: Annotated[int, typer.Option(metavar="N", help="Denoising steps.")] = 100,
    max_size: Annotated[str, typer.Option(metavar="WxH", help="Pixels of a picture.")] = "2048x2048",
    max_body: Annotated[int, typer.Option(metavar="BYTES", help="Of a request.")] = 64 * 1024,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="For one request, its wait included.")
    ] = 300.0,
    idle_release: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Idle time after which device memory is given back; 0: never."),
    ] = 60.0,
    device: Device = None,
    dtype: Dtype = None,
    enable_cpu_offload: Annotated[
        bool,
        typer.Option("--enable-cpu-offload", help="Components take turns on the device."),
    ] = False,
    local_files_only: LocalFilesOnly = False,
    omni: Annotated[
        bool, typer.Option("--omni", help="Changes nothing: for commands written for vLLM-Omni.")
    ] = False,
) -> None:
    """Serve pictures over HTTP, as OpenAI's API does; / shows the components move.

    Example: omni-components serve demo --enable-cpu-offload
    """
    with _told():
        from .. import serve as package  # imported here: --help need not wait for it

        settings = package.ServeSettings(
            name=served_model_name,
            api_keys=_keys(api_key_file),
            hosts=_names(allowed_host, host, api_key_file),
            max_queue=max_queue,
            max_batch=max_batch,
            max_pictures=max_pictures,
            max_prompt=max_prompt,
            max_steps=max_steps,
            max_pixels=_pixels(max_size),
            max_body=max_body,
            timeout=timeout,
            idle_release=idle_release or None,
        )
        run, create_app = package.serve, package.create_app  # what is not installed is told before the work
        place = checked_device(device)
        with _listening(host, port) as listening:
            from ..omni import Omni  # imported here: --help need not wait for torch

            with Omni(
                model,
                enable_cpu_offload=enable_cpu_offload,
                device=place,
                dtype=dtype,
                local_files_only=local_files_only,
            ) as loaded:
                app = create_app(loaded, settings)
                _announce(loaded, settings, host, listening.getsockname()[1])
                status = run(app, [listening])
    raise typer.Exit(status)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors about what was asked for, in one line that names the option."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise typer.BadParameter(str(error)) from error
    except ModelError as error:
        raise typer.BadParameter(str(error), param_hint="MODEL") from error
    except PolicyError as error:
        text = f"{error.value} is not possible; choose {error.choices}."
        option = _OPTIONS.get(error.field, error.field.replace("_", "-"))
        raise typer.BadParameter(text, param_hint=f"--{option}") from error


def _keys(file: Path | None) -> tuple[bytes, ...]:
    from ..serve import read_keys  # imported here: --help need not wait for it

    if file is None:
        return ()
    try:
        keys = read_keys(file)
        if file.stat().st_mode & 0o004:
            text = f"warning: every user of this machine may read the keys; to be alone with them: chmod 600 {file}"
            typer.echo(text, err=True)
        return keys
    except OSError as error:
        text = f"'{file}' cannot be read ({error.strerror or error}); choose another file."
        raise typer.BadParameter(text, param_hint="--api-key-file") from error


def _names(allowed: list[str] | None, host: str, api_key_file: Path | None) -> tuple[str, ...]:
    """Whoever has no key must at least call this machine by its own name.

    Else a page of any site could, under a name that it points here, ask and read like the service's own.
    """
    if allowed:
        return tuple(allowed)
    return ("localhost",) if host in _LOCAL and api_key_file is None else ()


def _pixels(size: str) -> int:
    width, cross, height = size.lower().partition("x")
    if not (cross and width.isdecimal() and height.isdecimal() and int(width) * int(height)):
        text = f"'{size}' is no size; write width x height in pixels, such as 1024x1024."
        raise typer.BadParameter(text, param_hint="--max-size")
    return int(width) * int(height)


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket: a port that is taken is told before any weight is read."""
    if not 0 <= port <= 65535:
        raise typer.BadParameter(f"{port} is not possible; choose 0 to 65535.", param_hint="--port")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        text = f"{host}:{port} cannot be listened on ({error.strerror or error}); choose another."
        raise typer.BadParameter(text, param_hint="--host, --port") from error
    with bound:
        yield bound


def _announce(omni: Omni, settings: ServeSettings, host: str, port: int) -> None:
    where = f"[{host}]" if ":" in host else host
    typer.echo(f"serving {omni.model} on {omni.device} at http://{where}:{port}", err=True)
    if not settings.api_keys and host not in _LOCAL:
        typer.echo("warning: no --api-key-file: whoever reaches this address may use it", err=True)
