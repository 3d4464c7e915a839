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

_OF_A_PIPELINE = (*LISTS, "model_cpu_offload_seq", "_exclude_from_cpu_offload")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A model to plan for.

    Attributes:
        name: What the user called it.
        target: A pipeline's stand-in, or a module; its tensors have shapes and no memory.
        sources: Per component, where the shapes come from: ``headers`` of files or the ``configuration``.
        skipped: Components that the folder names and nobody here can build, with the reason.
    """

    name: str
    target: Any
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
    return Skeleton(name=str(folder), target=target, sources=builder.sources, skipped=builder.skipped)


class _Builder:
    def __init__(self, dtype: torch.dtype | Mapping[str, torch.dtype] | None, variant: str | None) -> None:
        self._dtype, self._variant = dtype, variant
        self.sources: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def pipeline(self, folder: Path) -> Any:
        declared = table(folder / INDEX)
        modules: dict[str, nn.Module] = {}
        for name, value in declared.items():
            if not (folder / name).is_dir() or not isinstance(value, (list, tuple)) or value[:1] == [None]:
                continue  # an option, or an optional component that this checkpoint lacks
            kind = class_of(value, folder / name)
            if kind is not None:
                modules[name] = self._model(name, kind, folder / name)
            elif (folder / name / "config.json").is_file():
                self.skipped[name] = f"{'.'.join(map(str, value))} is no model of diffusers or transformers"
        if not modules:
            raise ModelError(
                str(folder), "names no model that could be planned for.", "Check model_index.json."
            )
        return _stand_in(str(declared.get("_class_name", "Pipeline")), modules)

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
            return bare(configured_model(kind, folder, dtype, name))
        build = diffusers_model if is_diffusers_model(kind) else transformers_model
        state = {key: Deferred.of(entry) for key, entry in entries.items()}
        return bare(build(kind, folder, state, dtype, name))


def bare(model: nn.Module) -> nn.Module:
    """The same module, its tensors replaced by shapes without memory; what is tied stays tied."""
    # Each with the tensor it stands for: while that lives, nobody else has its id.
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for slots in (module._parameters, module._buffers):
            for name, tensor in slots.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = tensor, _shape_of(tensor)
                slots[name] = made[id(tensor)][1]  # type: ignore[assignment]
    return model


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    shell = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return (
        nn.Parameter(shell, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else shell
    )


def _stand_in(class_name: str, modules: dict[str, nn.Module]) -> Any:
    """An object that says what the pipeline's class says of its components, and holds them."""
    import diffusers  # imported here: it takes seconds

    kind = getattr(diffusers, class_name, None)
    if class_name == "Cosmos3SplitPipeline":  # ours, saved under its own name
        from ..models.cosmos3 import Cosmos3SplitPipeline, Cosmos3SplitTransformer

        kind = Cosmos3SplitPipeline
        joint: Any = modules["transformer"]
        modules["transformer"] = Cosmos3SplitTransformer.from_joint(joint)
    if kind is None:
        raise ModelError(
            class_name, "is a pipeline that diffusers does not have.", "Plan for the loaded one."
        )
    said = {name: getattr(kind, name) for name in _OF_A_PIPELINE if hasattr(kind, name)}
    made = type(class_name, (), said)()
    vars(made).update(modules, components=dict(modules))
    return made
