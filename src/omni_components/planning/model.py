"""From what a user calls a model to its plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError, PolicyError
from ..sizes import parse_bytes, parse_speed
from .plan import LINK, Plan, Room, plan_for
from .skeleton import skeleton

DEMO = "demo"
_CONFIGURATION = ("*.json", "*/*.json")


def plan(
    model: Any,
    *,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    link: float | str = LINK,
    activations: int | str | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    variant: str | None = None,
    local_files_only: bool = False,
) -> Plan:
    """What offload would cost, under every policy; no weight is read and no device is touched.

    Args:
        model: A diffusers folder, with or without its weight files; the id of one on the hub, of which the
            configuration is fetched; ``"demo"``; or a pipeline or model that is there already.
        device_memory: Of the accelerator: bytes, or text such as ``"24GiB"``.
        host_memory: Of the host; likewise.
        link: Bytes per second from host to device, or text such as ``"25GB/s"``.
        activations: Device bytes that computing takes; by default a fifth of the device.
        dtype: Of the weights, as ``load_components`` takes it.
        variant: Of the files.
        local_files_only: Never ask the hub.

    Raises:
        ModelError: There is no such model, or it cannot be planned for.
        PolicyError: An amount cannot be read.
        WeightsError: Its weight files are corrupt, or of another model.
        DeclarationError: What it declares cannot be carried out.
    """
    room = Room(
        device=_amount("device_memory", device_memory),
        host=_amount("host_memory", host_memory),
        link=_speed(link),
        activations=_amount("activations", activations),
    )
    if not isinstance(model, (str, os.PathLike)):
        return plan_for(model, room)
    name = os.fspath(model)
    if name == DEMO:
        from ..demo import DemoPipeline  # imported here: other models do not need it

        return plan_for(DemoPipeline.from_pretrained(), room, model=name)
    found = skeleton(_folder(name, local_files_only), dtype, variant)
    return plan_for(
        found.target,
        room,
        model=name,
        origins=found.origins,
        sources=found.sources,
        skipped=found.skipped,
    )


def _folder(name: str, local_files_only: bool) -> Path:
    place = Path(name).expanduser()
    if place.is_dir():
        return place
    if place.exists() or name.count("/") != 1:
        raise ModelError(name, "is neither a folder here nor a model id of the hub.", "Check the path.")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        # Without the lists of shards: whoever finds one looks for its files.
        fetched = snapshot_download(
            name,
            allow_patterns=list(_CONFIGURATION),
            ignore_patterns=["*.index.json", "*/*.index.json"],
            local_files_only=local_files_only,
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        advice = "Check the name and the connection, or give a folder."
        raise ModelError(name, f"cannot be fetched from the hub: {reason}", advice) from error
    return Path(fetched)


def _amount(field: str, given: int | str | None) -> int | None:
    if given is None:
        return None
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise PolicyError(field, given, "a number of bytes, or text such as '24GiB'") from error


def _speed(given: float | str) -> float:
    try:
        return parse_speed(given)
    except ValueError as error:
        raise PolicyError("link", given, "bytes per second, or text such as '25GB/s'") from error
