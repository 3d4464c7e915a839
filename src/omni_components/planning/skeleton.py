"""A model's shapes without its weights, from its configuration and the headers of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..components.discovery import LISTS
from ..errors import ModelError, WeightsError
from ..loading.build import configured_model, diffusers_model, transformers_model
from ..loading.checkpoint import find_weights
from ..loading.classes import INDEX, class_of, is_diffusers_model, single_class, table, weights_name
from ..loading.deferred import Deferred
from ..loading.fill import awaited, by_part
from ..transfer.hostmemory import FileMappings
from ..transfer.masters import batches, lay_out

_OF_A_PIPELINE = (*LISTS, "model_cpu_offload_seq", "_exclude_from_cpu_offload")


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A slab that a loader fills, of so many bytes."""

    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where a loader leaves a tensor: at a place (bytes) in a slab that it fills, or without one in its file."""

    slab: Filled | None = None
    place: int = 0


IN_PAGES = Origin()
"""In the pages of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model to plan for.

    Attributes:
        name: What the user called it.
        target: A pipeline's stand-in, or a module; its tensors have shapes and no memory.
        origins: By the ``id`` of a tensor, where ``load_components`` leaves it; one that is missing was computed.
        sources: Per component, where the shapes come from: ``headers`` of files or the ``configuration``.
        skipped: Components that the folder names and nobody here can build, with the reason.
    """

    name: str
    target: Any
    origins: Mapping[int, Origin]
    sources: Mapping[str, str]
    skipped: Mapping[str, str]


def skeleton(
    folder: Path, dtype: torch.dtype | Mapping[str, torch.dtype] | None, variant: str | None = None
) -> Skeleton:
    """Read a folder's configuration, and the headers of its files where there are any.

    Args:
        folder: What ``save_pretrained`` of a pipeline or of one model wrote; the weights may be missing.
        dtype: As ``load_components`` takes it.
        variant: Of the files.

    Raises:
        ModelError: It is no such folder.
        WeightsError: Its files are corrupt, or of another model.
    """
    builder = _Builder(dtype, variant)
    target = builder.pipeline(folder) if (folder / INDEX).is_file() else builder.single(folder)
    return Skeleton(
        name=str(folder),
        target=target,
        origins=builder.origins,
        sources=builder.sources,
        skipped=builder.skipped,
    )


class _Builder:
    def __init__(self, dtype: torch.dtype | Mapping[str, torch.dtype] | None, variant: str | None) -> None:
        self._dtype, self._variant = dtype, variant
        self.origins: dict[int, Origin] = {}
        self.sources: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def pipeline(self, folder: Path) -> Any:
        declared = table(folder / INDEX)
        pipeline = _class_of_pipeline(declared)
        instead = getattr(pipeline, "_loads_instead", {})
        modules: dict[str, nn.Module] = {}
        for name, value in declared.items():
            if not (folder / name).is_dir() or not isinstance(value, (list, tuple)) or value[:1] == [None]:
                continue  # an option, or an optional component that this checkpoint lacks
            kind = class_of(value, folder / name)
            if kind is not None:
                modules[name] = self._model(name, instead.get(kind, kind), folder / name)
            elif (folder / name / "config.json").is_file():
                self.skipped[name] = f"{'.'.join(map(str, value))} is no model of diffusers or transformers"
        if not modules:
            raise ModelError(
                str(folder), "names no model that could be planned for.", "Check model_index.json."
            )
        return _stand_in(pipeline, modules)

    def single(self, folder: Path) -> nn.Module:
        config = folder / "config.json"
        if not config.is_file():
            problem = f"is a folder without {INDEX} or config.json: no pipeline or model was saved there."
            raise ModelError(str(folder), problem, "Write one with save_pretrained(folder).")
        kind = single_class(table(config), folder)
        if kind is None:
            raise ModelError(
                str(folder), "holds a model of an unknown class.", "Plan for the loaded model instead."
            )
        return self._model(folder.resolve().name, kind, folder)

    def _model(self, name: str, kind: Any, folder: Path) -> nn.Module:
        dtype = self._dtype
        if isinstance(dtype, Mapping):
            dtype = dtype.get(name, dtype.get("default", torch.float32))
        try:
            entries = find_weights(folder, weights_name(kind), self._variant, name)
        except WeightsError:
            if any(folder.glob("*.safetensors*")):
                raise  # files that are there and wrong are no configuration without weights
            entries = {}
        self.sources[name] = "headers" if entries else "configuration"
        if not entries:
            made = configured_model(kind, folder, dtype, name)
            return self._bare(made, _as_if_stored(made))
        build = diffusers_model if is_diffusers_model(kind) else transformers_model
        state = {key: Deferred.of(entry) for key, entry in entries.items()}
        made = build(kind, folder, state, dtype, name)
        return self._bare(made, _left_by_loader(made))

    def _bare(self, model: nn.Module, origins: Mapping[int, Origin]) -> nn.Module:
        """The same module, its tensors replaced by shapes without memory; what is tied stays tied."""
        # Each with the tensor it stands for: while that lives, nobody else has its id.
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        storages: dict[int, torch.UntypedStorage] = {}
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                for name, tensor in slots.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        shell = _shape_of(tensor, storages)
                        made[id(tensor)] = tensor, shell
                        if id(tensor) in origins:
                            self.origins[id(shell)] = origins[id(tensor)]
                    slots[name] = made[id(tensor)][1]  # type: ignore[assignment]
        return model


def _left_by_loader(model: nn.Module) -> dict[int, Origin]:
    """By the ``id`` of each tensor that is still to be read, where ``load_components`` leaves it."""
    waiting = [one for one in awaited(model) if one.nbytes]
    there = {id(one): values for one in waiting if (values := one.plan.mapped()) is not None}
    pages = FileMappings()  # now: what is not recognised when offload is enabled is packed
    found = {
        id(one.tensor): IN_PAGES for one in waiting if id(one) in there and there[id(one)].data_ptr() in pages
    }
    for part in by_part(model, [one for one in waiting if id(one) not in there]):
        for batch in batches(part):
            slab = Filled(lay_out(batch))
            found |= {id(one.tensor): Origin(slab, one.offset) for one in batch}
    return found


def _as_if_stored(model: nn.Module) -> dict[int, Origin]:
    """The same without files: a checkpoint has what a state dict has, in the wanted element type."""
    stored = model.state_dict(keep_vars=True).values()
    return {id(one): IN_PAGES for one in (*model.parameters(), *stored)}


def _shape_of(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if tensor.is_meta:
        shell = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    else:  # it was computed: views of each other stay so
        storage = tensor.untyped_storage()
        if storage._cdata not in storages:
            whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            storages[storage._cdata] = whole.untyped_storage()
        shell = torch.empty(0, dtype=tensor.dtype, device="meta")
        place = storages[storage._cdata], int(tensor.storage_offset()), tensor.shape, tensor.stride()
        shell.set_(*place)
    return (
        nn.Parameter(shell, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shell
    )


def _class_of_pipeline(declared: Mapping[str, Any]) -> Any:
    import diffusers  # imported here: it takes seconds

    name = str(declared.get("_class_name", "Pipeline"))
    if name == "Cosmos3SplitPipeline":  # ours, saved under its own name
        from ..models.cosmos3 import Cosmos3SplitPipeline

        return Cosmos3SplitPipeline
    kind = getattr(diffusers, name, None)
    if kind is None:
        raise ModelError(name, "is a pipeline that diffusers does not have.", "Plan for the loaded one.")
    return kind


def _stand_in(kind: Any, modules: dict[str, nn.Module]) -> Any:
    """An object that says what the pipeline's class says of its components, and holds them."""
    said = {name: getattr(kind, name) for name in _OF_A_PIPELINE if hasattr(kind, name)}
    made = type(kind.__name__, (), said)()
    vars(made).update(modules, components=dict(modules))
    return made
