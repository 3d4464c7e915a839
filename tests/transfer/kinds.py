"""Every kind of mover and of master, a tiny pipeline to run on each, and what a handle says it really is.

A kind is asked for as a user would: by the policy, by where the weights come from, or by what the host allows.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from safetensors.torch import save_file
from torch import nn

from omni_components import Offload, SplitModel, offload
from omni_components.components.tensors import Slot, own_slots
from omni_components.loading.deferred import Deferred
from omni_components.loading.files import WeightsFile
from omni_components.loading.fill import awaited, fill, map_in
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.modules import TinyModule
from omni_components.transfer.device import AcceleratorBackend, HostBackend
from omni_components.transfer.hostmemory import FileMappings
from omni_components.transfer.masters import Slab
from omni_components.transfer.mover import ArenaMover
from omni_components.transfer.staging import Staging

WIDTH = 24
PHASES = ("text", "image", "reasoner", "generator", "vae")
INPUT = torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH)


class Backbone(SplitModel):
    """Two parts, interleaved; the offset is in neither."""

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": ["layers.*.reason", "embed"],
        "generator": ["layers.*.generate"],
    }

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("offset", torch.rand(WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleDict({"reason": nn.Linear(WIDTH, WIDTH), "generate": nn.Linear(WIDTH, WIDTH)})
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
        with self._offload_context(part):
            x = x + self.embed if part == "reasoner" else x
            for layer in self.layers:
                x = torch.tanh(layer["reason" if part == "reasoner" else "generate"](x)) + self.offset
            return x


class Pipeline(nn.Module):
    """Two encoders, a split model and a VAE, with tied weights, views, odd strides and element types among them."""

    _dit_modules: ClassVar[list[str]] = ["backbone"]
    _encoder_modules: ClassVar[list[str]] = ["text", "image"]
    _vae_modules: ClassVar[list[str]] = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        self.text = TinyModule(WIDTH, 2, ("tied", "half"), generator)
        self.image = TinyModule(WIDTH, 1, ("transposed", "counter"), generator)
        self.backbone = Backbone()
        self.vae = TinyModule(WIDTH, 1, ("view", "empty"), generator)
        self.requires_grad_(False)

    @torch.no_grad()
    def use(self, phase: str, x: torch.Tensor) -> torch.Tensor:
        """Compute one phase."""
        part = phase if phase in ("reasoner", "generator") else None
        made: torch.Tensor = self.backbone(x, part) if part else getattr(self, phase)(x)
        return made

    def layer(self, phase: str) -> nn.Linear:
        """A layer of a component that may be written to."""
        if phase in ("reasoner", "generator"):
            found = self.backbone.layers[1][phase.removesuffix("er") if phase == "reasoner" else "generate"]
        else:
            found = getattr(self, phase).layers[0]
        assert isinstance(found, nn.Linear)
        return found


# --- weights from a file ----------------------------------------------------------------------------------------


def write_weights(folder: Path) -> Path:
    """The pipeline's weights in a file, each tensor once, without views."""
    file = folder / "weights.safetensors"
    save_file(
        {slots[0].path: one.detach().contiguous() for one, slots in _tensors(Pipeline())},
        file,
    )
    return file


def from_file(file: Path, *, mapped: bool) -> Pipeline:
    """The pipeline as ``load_components`` leaves it: its weights in slabs, or in the pages of the file."""
    pipe = Pipeline()
    entries = WeightsFile(file, "pipeline").entries
    for old, slots in _tensors(pipe):
        stand_in: torch.Tensor = Deferred.of(entries[slots[0].path])
        if isinstance(old, nn.Parameter):
            stand_in = nn.Parameter(stand_in, requires_grad=False)
        for slot in slots:
            slot.put(stand_in)
    for model in (pipe.text, pipe.image, pipe.backbone, pipe.vae):
        waiting = awaited(model)
        rest = map_in(waiting, lambda count: None) if mapped else waiting
        assert not (mapped and rest)
        fill(model, rest, lambda count: None)
    pipe.vae.register_buffer("row", pipe.vae.layers[0].get_parameter("weight").detach()[1])
    return pipe


def _tensors(pipe: Pipeline) -> list[tuple[torch.Tensor, list[Slot]]]:
    found: dict[int, tuple[torch.Tensor, list[Slot]]] = {}
    for path, module in pipe.named_modules():
        for slot in own_slots(path, module):
            if slot.tensor is not None and slot.name != "row":
                found.setdefault(id(slot.tensor), (slot.tensor, []))[1].append(slot)
    return list(found.values())


# --- the kinds --------------------------------------------------------------------------------------------------

FEW_PAGES = 6 * mmap.PAGESIZE  # more than the text encoder takes, less than all do
STAGING = 2048  # bytes of a staging slab: several for a component
MASTERS = ("pinned", "pooled", "limited", "refused", "pageable", "mapped", "mapped_at_first", "adopted")


