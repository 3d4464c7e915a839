"""A model by its name: a folder, an id of the hub, or the demo; its pipeline is loaded to the host."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ModelError, PolicyError
from ..loading.load import load_components

DEMO = "demo"
DTYPES = ("float32", "bfloat16", "float16")


def as_dtype(asked: torch.dtype | str | None) -> torch.dtype | None:
    """An element type by its name.

    Raises:
        PolicyError: It is none that weights are kept in.
    """
    names = {name: getattr(torch, name) for name in DTYPES}
    found = names.get(asked, asked) if isinstance(asked, str) else asked
    if found is not None and found not in names.values():
        raise PolicyError("dtype", asked, f"one of {', '.join(DTYPES)}, or None")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model, and how its weights are read.

    Attributes:
        model: A folder, an id of the hub, or ``"demo"``.
        dtype: Of the weights; ``None`` is the pipeline's own default.
        device: Where it will compute.
        offloaded: Its components will take turns there, so that they may be read when they are first needed.
        local_files_only: Never ask the hub.
        on_bytes: Called while weights are read, with the bytes that are there and the bytes in all.
    """

    model: str
    dtype: torch.dtype | None
    device: torch.device
    offloaded: bool
    local_files_only: bool
    on_bytes: Callable[[int, int], None] | None

    def load(self) -> Any:
        """Its pipeline.

        Raises:
            ModelError: There is no such model here, or it cannot be read.
            PolicyError: The demo is asked for in another type than its own.
        """
        if self.model == DEMO:
            return self._demo()
        place = Path(self.model).expanduser()
        if self.model and place.is_dir():
            if not (place / "model_index.json").is_file():
                problem = (
                    "is a folder without model_index.json, so that no diffusers pipeline was saved there."
                )
                raise ModelError(self.model, problem, "Write one with pipeline.save_pretrained(folder).")
            return self._from_files(place, local=True)
        if not _could_be_hub_id(self.model):
            problem = "is neither a folder here, nor a model id of the hub (owner/name), nor 'demo'."
            raise ModelError(self.model, problem, "Check the path.")
        return self._from_files(self.model, local=self.local_files_only)

    def _demo(self) -> Any:
        from ..demo import DemoPipeline  # imported here: other models do not need it

        if self.dtype not in (None, torch.float32):
            raise PolicyError("dtype", self.dtype, "None: the demo computes in float32")
        # On the CPU, mapped weights are what gives load and evict a meaning: loaded means in private memory.
        return DemoPipeline.from_pretrained(mapped=self.offloaded and self.device.type == "cpu")

    def _from_files(self, place: str | Path, *, local: bool) -> Any:
        try:
            return load_components(
                place,
                dtype=self.dtype,
                lazy=self.offloaded,
                on_bytes=self.on_bytes,
                local_files_only=local,
            )
        except Exception as error:  # of many kinds: the hub's, the file system's, each component's loader's
            cause = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
            raise ModelError(self.model, f"could not be loaded: {cause}.", _advice(place, local)) from error


def _could_be_hub_id(model: str) -> bool:
    owner, slash, name = model.partition("/")
    plain = all(one.isalnum() or one in "-_." for one in owner + name)
    return bool(slash and owner and name and plain and owner[0].isalnum() and not os.path.exists(model))


def _advice(source: str | Path, local_files_only: bool) -> str:
    if isinstance(source, Path):
        return "Check that the folder is whole: save or copy it again."
    if local_files_only:
        return "Fetch it once without local_files_only, or pass a folder."
    return (
        f"Check the name and the network, or fetch it elsewhere (hf download {source}) and pass the folder."
    )
