"""Cosmos3 in two halves that take turns: the reasoner reads each prompt once, the generator runs every step.

diffusers' ``Cosmos3OmniTransformer`` runs both halves at every step. Text attends causally to text alone, so
what its half computes is the same at every step, and it can be computed once and kept: the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, ClassVar, cast

import torch
from diffusers.hooks.sea_cache import SeaCacheConfig
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_cosmos3 import Cosmos3AttnProcessor, Cosmos3OmniTransformer
from diffusers.pipelines.cosmos.pipeline_cosmos3_omni import Cosmos3OmniPipeline
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor

from ..attach.split import SplitModel
from ..components.area import Area
from ..components.patterns import matches
from ..errors import DeclarationError
from ..residency.scope import OffloadScope
from .cosmos3_calls import arguments_of, inputs_of, misplaced, text_positions
from .cosmos3_layer import draw, read
from .methods import followed, signed
from .prompts import Inputs, PromptMemories, PromptMemory, Sighting

# Where diffusers loads a saved pipeline, it looks for the base of a component's class in that class's module.
__all__ = ["Cosmos3SplitPipeline", "Cosmos3SplitTransformer", "ModelMixin"]

_WHOLE_LAYERS = "needs whole layers, and the split model runs each half of a layer by itself."
_USE_JOINT = "Use diffusers' Cosmos3OmniTransformer for it."


class Cosmos3SplitTransformer(SplitModel, Cosmos3OmniTransformer):  # type: ignore[misc]  # diffusers' own bases
    """diffusers' Cosmos3 transformer, split: same parameters, same call, same result.

    A call reads its prompt if it is not the one of a recent call, and then runs the generator's half alone.
    Prompts are recognised by the identity of the tensors, else by their values. What was read is kept per
    thread, for ``max_prompts`` prompts, until the request ends (``_reset_stateful_cache``, which every diffusers
    pipeline calls) or the weights change: in place, through adapters, by loading or by ``to()``. With gradients
    enabled nothing is kept.

    Calls that cannot be split run whole, unless the model is offloaded, which refuses them: attention
    processors other than diffusers' own, context parallelism, and generated tokens inside the text.
    Hooks on layers as wholes are not called; those on anything inside them are.

    Attributes:
        max_prompts: Prompts kept per thread: two serve guidance.
    """

    _offload_components: ClassVar[dict[str, list[str]]] = {
        "reasoner": [
            "embed_tokens",
            "layers.*.input_layernorm",
            "layers.*.self_attn.to_q",
            "layers.*.self_attn.to_k",
            "layers.*.self_attn.to_v",
            "layers.*.self_attn.to_out",
            "layers.*.self_attn.norm_q",
            "layers.*.self_attn.norm_k",
            "layers.*.self_attn.k_norm_und_for_gen",
            "layers.*.post_attention_layernorm",
            "layers.*.mlp",
            "norm",
            "lm_head",  # no phase of a generation uses it: it had better not stay
        ],
        "generator": [
            "proj_in",
            "time_embedder",
            "audio_proj_in",
            "audio_modality_embed",
            "action_proj_in",
            "action_modality_embed",
            "layers.*.input_layernorm_moe_gen",
            "layers.*.self_attn.add_q_proj",
            "layers.*.self_attn.add_k_proj",
            "layers.*.self_attn.add_v_proj",
            "layers.*.self_attn.to_add_out",
            "layers.*.self_attn.norm_added_q",
            "layers.*.self_attn.norm_added_k",
            "layers.*.post_attention_layernorm_moe_gen",
            "layers.*.mlp_moe_gen",
            "norm_moe_gen",
            "proj_out",
            "audio_proj_out",
            "action_proj_out",
        ],
    }
    # What a configuration may leave out.
    _optional_parts: ClassVar[tuple[str, ...]] = (
        "audio_",
        "action_",
        "layers.*.self_attn.k_norm_und_for_gen",
    )

    max_prompts: ClassVar[int] = 2

    @signed(Cosmos3OmniTransformer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        declared = type(self)._offload_components
        vars(self)["_offload_components"] = {
            part: [one for one in patterns if not one.startswith(self._optional_parts) or matches(self, one)]
            for part, patterns in declared.items()
        }
        self._memories = PromptMemories(self.max_prompts)
        self._epoch = 0  # of the weights
        self._read, self._draw = read, draw

    @classmethod
    def from_joint(cls, joint: Cosmos3OmniTransformer) -> Cosmos3SplitTransformer:
        """The split version of a loaded transformer, over the same modules: nothing is copied.

        Raises:
            DeclarationError: It is wrapped: by an offload, or by a cache.
        """
        if isinstance(joint, cls):
            return joint
        if vars(joint).keys() & {"forward", "_hf_hook"}:
            problem = "it is wrapped by an offload or a cache, which the split version would bypass."
            raise DeclarationError(type(joint).__name__, problem, "Split it first, then enable them.")
        with torch.device("meta"):
            split: Any = cls.from_config(joint.config)
        for table in ("_modules", "_parameters", "_buffers"):
            vars(split)[table].update(vars(joint)[table])
        split.training, split.gradient_checkpointing = joint.training, joint.gradient_checkpointing
        # What loaders have noted on it: adapters, quantization. The registry of hooks would hook the joint model.
        noted = {name: one for name, one in vars(joint).items() if name not in vars(split)}
        noted.pop("_diffusers_hook", None)
        vars(split).update(noted)
        return cast(Cosmos3SplitTransformer, split)

    # --- the reasoner ---------------------------------------------------------------------------------------

    @apply_forward_hook  # type: ignore[untyped-decorator]  # diffusers' own offload brings the model in here, too
    @torch.no_grad()
    def prefill(self, input_ids: Tensor, position_ids: Tensor) -> None:
        """Read a prompt ahead, so that the calls with it need the generator only.

        Args:
            input_ids: (N,).
            position_ids: Of the text, or of the text and all that follows: (3, N or more), or (N or more,).
        """
        ids, positions = input_ids, text_positions(position_ids, len(input_ids))
        self._memories.keep(self._recalled(ids, positions) or self._understood(ids, positions))

    def forget(self) -> None:
        """Drop what this thread has read. Idempotent."""
        self._memories.forget()

    @property
    def prompts_kept(self) -> int:
        """How many prompts this thread keeps."""
        return len(self._memories)

    def _reset_stateful_cache(self, recurse: bool = True) -> None:
        super()._reset_stateful_cache(recurse)
        self.forget()  # diffusers calls this at the end of each request

    def _understood(self, ids: Tensor, positions: Tensor) -> PromptMemory:
        """Run the reasoner's half over a prompt."""
        keys, values = [], []
        with self._offload_context("reasoner"):
            text = self.embed_tokens(ids)
            blank = text.new_zeros(()).expand_as(text)
            cosine, sine = self.rotary_emb(position_ids=positions, device=text.device, dtype=text.dtype)
            for layer in self.layers:
                text, key, value = self._run(self._read, layer, text, (cosine[0], sine[0]))
                keys.append(key)
                values.append(value)
            memory = PromptMemory(ids.clone(), positions, tuple(keys), tuple(values), self.norm(text), blank)
            memory.weights = self._reasoner_weights()
        memory.stamp = self._stamp(memory)
        return memory

    def _recalled(self, ids: Tensor, positions: Tensor) -> PromptMemory | None:
        """A kept memory of this prompt, by value."""
        fresh = (one for one in self._memories if one.stamp == self._stamp(one))
        return next((one for one in fresh if one.holds(ids, positions)), None)

    def _stamp(self, memory: PromptMemory) -> Hashable:
        """What decides the result besides the prompt: the state of the weights that read it, and the precision."""
        kind = memory.ids.device.type
        precision: tuple[Any, ...] = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        runtime = vars(self).get("_cosmos3_mixed_precision_runtime")  # diffusers': changes between steps
        if runtime is not None and runtime.active:
            precision += runtime.config, runtime.generation_high_precision
        return self._epoch, precision, sum(one._version for one in memory.weights)

    def _weights_changed(self) -> None:
        self._epoch += 1

    def _reasoner_weights(self) -> tuple[Tensor, ...]:
        patterns = self._offload_components["reasoner"]
        area = Area(self, [path for one in patterns for path in matches(self, one)])
        tensors = (slot.tensor for slot in area.slots())
        return tuple(one for one in tensors if one is not None and not one.is_inference())

    # --- the generator --------------------------------------------------------------------------------------

    @signed(Cosmos3OmniTransformer.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """One step, as in diffusers: same arguments, same output."""
        call = arguments_of(self, args, kwargs)
        inputs = inputs_of(call)
        obstacle = self._obstacle()
        memory = None if obstacle else self._known(inputs)
        if memory is None:
            obstacle = obstacle or misplaced(call)
            if obstacle:
                return self._whole(obstacle, call)
            memory = self._noted(inputs)
        with self._offload_context("generator"), self._memories.read(memory):
            return super().forward(**call)

    @property
    def embed_tokens(self) -> Any:  # type: ignore[override]
        """The token embedding. While the generator computes, a stand-in: diffusers' ``forward`` embeds the text
        at every call, and the generator's half does not look at it."""
        memory = self._memories.reading if "_memories" in vars(self) else None
        return self._modules["embed_tokens"] if memory is None else lambda ids: memory.blank

    def _run_decoder_stack(
        self, und_seq: Tensor, gen_seq: Tensor, rotary_emb: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        memory = self._memories.reading
        if memory is None:
            return super()._run_decoder_stack(und_seq, gen_seq, rotary_emb)
        turn = rotary_emb[2:]
        for layer, key, value in zip(self.layers, memory.keys, memory.values, strict=True):
            gen_seq = self._run(self._draw, layer, gen_seq, key, value, turn)
        return memory.out, self.norm_moe_gen(gen_seq)

    def _known(self, inputs: Inputs) -> PromptMemory | None:
        """The memory that served these very tensors before."""
        if torch.is_grad_enabled():
            return None
        for memory in self._memories:
            if memory.seen is not None and memory.seen.again(inputs):
                if memory.stamp == self._stamp(memory):
                    self._memories.keep(memory)
                    return memory
                self._memories.drop(memory)  # other weights now
        return None

    def _noted(self, inputs: Inputs) -> PromptMemory:
        """A memory of the prompt of a call, read if need be."""
        ids, position_ids = inputs[:2]
        assert ids is not None
        assert position_ids is not None
        positions = text_positions(position_ids, len(ids))
        if torch.is_grad_enabled():
            return self._understood(ids, positions)  # its graph belongs to this call
        memory = self._recalled(ids, positions) or self._understood(ids, positions)
        memory.seen = Sighting(inputs)
        self._memories.keep(memory)
        return memory

    # --- what cannot be split -------------------------------------------------------------------------------

    def _obstacle(self) -> str:
        """Why this model cannot run by halves now; empty if it can."""
        if self._cp_shard_fn is not None:
            return "context parallelism cuts both halves' tokens at once."
        for layer in self.layers:
            processor: Any = layer.self_attn.processor  # type: ignore[union-attr]
            if type(processor) is not Cosmos3AttnProcessor:
                return f"the attention processor {type(processor).__name__} runs both halves."
        return ""

    def _whole(self, obstacle: str, call: dict[str, Any]) -> Any:
        if isinstance(self._offload_context("reasoner"), OffloadScope):
            advice = "Disable the offload for such calls: both halves must be on the device."
            raise DeclarationError(type(self).__name__, obstacle, advice)
        return super().forward(**call)

    def enable_cache(self, config: Any) -> None:
        """As in diffusers, for ``SeaCacheConfig``; the other caches hook whole layers.

        Raises:
            DeclarationError: Another cache.
        """
        if not isinstance(config, SeaCacheConfig):
            raise DeclarationError(
                type(self).__name__, f"{type(config).__name__} {_WHOLE_LAYERS}", _USE_JOINT
            )
        super().enable_cache(config)

    def compile_repeated_blocks(self, *args: Any, **kwargs: Any) -> None:
        """Compile a layer, each half by itself; the arguments are those of ``torch.compile``."""
        self._read = torch.compile(read, *args, **kwargs)
        self._draw = torch.compile(draw, *args, **kwargs)

    def _run(self, half: Callable[..., Any], *args: Any) -> Any:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(half, *args)  # type: ignore[misc]
        return half(*args)


# Methods that change the weights: what these have read before counts no more.
for _name in (
    *("_apply", "load_state_dict", "load_lora_adapter", "add_adapter", "delete_adapters", "unload_lora"),
    *("set_adapter", "set_adapters", "enable_adapters", "disable_adapters", "enable_lora", "disable_lora"),
    *("fuse_lora", "unfuse_lora"),
):
    _original = getattr(Cosmos3OmniTransformer, _name)
    setattr(Cosmos3SplitTransformer, _name, followed(_original, Cosmos3SplitTransformer._weights_changed))


class Cosmos3SplitPipeline(Cosmos3OmniPipeline):
    """diffusers' Cosmos3 pipeline with a split transformer, which reads all prompts before the first step.

    With guidance the plain pipeline shows the transformer its second prompt only after the first one's first
    step, so that under offload each half is loaded twice. This one reads both prompts as they are tokenized:
    one load of each half per request. A joint transformer is split on the way in, sharing its weights.
    """

    # So that `load_components` fills each part's masters, not the joint model's.
    _loads_instead: ClassVar[dict[type, type]] = {Cosmos3OmniTransformer: Cosmos3SplitTransformer}

    @signed(Cosmos3OmniPipeline.__init__)
    def __init__(self, transformer: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(transformer, Cosmos3OmniTransformer):
            transformer = Cosmos3SplitTransformer.from_joint(transformer)
        super().__init__(transformer, *args, **kwargs)

    @signed(Cosmos3OmniPipeline.__call__)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One request, as in diffusers: same arguments, same output."""
        self.transformer.forget()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.transformer.forget()  # a request that fails does not come to its own end

    def _prepare_text_segment(self, input_ids: list[int], device: torch.device | str) -> dict[str, Any]:
        segment: dict[str, Any] = super()._prepare_text_segment(input_ids, device)
        # The prompt comes first, the negative prompt second, whether or not there is guidance.
        if self.do_classifier_free_guidance or self.transformer.prompts_kept == 0:
            self.transformer.prefill(segment["input_ids"], segment["text_mrope_ids"])
        return segment
