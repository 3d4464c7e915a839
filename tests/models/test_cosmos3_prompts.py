"""What is read once is used again for the same prompt and the same weights, and for nothing else."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3AttnProcessor, Cosmos3OmniTransformer
from peft import LoraConfig

from omni_components import DeclarationError, offload
from omni_components.models.cosmos3 import Cosmos3SplitPipeline, Cosmos3SplitTransformer
from omni_components.models.prompts import PromptMemories, PromptMemory
from omni_components.testing import SimulatedAccelerator

from . import tiny

LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["to_q", "to_v", "mlp.up_proj", "add_k_proj"]}


class Pair:
    """A joint transformer and a split one over the same modules, and how often the split one reads."""

    def __init__(self, **more: Any) -> None:
        self.joint = tiny.transformer(layers=2, **more)
        self.split = Cosmos3SplitTransformer.from_joint(self.joint)
        self.reads = 0
        self.split.layers[0].self_attn.to_q.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.reads += 1

    def agree(self, call: dict[str, Any]) -> bool:
        """Whether both give the same; with how many reads says ``reads``."""
        self.reads = 0
        mine = self.split(**call).sample[0]
        reads, theirs = self.reads, self.joint(**call).sample[0]
        self.reads = reads
        return torch.equal(mine, theirs)


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def pair() -> Pair:
    return Pair()


# --- the same prompt ------------------------------------------------------------------------------------


def test_a_prompt_read_at_every_step(pair: Pair) -> None:
    call = tiny.call()
    assert pair.agree(call)
    assert pair.reads == 1
    for step in range(3):
        call["vision_tokens"] = [torch.randn_like(call["vision_tokens"][0])]
        call["vision_timesteps"] = torch.full_like(call["vision_timesteps"], 100.0 * step)
        assert pair.agree(call)
        assert pair.reads == 0


def test_a_prompt_in_new_tensors(pair: Pair) -> None:
    """The same values in other objects are the same prompt."""
    assert pair.agree(tiny.call())
    assert pair.agree(tiny.call())
    assert pair.reads == 0


def test_a_prompt_read_ahead(pair: Pair) -> None:
    call = tiny.call()
    pair.split.prefill(call["input_ids"], call["position_ids"][:, : call["und_len"]])
    assert pair.agree(call)
    assert pair.reads == 0


def test_two_prompts_that_take_turns(pair: Pair) -> None:
    """As with guidance."""
    calls = [tiny.call(), tiny.call(9)]
    assert all(pair.agree(call) for call in calls)
    for call in calls * 2:
        assert pair.agree(call)
        assert pair.reads == 0


def test_the_same_prompt_before_another_picture(pair: Pair) -> None:
    assert pair.agree(tiny.call())
    assert pair.agree(tiny.call(grid=(2, 3, 4)))
    assert pair.reads == 0


def test_inputs_of_inference_mode(pair: Pair) -> None:
    """Its tensors do not count writes: they are compared by value."""
    with torch.inference_mode():
        call = tiny.call()
        assert pair.agree(call)
        assert pair.agree(call)
        assert pair.reads == 0
        call["input_ids"][3] = 0
        assert pair.agree(call)
        assert pair.reads == 1


# --- another prompt -------------------------------------------------------------------------------------


def _ids(call: dict[str, Any]) -> None:
    call["input_ids"] = call["input_ids"].flip(0)


def _ids_in_place(call: dict[str, Any]) -> None:
    call["input_ids"][2] = 1


def _positions(call: dict[str, Any]) -> None:
    call["position_ids"] = call["position_ids"] + (torch.arange(call["sequence_length"]) > 3)


def _positions_in_place(call: dict[str, Any]) -> None:
    call["position_ids"][1, 4] = 9


def _longer(call: dict[str, Any]) -> None:
    call.update(tiny.call(ids=torch.cat([call["input_ids"], torch.tensor([5])])))


def _shorter(call: dict[str, Any]) -> None:
    call.update(tiny.call(ids=call["input_ids"][:-1]))


@pytest.mark.parametrize("change", [_ids, _ids_in_place, _positions, _positions_in_place, _longer, _shorter])
def test_another_prompt_answered_with_the_old_one(
    pair: Pair, change: Callable[[dict[str, Any]], None]
) -> None:
    call = tiny.call()
    assert pair.agree(call)
    before = pair.split(**call).sample[0]
    change(call)
    assert pair.agree(call)
    assert pair.reads == 1
    assert not torch.equal(pair.split(**call).sample[0], before)


def test_positions_given_on_one_axis(pair: Pair) -> None:
    call = tiny.call()
    call["position_ids"] = call["position_ids"][0]
    assert pair.agree(call)


def test_only_picture_positions_change(pair: Pair) -> None:
    call = tiny.call()
    assert pair.agree(call)
    call["position_ids"] = call["position_ids"] + 2 * (
        torch.arange(call["sequence_length"]) >= call["und_len"]
    )
    assert pair.agree(call)
    assert pair.reads == 0


# --- other weights --------------------------------------------------------------------------------------


def _in_place(pair: Pair) -> None:
    pair.split.layers[1].mlp.down_proj.weight.mul_(2.0)


def _state_dict(pair: Pair) -> None:
    pair.split.load_state_dict({name: one * 1.5 for name, one in pair.split.state_dict().items()})


def _assigned(pair: Pair) -> None:
    weights = {name: one * 1.5 for name, one in pair.split.state_dict().items()}
    pair.split.load_state_dict(weights, assign=True)


def _moved(pair: Pair) -> None:
    pair.split.to(torch.float64)


def _adapter(pair: Pair) -> None:
    pair.split.add_adapter(LoraConfig(**LORA, init_lora_weights=False))


@pytest.mark.parametrize("change", [_in_place, _state_dict, _assigned, _moved, _adapter])
def test_other_weights_answered_with_the_old_ones(pair: Pair, change: Callable[[Pair], None]) -> None:
    call = tiny.call()
    assert pair.agree(call)
    change(pair)
    call["vision_tokens"] = [one.to(pair.split.dtype) for one in call["vision_tokens"]]
    pair.joint = Cosmos3OmniTransformer.from_config(pair.split.config)
    vars(pair.joint)["_modules"] = pair.split._modules
    vars(pair.joint)["_parameters"] = pair.split._parameters
    assert pair.agree(call)


def test_an_adapter_whose_scale_changes_between_two_steps(pair: Pair) -> None:
    call = tiny.call()
    pair.split.add_adapter(LoraConfig(**LORA, init_lora_weights=False), "style")
    outputs = []
    for scale in (1.0, 0.25, 0.0):
        pair.split.set_adapters("style", scale)
        assert pair.agree(call)
        outputs.append(pair.split(**call).sample[0])
    pair.split.disable_adapters()
    assert pair.agree(call)
    assert torch.equal(pair.split(**call).sample[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def test_a_precision_that_changes_between_two_steps(pair: Pair) -> None:
    """diffusers' mixed precision for FP8 checkpoints runs parts of the reasoner otherwise in some steps."""
    runtime = SimpleNamespace(active=False, generation_high_precision=False, config="a frozen record")
    pair.split._cosmos3_mixed_precision_runtime = runtime
    reads = []
    for active, high in ((False, False), (True, True), (True, True), (True, False), (False, False)):
        runtime.active, runtime.generation_high_precision = active, high
        assert pair.agree(tiny.call())
        reads.append(pair.reads)
    assert reads == [1, 1, 0, 1, 1]