@dataclass(frozen=True)
class Kind:
    """A mover and a kind of master.

    Attributes:
        mover: ``keep`` or ``fit``, the arena on an accelerator; ``cpu``.
        masters: ``pinned`` in place; ``pooled``: in blocks of torch's pinned allocator; ``limited`` by the policy;
            ``refused`` by the system from some slab on; ``pageable`` as asked; ``mapped`` from a file;
            ``mapped_at_first``, and pinned when they are loaded again; ``adopted``: slabs that a loader has filled;
            ``in_place``: left where they are.
    """

    mover: str
    masters: str

    def __str__(self) -> str:
        return f"{self.mover}-{self.masters}"

    @property
    def pins(self) -> bool:
        """Whether some weights are pinned, so that copies run alone."""
        return self.mover != "cpu" and self.masters not in ("pageable", "mapped")

    @property
    def is_mapped(self) -> bool:
        """Whether weights begin as pages of a file."""
        return self.masters in ("mapped", "mapped_at_first")

    @property
    def policy(self) -> dict[str, Any]:
        """Its fields of the policy."""
        words = {"mapped": "mapped", "mapped_at_first": "auto"}
        fields: dict[str, Any] = {"masters": words.get(self.masters, "pinned")}
        if self.mover != "cpu":
            fields["arena"] = self.mover
        if self.masters == "limited":
            fields["pinned_limit"] = FEW_PAGES
        if self.masters == "pageable":
            fields["pin_memory"] = False
        return fields

    def pipeline(self, file: Path) -> Pipeline:
        """The pipeline with its weights where this kind takes them from."""
        if self.is_mapped or self.masters == "adopted":
            return from_file(file, mapped=self.is_mapped)
        return Pipeline()

    @contextmanager
    def host(self, sim: SimulatedAccelerator | None) -> Iterator[None]:
        """A host that allows this kind, with slabs small enough for a tiny component to have several."""
        fleet = "omni_components.attach.fleet"
        with mock.patch(f"{fleet}.STAGING_BYTES", STAGING):
            if self.masters in ("limited", "refused"):
                with mock.patch("omni_components.transfer.masters.SLAB_BYTES", mmap.PAGESIZE):
                    if self.masters == "refused" and sim is not None:
                        sim.pinned_capacity = FEW_PAGES
                    yield
            elif self.masters == "pooled":
                with mock.patch(f"{fleet}.registrar_for", return_value=None):
                    yield
            else:
                yield


KINDS = [Kind(*one) for one in product(("keep", "fit"), MASTERS)]
KINDS += [Kind("cpu", "in_place"), Kind("cpu", "mapped")]


def enable(
    kind: Kind, pipe: Pipeline, device: torch.device, changed: Collection[str], **fields: Any
) -> Offload:
    """Offload the pipeline, and be sure that it is of that kind: none may fall back in silence.

    Args:
        kind: What is asked for.
        pipe: The pipeline.
        device: Where it computes.
        changed: Components of which a tensor was replaced: its file or slab has not all of them any more.
        **fields: Others of the policy.
    """
    before = {name: _address(pipe, name) for name in PHASES}
    handle = offload(pipe, device, **kind.policy, **fields)
    adopted = {name for name in PHASES if _address(pipe, name) == before[name]}
    assert mover_of(handle) == kind.mover, f"asked for {kind}, runs on {mover_of(handle)}"
    names = {one.name for one in handle.components if not one.resident} & set(PHASES)
    names -= set(changed) if kind.is_mapped or kind.masters == "adopted" else set()
    wanted = {"mapped_at_first": "mapped"}.get(kind.masters, kind.masters)
    found = masters_of(handle, names, adopted)
    assert found in (wanted, "none"), f"asked for {kind}, the masters are {found}"
    return handle


def mover_of(handle: Offload) -> str:
    """The kind of its mover, by what that consists of."""
    mover = handle.ledger.mover
    assert isinstance(mover, ArenaMover)
    if isinstance(mover.backend, HostBackend):
        return "cpu"
    assert isinstance(mover.backend, AcceleratorBackend)
    return "keep" if mover.arena.keep else "fit"


def masters_of(handle: Offload, names: Collection[str], adopted: Collection[str] = ()) -> str:
    """The kind of the masters of some components, by what they lie in.

    Args:
        handle: Of the offload.
        names: The components that take turns.
        adopted: Those whose weights have not moved when they were enabled.
    """
    mover = handle.ledger.mover
    assert isinstance(mover, ArenaMover)
    cargoes = [mover.cargo(name) for name in names]
    if not cargoes:
        return "none"
    if mover.arena.device.type == "cpu":
        pages = FileMappings()
        travel = [group.source.data_ptr() in pages for one in cargoes for group in one.groups]
        return "in_place" if not travel else "mapped" if all(travel) else "mixed"
    slabs = [
        slab for one in cargoes for slab in one.home.slabs if slab.tensor.numel()
    ]  # others: of empty tensors
    if not slabs and all(one.home.mapped for one in cargoes):
        return "mapped" if isinstance(mover.staging, Staging) else "mixed"
    if any(one.home.mapped for one in cargoes) or any(
        not group.packed for one in cargoes for group in one.groups
    ):
        return "mixed"
    return _slabs(slabs, handle, set(names) <= set(adopted))


def _slabs(slabs: list[Slab], handle: Offload, adopted: bool) -> str:
    pinned = [slab for slab in slabs if slab.pinned]
    if not pinned:
        return "pageable"
    if len(pinned) < len(slabs):
        return "limited" if handle.policy.pinned_limit is not None else "refused"
    if all(slab.registrar is None for slab in slabs):
        return "pooled"
    return "mixed" if any(slab.registrar is None for slab in slabs) else "adopted" if adopted else "pinned"


def _address(pipe: Pipeline, name: str) -> int:
    return pipe.layer(name).weight.data_ptr()
