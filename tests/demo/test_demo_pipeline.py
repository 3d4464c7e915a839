from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from omni_components.demo import DemoPipeline, PromptError
from omni_components.demo.pipeline import WEIGHTS
from omni_components.demo.render import TILE, tile_boxes

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def pipeline() -> DemoPipeline:
    return DemoPipeline.from_pretrained()


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_an_independent_classifier_recognises_the_digits(pipeline: DemoPipeline) -> None:
    check = load_example("check_demo")
    judge, accuracy = check.train_judge()
    assert accuracy >= 0.98
    verdict = check.judge_digits(pipeline, judge, per_digit=6, seed=5)
    assert verdict.recognised >= 0.95, verdict.mistakes


def test_adjectives_change_the_ink(pipeline: DemoPipeline) -> None:
    ink = load_example("check_demo").measure_adjectives(pipeline, per_digit=6)
    assert (ink["thin"] < ink["bold"]).all()
    assert ink["thin"].mean() < ink["plain"].mean() < ink["bold"].mean()


def test_a_seed_fixes_the_picture(pipeline: DemoPipeline) -> None:
    first, again, other = (pipeline("four 2", seed=seed) for seed in (3, 3, 4))
    assert first.images[0].tobytes() == again.images[0].tobytes()
    assert first.images[0].tobytes() != other.images[0].tobytes()


def test_the_global_generator_is_left_alone(pipeline: DemoPipeline) -> None:
    before = torch.get_rng_state()
    DemoPipeline.from_pretrained()
    pipeline("one", steps=1)
    assert torch.equal(before, torch.get_rng_state())


def test_mapped_weights_give_the_same_picture(pipeline: DemoPipeline) -> None:
    mapped = DemoPipeline.from_pretrained(mapped=True)
    assert torch.equal(mapped("three one four").ink, pipeline("three one four").ink)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's list of mappings")
def test_mapped_weights_have_no_private_copy() -> None:
    mapped = DemoPipeline.from_pretrained(mapped=True)
    files = [
        [int(edge, 16) for edge in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(".safetensors")
    ]
    for name, tensor in mapped.state_dict().items():
        assert any(low <= tensor.data_ptr() < high for low, high in files), name


def test_one_picture_per_prompt_one_tile_per_digit(pipeline: DemoPipeline) -> None:
    output = pipeline(["three one four", "a bold 9"], steps=2)
    assert [picture.size for picture in output.images] == [(3 * TILE, TILE), (TILE, TILE)]
    assert [[phrase.digit for phrase in line] for line in output.phrases] == [[3, 1, 4], [9]]
    assert output.ink.shape == (4, 16, 16)
    assert float(output.ink.min()) >= 0
    assert float(output.ink.max()) <= 1


def test_a_long_prompt_runs_over_two_lines(pipeline: DemoPipeline) -> None:
    picture = pipeline("31415926535897", steps=1).images[0]
    assert picture.size == (12 * TILE, 2 * TILE)
    assert tile_boxes(14)[-1] == (TILE, TILE, 2 * TILE, 2 * TILE)


def test_the_callback_hears_of_every_step(pipeline: DemoPipeline) -> None:
    heard: list[tuple[int, int]] = []
    pipeline("five", steps=3, callback=lambda done, total: heard.append((done, total)))
    assert heard == [(1, 3), (2, 3), (3, 3)]


def test_text_encoder_and_reasoner_run_once_per_request(
    pipeline: DemoPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def note(module: torch.nn.Module, method: str) -> None:
        original: Any = getattr(module, method)

        def noted(*args: Any) -> Any:
            calls.append(method if method != "forward" else type(module).__name__)
            return original(*args)

        monkeypatch.setattr(module, method, noted)

    note(pipeline.text_encoder, "forward")
    note(pipeline.transformer, "prefill")
    note(pipeline.transformer, "forward")
    note(pipeline.vae, "decode")
    pipeline(["three one", "thin 4"], steps=4)
    assert calls == ["DemoTextEncoder", "prefill", *["DemoTransformer"] * 4, "decode"]


@pytest.mark.parametrize("steps", [0, -3])
def test_no_steps_are_refused(pipeline: DemoPipeline, steps: int) -> None:
    with pytest.raises(ValueError, match=f"{steps} steps"):
        pipeline("one", steps=steps)


def test_no_prompts_are_refused(pipeline: DemoPipeline) -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        pipeline([])


def test_a_bad_prompt_is_refused_before_anything_runs(
    pipeline: DemoPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline.text_encoder, "forward", lambda *_: pytest.fail("the encoder ran"))
    with pytest.raises(PromptError):
        pipeline(["one", "lighthouse"])


def test_the_weights_are_small() -> None:
    assert sum(file.stat().st_size for file in WEIGHTS.iterdir()) <= 6_000_000


def test_the_training_script_runs(tmp_path: Path) -> None:
    train = load_example("train_demo")
    digits = train.load_real_digits()
    generator = torch.Generator().manual_seed(0)
    pipeline = DemoPipeline.from_config(train.DemoConfig())
    plan = train.Plan(vae_steps=2, flow_steps=2, vae_batch=8, flow_batch=8)
    train.train_vae(pipeline.vae, digits, plan, generator)
    train.train_flow(pipeline, digits, plan, generator)
    train.save(pipeline, train.DemoConfig(), {"seconds": 0.0}, tmp_path)
    assert DemoPipeline.from_pretrained(tmp_path)("two", steps=1).images[0].size == (TILE, TILE)


def test_importing_the_demo_imports_no_heavy_library() -> None:
    code = (
        "import sys, omni_components.demo; "
        "print([m for m in ('sklearn', 'matplotlib', 'diffusers', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