def test_autocast_between_two_steps(pair: Pair) -> None:
    """What is read in half precision is not for a step in full precision, nor the other way round."""
    call, reads = tiny.call(), []
    for enabled in (False, True, True, False):
        pair.reads = 0
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            pair.split.prefill(call["input_ids"], call["position_ids"])
        reads.append(pair.reads)
    assert reads == [1, 1, 0, 0]  # the first is kept, too


def test_adapters_that_the_joint_model_had_before_the_split() -> None:
    joint = tiny.transformer(layers=2)
    joint.add_adapter(LoraConfig(**LORA, init_lora_weights=False), "style")
    split = Cosmos3SplitTransformer.from_joint(joint)
    split.set_adapters("style", 0.5)  # the layers are the same, and so is their scale
    assert torch.equal(split(**tiny.call()).sample[0], joint(**tiny.call()).sample[0])
    split.disable_adapters()
    assert torch.equal(split(**tiny.call()).sample[0], joint(**tiny.call()).sample[0])


# --- how much is kept, and how long ---------------------------------------------------------------------


def test_prompts_without_end(pair: Pair) -> None:
    """A third prompt takes the place of the one not used for longest."""
    calls = [tiny.call(length) for length in (5, 6, 7)]
    for call in (calls[0], calls[1], calls[0], calls[2]):
        assert pair.agree(call)
        assert pair.split.prompts_kept <= 2
    assert pair.agree(calls[0])
    assert pair.reads == 0
    assert pair.agree(calls[1])
    assert pair.reads == 1


@pytest.mark.parametrize("kind", [Cosmos3SplitPipeline, None], ids=["split pipeline", "unchanged pipeline"])
def test_a_request_that_leaves_its_prompts_behind(kind: type | None) -> None:
    pipe = tiny.pipeline(kind) if kind else tiny.pipeline(split=True)
    kept = []
    pipe.transformer.layers[0].mlp_moe_gen.register_forward_hook(
        lambda *_: kept.append(pipe.transformer.prompts_kept)
    )
    tiny.request(pipe, num_inference_steps=2)
    assert kept[-1] == 2
    assert pipe.transformer.prompts_kept == 0


