"""``omni-components serve``: a model by name, over HTTP."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .checks import check_dtype, check_model, checked_device, checked_size, shortened, wrong_input
from .options import Device, Dtype, LocalFilesOnly, Model
from .remarks import no_remarks

if TYPE_CHECKING:
    import torch

    from ..omni import Omni
    from ..serve import ServeSettings

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
        from ..serve import ServeSettings  # imported here: --help need not wait for it

        check_model(model)
        settings = ServeSettings(
            name=served_model_name,
            api_keys=_keys(api_key_file),
            hosts=_names(allowed_host, host, api_key_file),
            max_queue=max_queue,
            max_batch=max_batch,
            max_pictures=max_pictures,
            max_prompt=max_prompt,
            max_steps=max_steps,
            max_pixels=_area(checked_size(max_size, "--max-size", "1024x1024")),
            max_body=max_body,
            timeout=timeout,
            idle_release=idle_release or None,
        )
        _refuse_missing_packages()
        check_dtype(model, dtype)
        asked = _Model(
            name=model,
            device=checked_device(device),
            dtype=dtype,
            offload=enable_cpu_offload,
            local=local_files_only,
        )
        status = _served(asked, settings, host, port)
    raise typer.Exit(status)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What is to be served."""

    name: str
    device: torch.device
    dtype: str | None
    offload: bool
    local: bool

    def load(self) -> Omni:
        """The model, ready to draw."""
        from ..omni import Omni  # imported here: --help need not wait for torch

        with no_remarks():
            return Omni(
                self.name,
                enable_cpu_offload=self.offload,
                device=self.device,
                dtype=self.dtype,
                local_files_only=self.local,
            )


def _served(asked: _Model, settings: ServeSettings, host: str, port: int) -> int:
    """Serve until a signal comes; returns the exit status."""
    from ..serve import create_app  # imported here: --help need not wait for it
    from ..serve import serve as run

    with _listening(host, port) as listening, asked.load() as loaded:
        app = create_app(loaded, settings)
        _announce(loaded, settings, host, listening.getsockname()[1])
        return run(app, [listening])


def _refuse_missing_packages() -> None:
    """What is not installed is told before the work."""
    from ..serve import create_app, serve  # noqa: F401 - they import it


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors about what was asked for, in one line that names the option."""
    try:
        with wrong_input():
            yield
    except ModuleNotFoundError as error:
        raise typer.BadParameter(str(error)) from error


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
    if allowed and not all(allowed):
        raise typer.BadParameter(
            "'' is no name; choose another, or leave it out.", param_hint="--allowed-host"
        )
    if allowed:
        return tuple(allowed)
    return ("localhost",) if host in _LOCAL and api_key_file is None else ()


def _area(size: tuple[int, int]) -> int:
    width, height = size
    return width * height


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket: a port that is taken is told before any weight is read."""
    if not host:  # it would mean every address of this machine
        text = "it is empty; choose an address of this machine, or 0.0.0.0 for all of them."
        raise typer.BadParameter(text, param_hint="--host")
    if not 0 <= port <= 65535:
        raise typer.BadParameter(
            f"{shortened(port)} is not possible; choose 0 to 65535.", param_hint="--port"
        )
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
    except UnicodeError as error:  # from making it a name of the network
        text = f"'{shortened(host)}' is no address; choose another."
        raise typer.BadParameter(text, param_hint="--host") from error
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
