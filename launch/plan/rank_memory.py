"""Count the memory of one model on one rank of a pipeline stage: its state, and what each phase of a step adds to it.

Both backends have the same parts and phases. They differ in what a rank holds whole, in what ranks shard, and in buffers. Bytes
per parameter, with c bytes of an element in the compute precision:

                        FSDP2                  Megatron-Core
    trained weights     4 sharded              c whole, and 4 sharded if c < 4
    their gradients     4 sharded              4 whole; c with grad_reduce_in_fp32=false
    optimizer's state   8 sharded              8 sharded        (Adam's moments; FSDP2: `TrainModel.state_bytes`)
    other weights       c sharded              c whole

FSDP2 shards over all ranks of a replica after tensor parallelism, and experts over the ranks that hold the same ones.
Megatron-Core shards over data and context ranks, and experts over the ranks that hold the same ones.

FSDP2 (`pipeline.train.fsdp`) gathers the parameters of the root (embedding, last norm, head) for a whole microbatch, and a
layer's while it computes; the next layer's are prefetched. Gradients are reduced in float32, one layer at a time, and stay
until the next step begins. A single rank in float32 without offloading runs the plain module and gathers nothing.

Megatron-Core (`pipeline.train.megatron`): stage s of p keeps the activations of min(p - s, microbatches) microbatches (1F1B).
Tokens are assumed to spread evenly over experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from launch.plan.activations import (
    LayerActivations,
    RankMicrobatch,
    head_activations,
    latent_projections,
    whole_mixers,
)
from launch.plan.memory_parts import Parts, RankBatches, TrainModel, add_parts
from launch.plan.rank_division import Parallelism
from pipeline.config import compiles, trial_lengths
from pipeline.models.frozen_names import matched
from pipeline.models.mixers import DeltaNet
from pipeline.models.tensors import Tensor
from pipeline.train.adapters.adapted_layers import is_adapted
from pipeline.train.adapters.modules import adapts_experts

NOT_MATRICES = ("embedding", "output", "norm")
"""Parts of a model that Muon leaves to AdamW; biases and convolutions are few."""


class RankParameters(NamedTuple):
    """Numbers of parameters on a rank, before ranks shard them."""

    dense: float  # outside of routed experts
    experts: float

    def less(self, other: RankParameters) -> RankParameters:
        """Return these numbers without others."""
        return RankParameters(self.dense - other.dense, self.experts - other.experts)


@dataclass(frozen=True, slots=True)
class StageLayers:
    """A pipeline stage: its number of layers of each kind, and whether it is the first or the last."""

    number: int
    dense: int
    sparse: int
    first: bool
    last: bool
    start: int = 0  # its first layer

    @property
    def layers(self) -> int:
        """Return the number of layers of the stage."""
        return self.dense + self.sparse


def stages(model: TrainModel, megatron: bool) -> list[StageLayers]:
    """Return the pipeline stages of a model, with layers divided as by Megatron-Core; a single one with FSDP2."""
    settings, shape = model.policy.megatron_cfg, model.shape
    size = settings.pipeline_model_parallel_size if megatron else 1
    ends = {0: settings.num_layers_in_first_pipeline_stage, size - 1: settings.num_layers_in_last_pipeline_stage}
    layer_counts = {number: count for number, count in ends.items() if count is not None and size > 1}
    middle = (shape.layers - sum(layer_counts.values())) // max(1, size - len(layer_counts))
    stage_layers, start = [], 0
    for number in range(size):
        count = layer_counts.get(number, middle)
        sparse = sum(shape.sparse[start : start + count])
        stage_layers.append(StageLayers(number, count - sparse, sparse, number == 0, number == size - 1, start))
        start += count
    return stage_layers


def of_stages(model: TrainModel, layout: Parallelism, cuda: bool, megatron: bool) -> list[RankMemory]:
    """Return the memory of the model on a rank of each pipeline stage."""
    return [RankMemory(model, layout, cuda, megatron, stage) for stage in stages(model, megatron)]


@dataclass(frozen=True)
class RankMemory:
    """The memory of one model on one rank."""

    model: TrainModel
    layout: Parallelism
    cuda: bool
    megatron: bool  # whether Megatron-Core trains; if not, FSDP2 does
    stage: StageLayers

    # ---- parameters ---------------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> RankParameters:
        """Return the numbers of parameters on this rank. The last ranks may have fewer experts."""
        stage, hidden = self.stage, self.model.shape.hidden
        dense = stage.sparse * self._layer(True) + stage.dense * self._layer(False)
        dense += self._rows * hidden * stage.first + (hidden + self._head) * stage.last
        dense += (self.model.shape.tables / self.layout.tensor + self.model.shape.layer_inputs) * stage.first
        return RankParameters(dense, stage.sparse * self._experts)

    @property
    def _rows(self) -> int:
        """Return the number of the vocabulary's rows on this rank."""
        return -(-self.model.shape.vocabulary // self.layout.tensor)

    @property
    def _head(self) -> float:
        """Return the number of parameters that the head adds to the last stage.

        A tied head adds none if the stage has the embedding. On another stage it is a copy of the embedding.
        """
        if self.model.values:
            return self.model.shape.hidden
        return 0.0 if self.model.shape.tied and self.stage.first else self._rows * self.model.shape.hidden

    def _layer(self, sparse: bool) -> float:
        """Return a layer's number of parameters outside of routed experts. Every rank holds whole norms and routers."""
        shape, tensor = self.model.shape, self.layout.tensor
        whole = latent_projections if self.megatron else whole_mixers
        undivided = whole(shape, self.layout.sequence)
        mlp = shape.shared_layer / tensor + shape.router_layer if sparse else shape.mlp_layer / tensor
        return (shape.attention_layer - undivided) / tensor + undivided + shape.norms_layer + mlp

    @property
    def _experts(self) -> float:
        """Return a layer's number of parameters of routed experts, with FSDP2 including the padding of its gather."""
        shape, layout = self.model.shape, self.layout
        if self.megatron:
            return shape.routed_layer / (layout.expert * layout.expert_tensor)
        return layout.gathered_experts(shape) / max(1, shape.sparse_layers)

    @property
    def _adapted(self) -> bool:
        """Return whether only adapters of the model train."""
        policy = self.model.policy
        return self.model.trained and (policy.megatron_cfg.peft if self.megatron else policy.dtensor_cfg.lora_cfg).enabled

    @cached_property
    def trained(self) -> RankParameters:
        """Return the numbers of parameters that have gradients: adapters, or all that are not frozen."""
        if not self.model.trained:
            return RankParameters(0.0, 0.0)
        return self.adapters if self._adapted else self.parameters.less(self._frozen())

    def _frozen(self) -> RankParameters:
        """Return the numbers of parameters that `freeze_parameters`, and with Megatron-Core freeze_moe_router, freeze."""
        shape, stage, policy = self.model.shape, self.stage, self.model.policy
        routers = self.megatron and policy.megatron_cfg.freeze_moe_router
        dense = stage.sparse * shape.hidden * shape.experts * routers
        if not policy.freeze_parameters:
            return RankParameters(dense, 0.0)
        names = matched(policy.freeze_parameters, (tensor.name for tensor in shape.tensors))
        tensors = [tensor for tensor in shape.tensors if tensor.name in names and self._has(tensor)]
        tensors = [
            tensor
            for tensor in tensors
            if not (routers and tensor.part == "router" and tensor.shape == (shape.experts, shape.hidden))
        ]
        dense += sum(
            t.numel / (1 if t.part in ("norm", "router") else self.layout.tensor) for t in tensors if t.part != "routed"
        )
        routed = sum(tensor.numel for tensor in tensors if tensor.part == "routed")
        return RankParameters(dense, self._experts * routed / max(1, shape.routed_layer))

    def _has(self, tensor: Tensor) -> bool:
        """Return whether the stage has a tensor. A tied embedding is on the first and on the last stage."""
        stage, values = self.stage, self.model.values
        if tensor.part == "buffer" or (values and tensor.part == "output"):
            return False
        if tensor.layer is not None:
            return stage.start <= tensor.layer < stage.start + stage.layers
        if tensor.part == "embedding":
            return stage.first or (self.model.shape.tied and stage.last and not values)
        return stage.last

    @property
    def adapters(self) -> RankParameters:
        """Return the numbers of adapters' parameters, on all layers that can have them.

        An adapter of a layer has dim x (in + out). Megatron-Core's joint projections of attention, and of gate and up, share an
        A. Tensor parallelism cuts the dimension of a layer that is not the model's hidden size.
        """
        shape, stage, tensor = self.model.shape, self.stage, self.layout.tensor
        dim = self.model.policy.megatron_cfg.peft.dim if self.megatron else self.model.policy.dtensor_cfg.lora_cfg.dim
        of_attention, of_mlp = (2, 2) if self.megatron else (4, 3)  # A of hidden, and B of it

        def mlp(width: float) -> float:
            return of_mlp * shape.hidden + 3 * width if width else 0.0

        attention = of_attention * shape.hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_dim / tensor
        dense = stage.layers * shape.attention_layers / shape.layers * attention
        dense += stage.dense * shape.mlp_layers / max(1, shape.dense_layers) * mlp(shape.dense_width / tensor)
        dense += stage.sparse * mlp(shape.shared_width / tensor)
        up, down = 2 * shape.expert_width + shape.hidden, shape.hidden + shape.expert_width
        entries = shape.experts * (up * self._adapts_experts("gate_up_proj") + down * self._adapts_experts("down_proj"))
        return RankParameters(dim * dense, dim * entries * stage.sparse * self._experts / max(1, shape.routed_layer))

    def _adapts_experts(self, name: str) -> bool:
        """Return whether routed experts have adapters on the weight that transformers calls `name`."""
        if self.megatron:
            layers = range(self.stage.start, self.stage.start + self.stage.layers)
            return adapts_experts(self.model.policy.megatron_cfg.peft, layers)
        return is_adapted(f"model.layers.0.mlp.experts.{name}", self.model.policy.dtensor_cfg.lora_cfg)

    def _merged(self) -> RankParameters:
        """Return the numbers of parameters of merged weights.

        Megatron-Core merges all weights outside of routed experts, FSDP2 those that have adapters.
        """
        shape, lora = self.model.shape, self.model.policy.dtensor_cfg.lora_cfg
        share = (2 * self._adapts_experts("gate_up_proj") + self._adapts_experts("down_proj")) / 3
        experts = self.parameters.experts * share
        if self.megatron:
            return RankParameters(self.parameters.dense, experts)
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layers = {f"self_attn.{name}_proj": size for name, size in (("q", query), ("k", key), ("v", key), ("o", query))}
        attention = sum(size for name, size in layers.items() if is_adapted(f"model.layers.0.{name}", lora))
        mlp = sum(is_adapted(f"model.layers.0.mlp.{name}_proj", lora) for name in ("gate", "up", "down"))
        dense = shape.attention * attention / (2 * (query + key)) + shape.mlp * mlp / 3
        return RankParameters(dense / self.layout.tensor, experts)

    # ---- state --------------------------------------------------------------------------------------------------------------

    def _bytes(self, counts: RankParameters, whole: float, sharded: float) -> float:
        """Return the bytes of parameters of which a rank holds `whole` bytes each, and a share of `sharded` bytes each."""
        layout = self.layout
        shards = (layout.data * layout.context, layout.expert_data) if self.megatron else (layout.shard, layout.expert_shard)
        return sum(count * (whole + sharded / shard) for count, shard in zip(counts, shards, strict=True))

    def _computed(self, counts: RankParameters) -> float:
        """Return the bytes of weights in the compute precision."""
        return self._bytes(counts, self.model.size, 0) if self.megatron else self._bytes(counts, 0, self.model.size)

    @cached_property
    def state(self) -> Parts:
        """Return part -> bytes of weights, gradients and optimizer, wherever they are."""
        c, trained, adapted = self.model.size, self.trained, self._adapted
        if not self.model.trained:
            return {"weights": self._computed(self.parameters)}
        if self.megatron:
            in_float32 = self.model.policy.megatron_cfg.distributed_data_parallel_config.grad_reduce_in_fp32
            weights, gradients = (c, 4 * (c < 4)), (4 if in_float32 else c, 0)
        else:
            weights, gradients = (0, 4), (0, 4)
        fixed = self.parameters if adapted else self.parameters.less(trained)
        return {
            "weights": self._computed(fixed) + self._bytes(trained, *weights),
            "merged weights": self._computed(self._merged()) if adapted and self.model.merged else 0.0,
            "gradients": self._bytes(trained, *gradients),
            "optimizer": self._optimizer_bytes(),
        }

    def _optimizer_bytes(self) -> float:
        of_matrices, of_others = self.model.state_bytes
        total = self._bytes(self.trained, 0, of_matrices)
        if of_matrices == of_others or self._adapted:
            return total
        shape, frozen = self.model.shape, self.model.policy.freeze_parameters
        names = matched(frozen, (tensor.name for tensor in shape.tensors)) if frozen else ()
        others = (t for t in shape.tensors if t.part in NOT_MATRICES and t.name not in names and self._has(t))
        count = sum(t.numel / (1 if t.part == "norm" else self.layout.tensor) for t in others)
        return total + self._bytes(RankParameters(count, 0.0), 0, of_others - of_matrices)

    @property
    def reference(self) -> float:
        """Return the bytes of the reference policy's weights; 0 without a reference, or if it is the base model of adapters."""
        return self._computed(self.parameters) if self.model.reference and not self._adapted else 0.0

    @property
    def _offloads(self) -> bool:
        """Return whether weights and optimizer state are kept in host memory."""
        return self.cuda and (self.model.offload or (not self.megatron and self.model.policy.dtensor_cfg.cpu_offload))

    @property
    def _keeps_reference(self) -> bool:
        """Return whether the reference's weights stay on the GPU."""
        fsdp = self.cuda and not self.megatron and not self._offloads and self.model.trained
        return fsdp and not self.model.policy.dtensor_cfg.reference_cpu_offload

    @cached_property
    def resident(self) -> Parts:
        """Return part -> bytes that are on the device in all phases, including the gradients."""
        if self._offloads:
            return {}
        return add_parts(self.state, {"other models": self.reference * self._keeps_reference})

    @property
    def host(self) -> float:
        """Return the bytes in host memory: offloaded state, and reference weights that are not on the device."""
        return self.reference * (not self._keeps_reference) + sum(self.state.values()) * self._offloads

    # ---- phases -------------------------------------------------------------------------------------------------------------

    def phases(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        """Yield (phase, part -> bytes on the device in addition to `resident`).

        Gradients are negative in phases in which they are not allocated yet, since `resident` includes them.
        """
        forward = self._forward(batches.forward_tokens)
        yield "log-probs", forward
        fetches = self.cuda and self.reference and not self._keeps_reference and (self.megatron or not self._offloads)
        if fetches:
            yield "log-probs of the reference", add_parts(forward, {"buffers": self.reference})
        if self.model.trained:
            yield from self._training(batches)
        dtensor = self.model.policy.dtensor_cfg
        if not self.megatron and compiles(self.model.policy, self.model.shape.mixture) and (self.cuda or dtensor.compile):
            yield from self._trial()

    def _trial(self) -> Iterator[tuple[str, Parts]]:
        """Yield the phases of the trial microbatch that compiled layers run at the start, before Adam's moments exist.

        The trial microbatch may be larger than the microbatches of the data.
        """
        tokens = sum(trial_lengths(self.model.policy))
        if not self.model.trained:
            yield "trial of compiled layers", self._forward(tokens)
            return
        later = {"optimizer": -self.resident.get("optimizer", 0.0)}
        for phase, parts in self._training(RankBatches(tokens, 0, 1, 0.0)):
            yield f"{phase} in the trial of compiled layers", add_parts(parts, later)

    def _forward(self, tokens: float) -> Parts:
        microbatch = self._microbatch(tokens)
        layers = self._layers(microbatch).values()
        activations = max((layer.forward for layer in layers), default=0.0)
        hidden = self.model.size * microbatch.tokens * self.model.shape.hidden / microbatch.sequence
        of_head = head_activations(self.model, microbatch.tokens, self.layout.tensor).forward * self.stage.last
        fetched = sum(self.state.values()) if self.megatron and self._offloads else 0.0
        buffers = {"buffers": self._gathered(3) + fetched}
        if of_head > activations:
            return add_parts({"activations": hidden, "logits": of_head}, buffers)
        return add_parts({"activations": hidden + activations}, buffers)

    def _training(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        shape, c, stage, microbatch = self.model.shape, self.model.size, self.stage, self._microbatch(batches.train_tokens)
        layers = self._layers(microbatch)
        in_flight = min(self.layout.pipeline - stage.number, batches.microbatches)
        kept = sum((stage.sparse if sparse else stage.dense) * self._kept(layer) for sparse, layer in layers.items())
        hidden = c * microbatch.tokens * shape.hidden
        saved = in_flight * (kept + (hidden / microbatch.sequence if self.layout.pipeline > 1 else 0.0))
        last, (method, several) = next(iter(layers.values())), self._method
        largest = max(layer.saved for layer in layers.values()) * (1 if method == "block" else several)
        again = largest if self._recomputes else 0.0  # of layers whose recomputed activations exist at the same time
        again -= self._kept(last) - last.input if self._recomputes == "selective" else 0.0
        stays = self.megatron or batches.microbatches > 1 or self._offloads or self._adapted
        missing = {} if stays else {"gradients": -self.resident["gradients"]}
        if stage.last:
            of_head = head_activations(self.model, microbatch.tokens, self.layout.tensor)
            at_head = {"activations": saved + last.norm, "logits": max(of_head.forward, of_head.backward)}
            yield "backward of the head", add_parts(at_head, {"buffers": self._gathered(2)}, missing)
        at_layer = {"activations": saved + again + last.backward, "buffers": self._held}
        yield "backward of the last layer", add_parts(at_layer, missing)
        if again and not self.megatron and shape.layers > 1:  # while the last layer's gradients are reduced
            before = {"activations": -last.input, "buffers": self._reducing}
            yield "backward of the next-to-last layer", add_parts(at_layer, before, missing)
        if self._gathers:
            reduction = self._held + c * self._largest + self._reducing
            after = {"activations": saved - (0 if again else last.saved), "buffers": reduction}
            yield "reduction of the last layer", add_parts(after, missing)
            yield "reduction of the root", {"buffers": (2 * c + 4 + 4 / self.layout.shard) * self._root}

    def _microbatch(self, tokens: float) -> RankMicrobatch:
        layout, sequence = self.layout, self.layout.tensor if self.layout.sequence else 1
        whole = RankMicrobatch(tokens / layout.context, self.model.size, self.cuda, layout.tensor, sequence)
        if self.megatron:
            return replace(whole, expert_tensor=layout.expert_tensor, expert_tokens=layout.expert_tensor / sequence)
        mixer_tensor = sequence if isinstance(self.model.shape.state, DeltaNet) else layout.tensor
        return replace(whole, expert_tokens=1 / layout.tensor, context=layout.context, mixer_tensor=mixer_tensor)

    def _layers(self, microbatch: RankMicrobatch) -> dict[bool, LayerActivations]:
        """Return whether a layer is a mixture of experts -> its activations, for the kinds of layers in this stage."""
        implementation = ("fused" if self.cuda else "local") if self.megatron else "eager"
        kinds = ((True, self.stage.sparse), (False, self.stage.dense))
        return {
            sparse: LayerActivations(self.model.shape, sparse, microbatch, implementation) for sparse, count in kinds if count
        }

    @property
    def _recomputes(self) -> str:
        """Return what the backward pass recomputes: "full", "selective" or "".

        Megatron-Core's selective recomputation counts as none: of core attention it saves nothing, since flash attention keeps
        as little, and the savings of other modules are not counted.
        """
        settings = self.model.policy.megatron_cfg if self.megatron else self.model.policy.dtensor_cfg
        granularity = settings.recompute_granularity or ""
        return granularity if settings.activation_checkpointing and not (self.megatron and granularity == "selective") else ""

    def _kept(self, layer: LayerActivations) -> float:
        """Return the mean bytes that a layer keeps from the forward pass to the backward pass."""
        if not self._recomputes:
            return layer.saved
        if self._recomputes == "selective":
            return replace(layer, implementation="selective").saved
        method, several = self._method
        if method != "block":
            return layer.input / several
        recomputed = min(1.0, several / max(1, self.stage.layers))
        return recomputed * layer.input + (1 - recomputed) * layer.saved

    @property
    def _method(self) -> tuple[str | None, int]:
        """Return Megatron-Core's way of recomputing whole layers, and their number."""
        settings = self.model.policy.megatron_cfg
        return (settings.recompute_method, settings.recompute_num_layers or 1) if self.megatron else (None, 1)

    # ---- buffers of FSDP2 ---------------------------------------------------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        """Return whether the rank gathers weights: with FSDP2, unless it runs the plain module."""
        two_precisions = self.model.trained and self.model.size < 4
        return not self.megatron and (self.layout.ranks > 1 or two_precisions or self._offloads)

    @property
    def _root(self) -> float:
        """Return the number of parameters of the embedding, last norm and head, after tensor parallelism."""
        return self._rows * self.model.shape.hidden + self._head + self.model.shape.hidden

    @property
    def _largest(self) -> float:
        """Return the number of parameters of the largest layer, after tensor and expert parallelism."""
        sizes = [self._layer(True) + self._experts] * (self.stage.sparse > 0) + [self._layer(False)] * (self.stage.dense > 0)
        return max(sizes)

    def _gathered(self, layers: int) -> float:
        """Return the bytes of the gathered weights of the root and of `layers` layers."""
        return self.model.size * (self._root + layers * self._largest) if self._gathers else 0.0

    @property
    def _held(self) -> float:
        """Return the bytes of buffers in a layer's backward pass.

        They are the gathered weights of the layer, of the prefetched layer and of the root, and the gradient of the head.
        """
        return self._gathered(1 + (self.layout.shard > 1)) + self.model.size * self._head * self._gathers

    @property
    def _reducing(self) -> float:
        """Return the bytes of a layer's gradient in float32: the whole and, if several ranks shard it, this rank's shard."""
        shard = self.layout.shard
        return 4 * self._largest * (1 + (1 / shard if shard > 1 else 0)) * self._gathers
