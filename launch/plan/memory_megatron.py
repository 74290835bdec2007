"""Estimate the memory of one model on one rank with Megatron-Core, as `pipeline.train.megatron` allocates it.

One buffer holds the weights in the recipe's precision, whole on every data rank. Another buffer, which is always allocated,
holds the gradients: in float32 with distributed_data_parallel_config.grad_reduce_in_fp32, else in the recipe's precision. Data
and context ranks shard Adam's moments and, if the weights have half precision, float32 main weights. For experts, the ranks
that hold the same experts shard both. Stage s of p keeps the activations of min(p - s, microbatches) microbatches (1F1B).
Tokens are assumed to spread evenly over experts, so that a rank receives as many copies of tokens as it sends.
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
    latent_projections,
    megatron_layer,
)
from launch.plan.memory_parts import Parts, RankBatches, TrainModel, add_parts
from launch.plan.rank_division import Parallelism
from pipeline.train.adapters.modules import adapts_experts


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


def stages(model: TrainModel) -> list[StageLayers]:
    """Return the pipeline stages of a model, with layers divided as by Megatron-Core."""
    settings, shape = model.policy.megatron_cfg, model.shape
    size = settings.pipeline_model_parallel_size
    ends = {0: settings.num_layers_in_first_pipeline_stage, size - 1: settings.num_layers_in_last_pipeline_stage}
    layer_counts = {number: count for number, count in ends.items() if count is not None}
    middle = (shape.layers - sum(layer_counts.values())) // max(1, size - len(layer_counts))
    stage_layers, start = [], 0
    for number in range(size):
        count = layer_counts.get(number, middle)
        sparse = sum(shape.sparse[start : start + count])
        stage_layers.append(StageLayers(number, count - sparse, sparse, number == 0, number == size - 1, start))
        start += count
    return stage_layers


@dataclass(frozen=True)
class MegatronMemory:
    """The memory of one model on one rank of a pipeline stage with Megatron-Core."""

    model: TrainModel
    layout: Parallelism
    cuda: bool
    stage: StageLayers

    @property
    def dense_parameters(self) -> float:
        """Return the number of parameters on this rank outside of routed experts. Every rank holds whole norms and routers."""
        shape, stage, tensor, undivided = (
            self.model.shape,
            self.stage,
            self.layout.tensor,
            latent_projections(self.model.shape),
        )
        total = stage.layers * ((shape.attention_layer - undivided) / tensor + undivided + shape.norms_layer)
        total += stage.dense * shape.mlp_layer / tensor
        total += stage.sparse * (shape.shared_layer / tensor + shape.router_layer)
        if stage.first:
            total += self._rows * shape.hidden
        if stage.last:
            total += shape.hidden + self._head
        return total

    @property
    def _head(self) -> float:
        """Return the number of parameters that the head adds to the stage.

        A tied head adds none if the stage has the embedding. On another stage it is a copy of the embedding.
        """
        if self.model.values:
            return self.model.shape.hidden
        tied = not self.model.output
        return 0.0 if tied and self.stage.first else self._rows * self.model.shape.hidden

    @property
    def _rows(self) -> int:
        """Return the number of the vocabulary's rows on this rank."""
        return -(-self.model.shape.vocabulary // self.layout.tensor)

    @property
    def expert_parameters(self) -> float:
        """Return the number of parameters of routed experts on this rank."""
        return self.stage.sparse * self.model.shape.routed_layer / (self.layout.expert * self.layout.expert_tensor)

    @property
    def weights(self) -> float:
        """Return the bytes of this rank's weights in the compute precision."""
        return self.model.size * (self.dense_parameters + self.expert_parameters)

    @property
    def resident(self) -> Parts:
        """Return part -> bytes that are on the device in all phases, including the gradients."""
        settings, c = self.model.policy.megatron_cfg, self.model.size
        if not self.model.trained:
            return {} if self._offloads else {"weights": self.weights}
        dense, experts = self.dense_parameters, self.expert_parameters
        router = self.model.shape.hidden * self.model.shape.experts
        dense -= self.stage.sparse * router if settings.freeze_moe_router else 0.0
        of_stage = range(self.stage.start, self.stage.start + self.stage.layers)
        fixed = frozen_counts.of_stage(self.model, self.layout, of_stage, self.stage.first, self.stage.last)
        dense, experts = dense - fixed[0], experts - fixed[1]
        if adapted := settings.peft.enabled:
            dense, experts = self._adapters(settings.peft.dim)
        share = dense / (self.layout.data * self.layout.context) + experts / self.layout.expert_data
        in_float32 = settings.distributed_data_parallel_config.grad_reduce_in_fp32
        adapter_bytes = c * (dense + experts) if adapted else 0.0
        merged = {"merged weights": self._merged_bytes} if adapted and self.model.merged else {}
        return {
            "weights": self.weights + adapter_bytes + (4 * share if c < 4 else 0.0),
            **merged,
            "gradients": (4 if in_float32 else c) * (dense + experts),
            "optimizer": 8 * share,
        }

    def _adapters(self, dim: int) -> tuple[float, float]:
        """Return numbers of adapters' parameters on this rank: (outside of routed experts, in routed experts).

        dim: the rank of the adapters. Tensor parallelism cuts one of A and B, as it cuts the layer; the other is whole on every
        rank.
        """
        shape, stage, tensor = self.model.shape, self.stage, self.layout.tensor
        heads = shape.heads + 2 * shape.kv_heads
        attention = 2 * shape.hidden + (heads + shape.heads) * shape.head_dim / tensor

        def mlp(width: float, parts: int) -> float:
            return 2 * shape.hidden + 3 * width / parts if width else 0.0

        dense = stage.layers * attention + stage.dense * mlp(shape.dense_width, tensor)
        dense += stage.sparse * mlp(shape.shared_width, tensor)
        experts = stage.sparse * shape.experts / self.layout.expert * mlp(shape.expert_width, self.layout.expert_tensor)
        return dim * dense, dim * experts * self._adapts_experts

    @property
    def _adapts_experts(self) -> bool:
        stage = range(self.stage.start, self.stage.start + self.stage.layers)
        return adapts_experts(self.model.policy.megatron_cfg.peft, stage)

    @property
    def _merged_bytes(self) -> float:
        """Return the bytes of merged weights: all outside of routed experts, and routed experts if these have adapters."""
        return self.model.size * (self.dense_parameters + self.expert_parameters * self._adapts_experts)

    @property
    def _offloads(self) -> bool:
        return self.model.offload and self.cuda

    @property
    def _keeps_reference(self) -> bool:
        """Return whether reference weights are in host memory. With adapters they are not: the base model is the reference."""
        return self.model.reference and not (self.model.trained and self.model.policy.megatron_cfg.peft.enabled)

    @property
    def host(self) -> float:
        """Return the bytes in host memory: an offloaded model, and reference weights."""
        return self.weights * (self._keeps_reference + self._offloads)

    def phases(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        """Yield (phase, part -> bytes on the device in addition to `resident`)."""
        yield "log-probs", self._forward(batches.forward_tokens, loads=self._offloads)
        if self._keeps_reference:  # on a GPU it computes beside the policy's weights
            yield "log-probs of the reference", self._forward(batches.forward_tokens, loads=self.cuda)
        if self.model.trained:
            yield from self._training(batches)

    def _forward(self, tokens: float, loads: bool) -> Parts:
        """Return part -> bytes of a forward pass. loads: whether its weights are copied from the host into a buffer."""
        microbatch = self._passage(tokens)
        hidden = self.model.size * microbatch.tokens * self.model.shape.hidden
        layer = max((layer_activations.forward for layer_activations in self._layers(microbatch).values()), default=0.0)
        weight_buffer = {"buffers": self.weights} if loads else {}
        if self.stage.last and (logits := head_activations(self.model, microbatch.tokens, self.layout.tensor).forward) > layer:
            return add_parts({"activations": hidden, "logits": logits}, weight_buffer)
        return add_parts({"activations": hidden + layer}, weight_buffer)

    def _training(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        shape, microbatch = self.model.shape, self._passage(batches.train_tokens)
        layers = self._layers(microbatch)
        flying = min(self.layout.pipeline - self.stage.number, batches.microbatches)
        counts = {True: self.stage.sparse, False: self.stage.dense}
        kept_bytes = sum(counts[sparse] * self._kept_bytes(layer) for sparse, layer in layers.items())
        last, again = next(iter(layers.values())), self._again(layers)
        hidden = self.model.size * microbatch.tokens * shape.hidden
        saved_bytes = flying * kept_bytes + (flying * hidden / microbatch.sequence if self.layout.pipeline > 1 else 0.0)
        if self.stage.last:
            of_head, norm = (
                head_activations(self.model, microbatch.tokens, self.layout.tensor),
                final_norm(shape, microbatch, self.cuda),
            )
            work = max(of_head.forward, of_head.saved + of_head.backward)
            yield "backward of the head", {"activations": saved_bytes + norm.saved, "logits": work}
            yield "backward of the norm", {"activations": saved_bytes + norm.backward + (norm.saved if self.cuda else 0.0)}
        yield "backward of the last layer", {"activations": saved_bytes + again + last.backward}
        if self.stage.first:
            gradient = self.model.size * self._rows * shape.hidden  # gradient of the embedding table, unsharded
            yield "backward of the embedding", {"activations": (flying - 1) * kept_bytes + hidden, "buffers": gradient}
        yield "optimizer", {}

    def _passage(self, tokens: float) -> RankMicrobatch:
        sequence = self.layout.tensor if self.layout.sequence else 1
        experts = max(1, self.model.shape.experts // self.layout.expert)
        local = tokens / self.layout.context
        return RankMicrobatch(
            local, self.model.size, self.cuda, self.layout.tensor, sequence, self.layout.expert_tensor, experts
        )

    def _layers(self, microbatch: RankMicrobatch) -> dict[bool, LayerActivations]:
        """Return whether a layer is a mixture of experts -> its activations, for the kinds of layers in this stage."""
        kinds = ((True, self.stage.sparse), (False, self.stage.dense))
        return {sparse: megatron_layer(self.model.shape, sparse, microbatch) for sparse, count in kinds if count}

    @property
    def _recomputes(self) -> bool:
        """Return whether whole layers are recomputed.

        Selective recomputation counts as none: of core attention it saves nothing, since flash attention keeps as little, and
        the savings of other modules are not counted.
        """
        settings = self.model.policy.megatron_cfg
        return settings.activation_checkpointing is True and settings.recompute_granularity != "selective"

    def _kept_bytes(self, layer: LayerActivations) -> float:
        """Return the mean bytes that a layer keeps from the forward pass to the backward pass."""
        settings = self.model.policy.megatron_cfg
        if not self._recomputes:
            return layer.saved
        several = settings.recompute_num_layers or 1
        if settings.recompute_method == "block":
            recomputed = min(1.0, several / max(1, self.stage.layers))
            return recomputed * layer.input + (1 - recomputed) * layer.saved
        return layer.input / several

    def _again(self, layers: dict[bool, LayerActivations]) -> float:
        """Return the bytes of recomputed activations that exist at the same time."""
        settings = self.model.policy.megatron_cfg
        if not self._recomputes:
            return 0.0
        largest = max(layer.saved for layer in layers.values())
        return largest * (1 if settings.recompute_method == "block" else settings.recompute_num_layers or 1)
