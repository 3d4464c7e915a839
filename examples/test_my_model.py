"""A split model, and the test that it can be offloaded; no GPU needed."""
# ruff: noqa: D101, D102, D103, RUF012

import torch
from torch import nn

from omni_components import SplitModel
from omni_components.testing import check_offload


class MyModel(SplitModel):
    _offload_components = {"reasoner": ["embed", "read"], "generator": ["proj_in", "draw", "proj_out"]}

    def __init__(self):
        super().__init__()
        self.embed, self.proj_in, self.proj_out = nn.Embedding(50, 32), nn.Linear(8, 32), nn.Linear(32, 8)
        self.read, self.draw = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.style = nn.Parameter(torch.zeros(32))  # in no part: it stays on the device

    def forward(self, ids, latents, style):
        here, side = torch.accelerator.current_stream(), torch.Stream(device=latents.device)
        side.wait_stream(here)  # the last request may still compute with the last style
        with side:
            self.style.copy_(style.pin_memory(), non_blocking=True)  # while the reasoner reads
        with self._offload_context("reasoner"):
            text = self.read(self.embed(ids))
        here.wait_stream(side)  # the generator needs the style
        with self._offload_context("generator"):
            for _ in range(3):
                hidden = self.proj_in(latents) + text.mean(1) + self.style
                latents = latents - self.proj_out(self.draw(hidden)) / 3
            return latents


def inputs(device):
    return torch.arange(6, device=device)[None], torch.ones(1, 16, 8, device=device), torch.ones(32)


def test_my_model_can_be_offloaded():
    check_offload(MyModel, inputs, capacity="64KiB")