def test_a_failed_request_that_leaves_its_prompts_behind() -> None:
    pipe = tiny.pipeline(Cosmos3SplitPipeline)

    def fail(*_: Any) -> None:
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        tiny.request(pipe, callback_on_step_end=fail)
    assert pipe.transformer.prompts_kept == 0


def test_no_guidance_and_yet_the_negative_prompt_is_read() -> None:
    pipe = tiny.pipeline(Cosmos3SplitPipeline)
    reads: list[int] = []
    pipe.transformer.layers[0].self_attn.to_q.register_forward_hook(
        lambda _, given, out: reads.append(len(out))
    )
    tiny.request(pipe, num_inference_steps=2, guidance_scale=1.0)
    assert len(reads) == 1
    tiny.request(pipe, num_inference_steps=2, guidance_scale=2.0)
    assert len(reads) == 3


def test_the_end_of_another_threads_request(pair: Pair) -> None:
    """Memories belong to the thread that made them."""
    call = tiny.call()
    assert pair.agree(call)

    def other() -> None:
        with torch.no_grad():
            pair.split(**tiny.call(7))
            pair.split(**tiny.call(8))
        pair.split._reset_stateful_cache()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert pair.agree(call)
    assert pair.reads == 0


def test_copies_that_share_memories(pair: Pair) -> None:
    call = tiny.call()
    assert pair.agree(call)
    for twin in (
        copy.deepcopy(pair.split),
        pickle.loads(pickle.dumps(tiny.transformer(Cosmos3SplitTransformer))),
    ):
        assert twin.prompts_kept == 0
        twin(**call)
        assert twin.prompts_kept == 1


def test_a_store_that_forgets_the_wrong_one() -> None:
    """The store by itself: the latest last, the limit kept, each once."""
    store = PromptMemories(2)
    one, two, three = (PromptMemory(*(torch.zeros(1),) * 2, (), (), *(torch.zeros(1),) * 2) for _ in range(3))
    for memory in (one, two, one, one, three):
        store.keep(memory)
    assert [id(memory) for memory in store] == [id(three), id(one)]
    store.drop(one)
    assert [id(memory) for memory in store] == [id(three)]


# --- what cannot be split -------------------------------------------------------------------------------


class OwnProcessor(Cosmos3AttnProcessor):
    """A user's: the text's values count double."""

    def __call__(self, attn: Any, und_seq: torch.Tensor, gen_seq: torch.Tensor, rotary_emb: Any) -> Any:
        return super().__call__(attn, 2.0 * und_seq, gen_seq, rotary_emb)


def _own_processor(split: Cosmos3SplitTransformer, call: dict[str, Any]) -> None:
    split.set_attn_processor(OwnProcessor())


def _parallel(split: Cosmos3SplitTransformer, call: dict[str, Any]) -> None:
    split._cp_shard_fn = lambda *parts: parts  # type: ignore[method-assign]
    split._cp_gather_fn = lambda *parts: parts  # type: ignore[method-assign]


def _picture_in_the_text(split: Cosmos3SplitTransformer, call: dict[str, Any]) -> None:
    call["vision_sequence_indexes"] = call["vision_sequence_indexes"] - 1


def _text_after_the_picture(split: Cosmos3SplitTransformer, call: dict[str, Any]) -> None:
    call["text_indexes"] = call["text_indexes"] + 3


OBSTACLES = [_own_processor, _parallel, _picture_in_the_text, _text_after_the_picture]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_call_that_cannot_be_split_runs_whole(pair: Pair, obstacle: Callable[..., None]) -> None:
    call = tiny.call()
    assert pair.agree(call)
    before = pair.split(**call).sample[0]
    obstacle(pair.split, call)
    assert pair.agree(call)
    if obstacle is not _parallel:
        assert not torch.equal(pair.split(**call).sample[0], before)


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_a_call_that_cannot_be_split_is_refused_under_offload(
    sim: SimulatedAccelerator, obstacle: Callable[..., None]
) -> None:
    """Both halves at once would break I1; the error says what to do, and nothing has moved."""
    split = tiny.transformer(Cosmos3SplitTransformer, layers=2)
    with offload(split, device=sim.device) as handle:
        call = {
            name: one.to(sim.device) if isinstance(one, torch.Tensor) else one
            for name, one in tiny.call().items()
        }
        obstacle(split, call)
        before = handle.ledger.present
        with pytest.raises(DeclarationError, match="Disable the offload"):
            split(**call)
        assert handle.ledger.present == before
        handle.ledger.audit()


def test_an_attention_backend_is_followed(pair: Pair) -> None:
    call = tiny.call()
    pair.split.set_attention_backend("_native_math")
    assert pair.agree(call)


def test_a_cache_over_whole_layers_is_refused(pair: Pair) -> None:
    """It would never be called."""
    with pytest.raises(DeclarationError, match="FirstBlockCacheConfig"):
        pair.split.enable_cache(FirstBlockCacheConfig())
    assert not pair.split.is_cache_enabled
