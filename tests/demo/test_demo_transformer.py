from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from omni_components.demo import DemoPipeline, DemoTransformer
from omni_components.demo.config import DemoConfig

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def pipeline() -> DemoPipeline:
    return DemoPipeline.from_pretrained()


def owners(transformer: DemoTransformer) -> dict[str, list[str]]:
    """Per tensor name, the parts whose patterns match it: the rule of the design, written a second time."""
    found = {}
    for name in transformer.state_dict():
        segments = name.split(".")
        found[name] = [
            part
            for part, patterns in transformer._offload_components.items()
            for pattern in patterns
            if all(p in ("*", s) for p, s in zip(pattern.split("."), segments, strict=False))
            and len(pattern.split(".")) <= len(segments)
        ]
    return found


def test_the_parts_partition_the_tensors(pipeline: DemoPipeline) -> None:
    found = owners(pipeline.transformer)
    assert {name: parts for name, parts in found.items() if len(parts) != 1} == {}
    counts = Counter(parts[0] for parts in found.values())
    assert set(counts) == {"reasoner", "generator"}


def test_every_pattern_matches_something(pipeline: DemoPipeline) -> None:
    names = [name.split(".") for name in pipeline.transformer.state_dict()]
    for patterns in pipeline.transformer._offload_components.values():
        for pattern in patterns:
            wanted = pattern.split(".")
            assert any(
                len(name) >= len(wanted) and all(w in ("*", n) for w, n in zip(wanted, name, strict=False))
                for name in names
            ), pattern


def test_the_halves_are_interleaved_in_every_block(pipeline: DemoPipeline) -> None:
    found = owners(pipeline.transformer)
    for index in range(len(pipeline.transformer.layers)):
        inside = {parts[0] for name, parts in found.items() if name.startswith(f"layers.{index}.self_attn.")}
        assert inside == {"reasoner", "generator"}


class Watched(DemoTransformer):
    """Poisons the weights of each part that is not in its scope: any use out of turn shows as NaN."""

    def poison_parts(self) -> None:
        self.home = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        self.owner = {name: parts[0] for name, parts in owners(self).items()}
        self.opened: list[str] = []
        self.depth: Counter[str] = Counter()
        for tensor in self.state_dict().values():
            tensor.fill_(float("nan"))

    @contextmanager
    def _offload_context(self, name: str) -> Iterator[None]:
        self.opened += [name] if not self.depth[name] else []
        self.depth[name] += 1
        self._fill(name, home=True)
        try:
            yield
        finally:
            self.depth[name] -= 1
            self._fill(name, home=self.depth[name] > 0)

    def _fill(self, name: str, *, home: bool) -> None:
        for key, tensor in self.state_dict().items():
            if self.owner[key] == name:
                tensor.copy_(self.home[key]) if home else tensor.fill_(float("nan"))


def test_each_part_is_opened_once_and_used_only_inside_its_scope(pipeline: DemoPipeline) -> None:
    watched = Watched(DemoConfig().transformer)
    watched.load_state_dict(pipeline.transformer.state_dict())
    watched.requires_grad_(False)
    watched.poison_parts()
    output = DemoPipeline(pipeline.text_encoder, watched, pipeline.vae)("three thin one", steps=3)
    assert watched.opened == ["reasoner", "generator"]
    assert torch.equal(output.ink, pipeline("three thin one", steps=3).ink)


def test_the_prompt_reaches_the_picture_through_keys_and_values(pipeline: DemoPipeline) -> None:
    ids = torch.tensor([[1, 7, 0, 0], [1, 14, 0, 0]])
    mask = ids != 0
    memory = pipeline.transformer.prefill(pipeline.text_encoder(ids, mask), mask)
    assert len(memory.keys) == len(memory.values) == len(pipeline.transformer.layers)
    swapped = type(memory)(memory.keys, tuple(v.flip(0) for v in memory.values), memory.summary, mask)
    latents = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0)).expand(2, -1, -1, -1)
    time = torch.full((2,), 0.7)
    velocity = pipeline.transformer(latents, time, memory)
    assert not torch.allclose(velocity, pipeline.transformer(latents, time, swapped), atol=0.05)
