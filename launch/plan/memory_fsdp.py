"""Estimate the memory of one model on one rank with FSDP2, as `pipeline.train.fsdp` allocates it.

The ranks of a replica shard the trained parameters, their gradients and Adam's moments, all in float32. Tensor parallelism cuts
dense parameters first, except some mixers (fsdp_splits.py); then data x context ranks shard them. Ranks with the same experts
shard these experts. The parameters of the root (embedding, last norm, head) are gathered for a whole microbatch. A layer's
parameters are gathered while it computes, and the next layer's are prefetched. Gradients are reduced in float32, one layer at a
time. They stay allocated until the next step begins, and therefore during its forward passes. A single rank in float32 without
offloading runs the plain module and gathers nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch.plan import frozen_counts
from launch.plan.activations import (
    LayerActivations,
    RankMicrobatch,
    final_norm,
    head_activations,
    hugging_face_layer,
    selective_bytes,
)
from launch.plan.fsdp_splits import numel_of_rank, whole_mixers
from launch.plan.memory_parts import Parts, RankBatches, TrainModel, add_parts
from launch.plan.rank_division import Parallelism
from launch.plan.refit import LINEAR
from pipeline.config import compiles, trial_lengths
from pipeline.train.adapters.adapted_layers import expert_entries, experts, is_adapted


@dataclass(frozen=True)
class FSDPMemory:
    """The memory of one model on one rank with FSDP2."""

    model: TrainModel
    layout: Parallelism
    cuda: bool

    @property
    def plain(self) -> bool:
        """Return whether the rank runs the plain module without FSDP2, which gathers no weights."""
        two_precisions = self.model.trained and self.model.size < 4
        return self.layout.ranks == 1 and not two_precisions and not self.offloads

    @property
    def offloads(self) -> bool:
        """Return whether weights and optimizer state are kept in host memory."""
        return self.cuda and (self.model.policy.dtensor_cfg.cpu_offload or self.model.offload)

    @property
    def trains_adapters(self) -> bool:
        """Return whether the model trains LoRA adapters."""
        return self.model.trained and self.model.policy.dtensor_cfg.lora_cfg.enabled

    @property
    def root(self) -> float:
        """Return the number of parameters of the embedding, last norm and head on a rank, after tensor parallelism."""
        return (self.model.table + self.model.output) / self.layout.tensor + self.model.shape.hidden

    def layer(self, sparse: bool) -> float:
        """Return a layer's number of parameters on a rank, after tensor and expert parallelism.

        sparse: whether the layer is a mixture of experts.
        """
        return self._dense_layer(sparse) + (self._experts if sparse else 0.0)

    def _dense_layer(self, sparse: bool) -> float:
        """Return a layer's number of parameters outside of routed experts, after tensor parallelism."""
        shape = self.model.shape
        divided = shape.attention_layer + (shape.sparse_layer - self._routed_layer if sparse else shape.mlp_layer)
        undivided = whole_mixers(shape, self.layout) / shape.layers
        return (divided - undivided) / self.layout.tensor + undivided + shape.norms_layer

    @property
    def _routed_layer(self) -> float:
        """Return the number of parameters of a layer's routed experts on all ranks together."""
        return self.model.shape.routed / max(1, self.model.shape.sparse_layers)

    @property
    def _experts(self) -> float:
        """Return the number of parameters of a layer's routed experts after expert parallelism, with the gather's padding."""
        return self.layout.gathered_experts(self.model.shape) / max(1, self.model.shape.sparse_layers)

    @property
    def largest(self) -> float:
        """Return the number of parameters of the largest layer after tensor and expert parallelism."""
        return max(self.layer(sparse) for sparse in self._counts)

    @property
    def parameters(self) -> float:
        """Return the number of parameters that the first rank holds. The last ranks may have fewer experts."""
        layers = sum(count * self._dense_layer(sparse) for sparse, count in self._counts.items())
        experts = self.model.shape.sparse_layers * self._experts / self.layout.expert_shard
        return (self.root + layers) / self.layout.shard + experts

    @property
    def _frozen_parameters(self) -> float:
        """Return the number of parameters on this rank that freeze_parameters freezes; they are kept in policy.precision."""
        frozen, routed = frozen_counts.tensors(self.model), self.model.shape.routed
        experts = self.model.shape.sparse_layers * self._experts / self.layout.expert_shard
        share = frozen_counts.routed_parameters(frozen) / routed if routed else 0.0
        return numel_of_rank(frozen, self.layout) / self.layout.shard + share * experts

    @property
    def _trained_parameters(self) -> float:
        return self.parameters - self._frozen_parameters

    @property
    def adapters(self) -> float:
        """Return the number of adapters' parameters on this rank: its share of dim x (in + out) for each linear layer.

        Tensor parallelism cuts the dimension of a layer that is not the model's hidden size. Adapters of experts, if the recipe
        has them, are cut like the experts.
        """
        shape, lora = self.model.shape, self.model.policy.dtensor_cfg.lora_cfg
        query, key, width = (
            size / self.layout.tensor
            for size in (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.dense_width)
        )
        attention = 2 * (shape.hidden + query) + 2 * (shape.hidden + key)
        mlp = 3 * (shape.hidden + width) if shape.mlp_layers else 0
        linear = lora.dim * (shape.attention_layers * attention + shape.mlp_layers * mlp) / self.layout.shard
        expert_share = shape.sparse_layers * self._experts / self.layout.expert_shard / max(1, shape.routed)
        return linear + expert_share * expert_entries(shape.tensors, lora)

    @property
    def _merged_bytes(self) -> float:
        """Return the bytes of merged weights: this rank's shards of all weights that have adapters."""
        shape, lora = self.model.shape, self.model.policy.dtensor_cfg.lora_cfg
        layers = (tensor for tensor in shape.tensors if tensor.part in LINEAR and len(tensor.shape) == 2)
        adapted = numel_of_rank(
            (tensor for tensor in layers if is_adapted(tensor.name.removesuffix(".weight"), lora)), self.layout
        )
        routed = (tensor for tensor in experts(shape.tensors) if is_adapted(tensor.name, lora))
        share = sum(tensor.experts * tensor.rows * tensor.columns for tensor in routed) / max(1, shape.routed)
        of_experts = share * shape.sparse_layers * self._experts / self.layout.expert_shard
        return self.model.size * (adapted / self.layout.shard + of_experts)

    @property
    def _counts(self) -> dict[bool, int]:
        """Return whether a layer is a mixture of experts -> number of such layers, without kinds that the model lacks."""
        shape = self.model.shape
        return {sparse: count for sparse, count in ((True, shape.sparse_layers), (False, shape.dense_layers)) if count}

    @property
    def resident(self) -> Parts:
        """Return part -> bytes that are on the device in all phases, including the gradients."""
        if self.offloads:
            return {}
        weight_bytes = self.model.size * self.parameters
        if not self.model.trained:
            return {"weights": weight_bytes}
        if self.trains_adapters:
            trained, merged = self.adapters, {"merged weights": self._merged_bytes} if self.model.merged else {}
            return {"weights": weight_bytes + 4 * trained} | merged | {"gradients": 4 * trained, "optimizer": 8 * trained}
        weights = 4 * self._trained_parameters + self.model.size * self._frozen_parameters
        parts = {"weights": weights, "gradients": 4 * self._trained_parameters, "optimizer": 8 * self._trained_parameters}
        stays = self.cuda and not self.model.policy.dtensor_cfg.reference_cpu_offload
        return parts | ({"other models": self.reference} if stays and self.reference else {})

    @property
    def reference(self) -> float:
        """Return the bytes of the reference policy's weights; 0 without a reference, or if it is the base model of adapters."""
        return self.model.size * self.parameters if self.model.reference and not self.trains_adapters else 0.0

    @property
    def host(self) -> float:
        """Return the bytes in host memory: offloaded state, and reference weights that are not on the device."""
        reference = 0.0 if "other models" in self.resident else self.reference
        fixed = self._frozen_parameters if self.model.trained else self.parameters
        return reference + (16 * (self.parameters - fixed) + self.model.size * fixed if self.offloads else 0.0)

    def phases(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        """Yield (phase, part -> bytes on the device in addition to `resident`).

        Gradients are negative in phases in which they are not allocated yet, since `resident` includes them.
        """
        forward = self._forward(batches.forward_tokens / self.layout.context)
        yield "log-probs", forward
        if self.cuda and self.reference and not self.offloads and "other models" not in self.resident:
            yield "log-probs of the reference", add_parts(forward, {"other models": self.reference})
        if self.model.trained:
            yield from self._training(batches)
        if compiles(self.model.policy, self.model.shape.mixture) and (self.cuda or self.model.policy.dtensor_cfg.compile):
            yield from self._trial()

    def _trial(self) -> Iterator[tuple[str, Parts]]:
        """Yield the phases of the trial microbatch that compiled layers run at the start, before Adam's moments exist.

        The trial microbatch may be larger than the microbatches of the data.
        """
        tokens = sum(trial_lengths(self.model.policy))
        if not self.model.trained:
            yield "trial of compiled layers", self._forward(tokens / self.layout.context)
            return
        later = {"optimizer": -self.resident.get("optimizer", 0.0)}
        for phase, parts in self._training(RankBatches(tokens, 0, 1, 0.0)):
            yield f"{phase} in the trial of compiled layers", add_parts(parts, later)

    def _forward(self, tokens: float) -> Parts:
        hidden = self.model.size * tokens * self.model.shape.hidden / (self.layout.tensor if self.layout.sequence else 1)
        layer = max(self._activations(sparse, tokens).forward for sparse in self._counts)
        logits = head_activations(self.model, tokens, self.layout.tensor).forward
        gathered = 0.0 if self.plain else self._gathered_bytes(3)
        if logits > layer:
            return {"activations": hidden, "logits": logits, "buffers": gathered}
        return {"activations": hidden + layer, "buffers": gathered}

    def _training(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        c, tokens = self.model.size, batches.train_tokens / self.layout.context
        recomputes = self.model.policy.dtensor_cfg.activation_checkpointing
        layers = {sparse: self._activations(sparse, tokens) for sparse in self._counts}
        kept_bytes = {sparse: self._kept_bytes(sparse, layer, tokens) for sparse, layer in layers.items()}
        saved_bytes = sum(count * kept_bytes[sparse] for sparse, count in self._counts.items())
        kind = next(iter(layers))
        last = layers[kind]
        again = last.saved - kept_bytes[kind] + last.input if recomputes else 0.0
        norm, of_head = (
            final_norm(self.model.shape, self._passage(tokens), False),
            head_activations(self.model, tokens, self.layout.tensor),
        )
        missing = (
            {}
            if batches.microbatches > 1 or self.offloads or self.trains_adapters
            else {"gradients": -4 * self._trained_parameters}
        )
        flying = self._in_flight()
        at_head = {"activations": saved_bytes + norm.saved, "logits": max(of_head.forward, of_head.saved + of_head.backward)}
        yield "backward of the head", add_parts(at_head, {"buffers": 0 if self.plain else self._gathered_bytes(2)}, missing)
        at_layer = {"activations": saved_bytes + again, "buffers": flying}
        yield "backward of the norm", add_parts({"activations": saved_bytes + norm.backward, "buffers": flying}, missing)
        yield "backward of the last layer", add_parts(at_layer, {"activations": last.backward}, missing)
        if recomputes and self.model.shape.layers > 1:  # while the last layer's gradients are reduced
            before = {"activations": last.backward - last.input, "buffers": self._reducing}
            yield "backward of the next-to-last layer", add_parts(at_layer, before, missing)
        if not self.plain:
            yield "reduction of the last layer", self._reduction(saved_bytes - (0 if recomputes else last.saved), missing)
            yield "reduction of the first layer", self._reduction(0.0, {})
            yield "reduction of the root", {"buffers": (2 * c + 4 + 4 / self.layout.shard) * self.root}
        yield "optimizer", {}

    def _passage(self, tokens: float) -> RankMicrobatch:
        layout = self.layout
        sequence = layout.tensor if layout.sequence else 1
        return RankMicrobatch(
            tokens,
            self.model.size,
            self.cuda,
            layout.tensor,
            sequence,
            context=layout.context,
            token_split=layout.tensor,
        )

    def _activations(self, sparse: bool, tokens: float) -> LayerActivations:
        return hugging_face_layer(self.model.shape, sparse, self._passage(tokens))

    def _kept_bytes(self, sparse: bool, layer: LayerActivations, tokens: float) -> float:
        """Return the bytes that a layer keeps from the forward to the backward pass of a microbatch of `tokens` tokens."""
        dtensor = self.model.policy.dtensor_cfg
        if not dtensor.activation_checkpointing:
            return layer.saved
        if dtensor.recompute_granularity == "full":
            return layer.input
        return selective_bytes(self.model.shape, sparse, self._passage(tokens))

    def _gathered_bytes(self, layers: int) -> float:
        """Return the bytes of the gathered weights of the root and of `layers` layers."""
        return self.model.size * (self.root + layers * self.largest)

    def _in_flight(self) -> float:
        """Return the bytes of buffers that are allocated during a layer's backward pass.

        They are the gathered weights of the layer, of the prefetched layer and of the root, and the gradient of the head.
        """
        if self.plain:
            return 0.0
        prefetched = self.model.size * self.largest if self.layout.shard > 1 else 0.0
        return self._gathered_bytes(1) + prefetched + self.model.size * self.model.output / self.layout.tensor

    def _reduction(self, saved_bytes: float, missing: Parts) -> Parts:
        """Return part -> bytes at the end of a layer's backward pass, when its gradient exists as computed and in float32."""
        part = self.model.size * self.largest
        return add_parts({"activations": saved_bytes, "buffers": self._in_flight() + part + self._reducing}, missing)

    @property
    def _reducing(self) -> float:
        """Return the bytes of a layer's gradient in float32: the whole and, if several ranks shard it, this rank's shard."""
        if self.plain:
            return 0.0
        return 4 * self.largest * (1 + 1 / self.layout.shard) if self.layout.shard > 1 else 4 * self.largest
