"""check_offload on targets that nobody here wrote for it, and the state machine pointed at one's own target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.stateful import run_state_machine_as_test

from omni_components import testing
from omni_components.testing import OffloadCheckError, PipelineMachine, ResidencyMachine, check_offload
from tests.helpers.pipelines import build

pytestmark = pytest.mark.usefixtures("simulated_accelerator", "one_thread")


def test_a_diffusers_pipeline_passes() -> None:
    """I1, I2, I7, I8: Wan, two transformers, nothing declared by hand; at a capacity without room for all."""
    from tests.diffusers import tiny

    def request(device: torch.device) -> dict[str, Any]:
        size = {"height": 16, "width": 16, "num_frames": 5, "max_sequence_length": 16}
        more = {"num_inference_steps": 2, "output_type": "pt", "generator": tiny.seeded()}
        return {"prompt": "a fox", **size, **more}

    report = check_offload(tiny.wan, request, orders=2, faults=2)
    assert {one.name: one.loads for one in report.components} == {
        "text_encoder": 1,
        "transformer": 1,
        "transformer_2": 1,
        "vae": 1,
    }
    assert report.bytes_out == 0
    assert report.peak_bytes < report.resident_peak


def test_a_diffusers_pipeline_with_a_loose_tensor_fails() -> None:
    from tests.diffusers import tiny

    def loosened() -> Any:
        pipe = tiny.stable_diffusion()
        pipe.unet.time_proj.shift = torch.ones(1, 64)
        forward = pipe.unet.time_proj.forward
        pipe.unet.time_proj.forward = lambda time: forward(time) + pipe.unet.time_proj.shift
        return pipe

    def request(device: torch.device) -> dict[str, Any]:
        more = {"num_inference_steps": 1, "output_type": "pt", "generator": tiny.seeded()}
        return {"prompt": "a fox", "height": 16, "width": 16, **more}

    with pytest.raises(OffloadCheckError, match=r"'unet\.time_proj\.shift' belongs to nobody"):
        check_offload(loosened, request, orders=0, faults=False)


def test_the_cosmos3_split_passes() -> None:
    """I1, I2, I7: reasoner and generator interleaved in diffusers' own class."""
    from tests.models import tiny

    report = check_offload(
        lambda: tiny.pipeline(split=True, layers=2),
        {"num_inference_steps": 1, "guidance_scale": 1.0},
        call=lambda pipe, **inputs: tiny.request(pipe, **inputs),
        orders=2,
        faults=4,
    )
    rows = {one.name: one for one in report.components}
    assert rows["reasoner"].loads == rows["generator"].loads == 1
    assert rows["reasoner"].calls
    assert rows["generator"].calls


@settings(
    max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
@given(shape=testing.pipeline_shapes())
def test_right_pipelines_of_any_shape_pass(shape: testing.PipelineShape) -> None:
    """I1 to I8: nothing that is right is ever reported."""
    assert check_offload(shape.build, (torch.ones(2, 4),), orders=4, faults=6).findings == ()


# --- the machine ----------------------------------------------------------------------------------------


def few(machine: type[ResidencyMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=8,
            phases=(Phase.generate,),
            report_multiple_bugs=False,
            stateful_step_count=20,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
@pytest.mark.parametrize("simulated", [None, {"capacity": "64KiB"}])
def test_the_machine_is_pointed_at_a_target(simulated: dict[str, Any] | None) -> None:
    """I1, I2, I4 to I8."""
    made = []

    def factory() -> Any:
        made.append(build("interleaved"))
        return made[-1]

    machine = ResidencyMachine.for_target(factory, simulated=simulated, nesting="error")
    assert issubclass(machine, PipelineMachine)
    few(machine)
    assert len(made) >= 8
    assert machine.policy == {"nesting": "error"}


@pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")
def test_the_machine_finds_a_target_that_is_moved_behind_its_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: the machine is able to fail."""
    from omni_components.components.tensors import Member

    machine = ResidencyMachine.for_target(lambda: build("split"), simulated={})
    monkeypatch.setattr(Member, "written", lambda self: False)
    monkeypatch.setattr("omni_components.components.roster.Side.written", lambda self: False)
    with pytest.raises(Exception, match="is not what was written last"):
        few(machine)


def test_every_name_of_the_testing_package_is_there() -> None:
    assert all(getattr(testing, name).__doc__ for name in testing.__all__)
