"""Estimate the memory of one model on one train rank, as `pipeline.train.fsdp` and `pipeline.train.megatron` allocate it.

FSDP2: all ranks shard the trained parameters, their gradients and Adam's moments, in float32. The root's parameters (embedding,
norm, head) are gathered for a whole microbatch. A layer's parameters are gathered while it computes, and the next layer's are
prefetched. Gradients are reduced in float32, one layer at a time. They stay allocated until the next step begins, and therefore
during its forward passes. A single rank in float32 without offloading runs the plain module and gathers nothing.

Megatron-Core: one buffer holds the weights in the recipe's precision, whole on every data rank. Another buffer, always
allocated, holds the gradients, in float32 with distributed_data_parallel_config.grad_reduce_in_fp32. Data and context ranks
shard the float32 main weights (of weights in half precision) and Adam's moments; ranks that hold the same experts shard those
of experts. Stage s of p keeps the activations of min(p - s, microbatches) microbatches (1F1B). Tokens are assumed to spread
evenly over experts: a rank receives as many copies as it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch.plan.activations import (
    LayerActivations,
    RankMicrobatch,
    final_norm,
    head_activations,
    hugging_face_layer,
    latent_projections,
    megatron_layer,
    selective_bytes,
)
from launch.plan.memory_parts import Parts, RankBatches, TrainModel, add_parts
from launch.plan.parallelism import Parallelism
from pipeline.config import uses_megatron

# ---- FSDP2 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FSDPMemory:
    """The memory of one model on one rank with FSDP2."""

    model: TrainModel
    layout: Parallelism
    cuda: bool

    @property
    def plain(self) -> bool:
        """Return whether the plain module runs, which gathers no weights."""
        two_precisions = self.model.trained and self.model.size < 4
        return self.layout.ranks == 1 and not two_precisions and not self.offloads

    @property
    def offloads(self) -> bool:
        """Return whether weights and optimizer state are kept in host memory."""
        return self.cuda and (self.model.policy.dtensor_cfg.cpu_offload or self.model.offload)

    @property
    def adapted(self) -> bool:
        """Return whether the model trains LoRA adapters."""
        return self.model.trained and self.model.policy.dtensor_cfg.lora_cfg.enabled

    @property
    def root(self) -> float:
        """Return the parameters of embedding, last norm and head after tensor parallelism."""
        return (self.model.table + self.model.output) / self.layout.tensor + self.model.shape.hidden

    def layer(self, sparse: bool) -> float:
        """Return the parameters of one layer after tensor parallelism. sparse: the layer is a mixture of experts."""
        shape = self.model.shape
        divided = shape.attention_layer + (shape.sparse_layer if sparse else shape.mlp_layer)
        return divided / self.layout.tensor + shape.norms_layer

    @property
    def largest(self) -> float:
        """Return the parameters of the largest layer after tensor parallelism."""
        return max(self.layer(sparse) for sparse in self._counts)

    @property
    def parameters(self) -> float:
        """Return the parameters that this rank holds."""
        layers = sum(count * self.layer(sparse) for sparse, count in self._counts.items())
        return (self.root + layers) / self.layout.data

    @property
    def adapters(self) -> float:
        """Return the parameters of adapters that this rank holds: its share of dim x (in + out) of each linear layer."""
        shape, lora = self.model.shape, self.model.policy.dtensor_cfg.lora_cfg
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = 2 * (shape.hidden + query) + 2 * (shape.hidden + key)
        mlp = 3 * (shape.hidden + shape.dense_width) if shape.dense_layers else 0
        return lora.dim * (shape.layers * attention + shape.dense_layers * mlp) / self.layout.data

    @property
    def _counts(self) -> dict[bool, int]:
        """Return the number of layers that are mixtures of experts (True) and that are dense (False), without zeros."""
        shape = self.model.shape
        return {sparse: count for sparse, count in ((True, shape.sparse_layers), (False, shape.dense_layers)) if count}

    @property
    def resident(self) -> Parts:
        """Return the bytes that are on the device all the time, gradients included."""
        if self.offloads:
            return {}
        whole = self.model.size * self.parameters
        if not self.model.trained:
            return {"weights": whole}
        if self.adapted:
            trained, merged = self.adapters, {"merged weights": whole}  # assumes that every layer has an adapter
            return {"weights": whole + 4 * trained} | merged | {"gradients": 4 * trained, "optimizer": 8 * trained}
        found = {"weights": 4 * self.parameters, "gradients": 4 * self.parameters, "optimizer": 8 * self.parameters}
        stays = self.cuda and not self.model.policy.dtensor_cfg.reference_cpu_offload
        return found | ({"other models": self.reference} if stays and self.reference else {})

    @property
    def reference(self) -> float:
        """Return the bytes of the reference policy's weights; 0 without one, or where it is the model without adapters."""
        return self.model.size * self.parameters if self.model.reference and not self.adapted else 0.0

    @property
    def host(self) -> float:
        """Return the bytes in host memory: offloaded state, and reference weights."""
        reference = 0.0 if "other models" in self.resident else self.reference
        return reference + (self.parameters * (16 if self.model.trained else self.model.size) if self.offloads else 0.0)

    def phases(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        """Yield (phase, bytes on the device besides `resident`; negative where gradients are not there yet)."""
        forward = self._forward(batches.forward_tokens)
        yield "log-probs", forward
        if self.cuda and self.reference and not self.offloads and "other models" not in self.resident:
            yield "log-probs of the reference", add_parts(forward, {"other models": self.reference})
        if self.model.trained:
            yield from self._training(batches)

    def _forward(self, tokens: float) -> Parts:
        hidden = self.model.size * tokens * self.model.shape.hidden
        layer = max(self._activations(sparse, tokens).forward for sparse in self._counts)
        logits = head_activations(self.model, tokens, self.layout.tensor).forward
        gathered = 0.0 if self.plain else self._gathered(3)
        if logits > layer:
            return {"activations": hidden, "logits": logits, "buffers": gathered}
        return {"activations": hidden + layer, "buffers": gathered}

    def _training(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        c, tokens = self.model.size, batches.train_tokens
        recomputes = self.model.policy.dtensor_cfg.activation_checkpointing
        layers = {sparse: self._activations(sparse, tokens) for sparse in self._counts}
        kept = {sparse: self._kept(sparse, layer, tokens) for sparse, layer in layers.items()}
        saved = sum(count * kept[sparse] for sparse, count in self._counts.items())
        kind = next(iter(layers))
        last = layers[kind]
        again = last.saved - kept[kind] + last.input if recomputes else 0.0
        norm, of_head = (
            final_norm(self.model.shape, self._passage(tokens), False),
            head_activations(self.model, tokens, self.layout.tensor),
        )
        missing = {} if batches.microbatches > 1 or self.offloads or self.adapted else {"gradients": -4 * self.parameters}
        flying = self._in_flight()
        at_head = {"activations": saved + norm.saved, "logits": max(of_head.forward, of_head.saved + of_head.backward)}
        yield "backward of the head", add_parts(at_head, {"buffers": 0 if self.plain else self._gathered(2)}, missing)
        at_layer = {"activations": saved + again, "buffers": flying}
        yield "backward of the norm", add_parts({"activations": saved + norm.backward, "buffers": flying}, missing)
        yield "backward of the last layer", add_parts(at_layer, {"activations": last.backward}, missing)
        if recomputes and self.model.shape.layers > 1:  # while the last layer's gradients are reduced
            before = {"activations": last.backward - last.input, "buffers": self._reducing}
            yield "backward of the layer before", add_parts(at_layer, before, missing)
        if not self.plain:
            yield "reduction of the last layer", self._reduction(saved - (0 if recomputes else last.saved), missing)
            yield "reduction of the first layer", self._reduction(0.0, {})
            yield "reduction of the root", {"buffers": (2 * c + 4 + 4 / self.layout.data) * self.root}
        yield "optimizer", {}

    def _passage(self, tokens: float) -> RankMicrobatch:
        return RankMicrobatch(tokens, self.model.size, self.cuda, self.layout.tensor, 1, self.layout.tensor)

    def _activations(self, sparse: bool, tokens: float) -> LayerActivations:
        return hugging_face_layer(self.model.shape, sparse, self._passage(tokens))

    def _kept(self, sparse: bool, layer: LayerActivations, tokens: float) -> float:
        """Return the bytes that a layer of `tokens` keeps from the forward pass to the backward pass."""
        dtensor = self.model.policy.dtensor_cfg
        if not dtensor.activation_checkpointing:
            return layer.saved
        if dtensor.recompute_granularity == "full":
            return layer.input
        return selective_bytes(self.model.shape, sparse, self._passage(tokens))

    def _gathered(self, layers: int) -> float:
        """Return the bytes of the root's and some layers' gathered weights."""
        return self.model.size * (self.root + layers * self.largest)

    def _in_flight(self) -> float:
        """Return the bytes of gathered weights of a layer, the next one and the root, and of the head's gradient.

        All of them are allocated during a layer's backward pass.
        """
        if self.plain:
            return 0.0
        prefetched = self.model.size * self.largest if self.layout.data > 1 else 0.0
        return self._gathered(1) + prefetched + self.model.size * self.model.output / self.layout.tensor

    def _reduction(self, saved: float, missing: Parts) -> Parts:
        """Return the bytes at the end of a layer's backward pass: its gradient as computed, and the float32 one."""
        own = self.model.size * self.largest
        return add_parts({"activations": saved, "buffers": self._in_flight() + own + self._reducing}, missing)

    @property
    def _reducing(self) -> float:
        """Return the bytes of a layer's gradient in float32: this rank's shard and, with several data ranks, the whole."""
        if self.plain:
            return 0.0
        return 4 * self.largest * (1 + 1 / self.layout.data) if self.layout.data > 1 else 4 * self.largest


# ---- Megatron-Core ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageLayers:
    """A pipeline stage: its number of layers of each kind, and whether it is the first or the last."""

    number: int
    dense: int
    sparse: int
    first: bool
    last: bool

    @property
    def layers(self) -> int:
        """Return the number of layers of the stage."""
        return self.dense + self.sparse


def stages(model: TrainModel) -> list[StageLayers]:
    """Return the stages as Megatron-Core divides the layers. Dense layers are assumed to come first."""
    settings, shape = model.policy.megatron_cfg, model.shape
    size = settings.pipeline_model_parallel_size
    ends = {0: settings.num_layers_in_first_pipeline_stage, size - 1: settings.num_layers_in_last_pipeline_stage}
    given = {number: count for number, count in ends.items() if count is not None}
    middle = (shape.layers - sum(given.values())) // max(1, size - len(given))
    found, done = [], 0
    for number in range(size):
        count = given.get(number, middle)
        dense = max(0, min(shape.dense_layers - done, count))
        found.append(StageLayers(number, dense, count - dense, number == 0, number == size - 1))
        done += count
    return found


@dataclass(frozen=True)
class MegatronMemory:
    """The memory of one model on one rank of a pipeline stage with Megatron-Core."""

    model: TrainModel
    layout: Parallelism
    cuda: bool
    stage: StageLayers

    @property
    def dense_parameters(self) -> float:
        """Return the parameters outside of routed experts. Every rank holds whole norms and routers."""
        shape, stage, tensor, whole = (
            self.model.shape,
            self.stage,
            self.layout.tensor,
            latent_projections(self.model.shape),
        )
        total = stage.layers * ((shape.attention_layer - whole) / tensor + whole + shape.norms_layer)
        total += stage.dense * shape.mlp_layer / tensor
        total += stage.sparse * (shape.shared_layer / tensor + shape.router_layer)
        if stage.first:
            total += self._rows * shape.hidden
        if stage.last:
            total += shape.hidden + self._head
        return total

    @property
    def _head(self) -> float:
        """Return the head's own parameters. A tied head has a copy of the embedding if that is on another stage."""
        if self.model.values:
            return self.model.shape.hidden
        tied = not self.model.output
        return 0.0 if tied and self.stage.first else self._rows * self.model.shape.hidden

    @property
    def _rows(self) -> int:
        """Return the rows of the vocabulary on this rank."""
        return -(-self.model.shape.vocabulary // self.layout.tensor)

    @property
    def expert_parameters(self) -> float:
        """Return the parameters of routed experts on this rank."""
        return self.stage.sparse * self.model.shape.routed_layer / (self.layout.expert * self.layout.expert_tensor)

    @property
    def weights(self) -> float:
        """Return the bytes of the weights in the compute precision."""
        return self.model.size * (self.dense_parameters + self.expert_parameters)

    @property
    def resident(self) -> Parts:
        """Return the bytes that are on the device all the time, gradients included."""
        settings, c = self.model.policy.megatron_cfg, self.model.size
        if not self.model.trained:
            return {} if self._offloads else {"weights": self.weights}
        dense, experts = self.dense_parameters, self.expert_parameters
        dense -= self.stage.sparse * self.model.shape.router_layer if settings.freeze_moe_router else 0.0
        share = dense / (self.layout.data * self.layout.context) + experts / self.layout.expert_data
        in_float32 = settings.distributed_data_parallel_config.grad_reduce_in_fp32
        return {
            "weights": self.weights + (4 * share if c < 4 else 0.0),
            "gradients": (4 if in_float32 else c) * (dense + experts),
            "optimizer": 8 * share,
        }

    @property
    def _offloads(self) -> bool:
        return self.model.offload and self.cuda

    @property
    def host(self) -> float:
        """Return the bytes in host memory: an offloaded model, and reference weights."""
        # With a reference, also the policy's weights while the reference computes.
        return self.weights * (2 * self.model.reference + self._offloads)

    def phases(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        """Yield (phase, bytes on the device besides `resident`; negative where gradients are not there yet)."""
        yield "log-probs", self._forward(batches.forward_tokens)
        if self.model.trained:
            yield from self._training(batches)

    def _forward(self, tokens: float) -> Parts:
        microbatch = self._passage(tokens)
        hidden = self.model.size * microbatch.tokens * self.model.shape.hidden
        layer = max((one.forward for one in self._layers(microbatch).values()), default=0.0)
        loaded = {"buffers": self.weights} if self._offloads else {}
        if self.stage.last and (logits := head_activations(self.model, microbatch.tokens, self.layout.tensor).forward) > layer:
            return add_parts({"activations": hidden, "logits": logits}, loaded)
        return add_parts({"activations": hidden + layer}, loaded)

    def _training(self, batches: RankBatches) -> Iterator[tuple[str, Parts]]:
        shape, microbatch = self.model.shape, self._passage(batches.train_tokens)
        layers = self._layers(microbatch)
        flying = min(self.layout.pipeline - self.stage.number, batches.microbatches)
        counts = {True: self.stage.sparse, False: self.stage.dense}
        kept = sum(counts[sparse] * self._kept(layer) for sparse, layer in layers.items())
        last, again = next(iter(layers.values())), self._again(layers)
        hidden = self.model.size * microbatch.tokens * shape.hidden
        saved = flying * kept + (flying * hidden / microbatch.sequence if self.layout.pipeline > 1 else 0.0)
        if self.stage.last:
            of_head, norm = (
                head_activations(self.model, microbatch.tokens, self.layout.tensor),
                final_norm(shape, microbatch, self.cuda),
            )
            work = max(of_head.forward, of_head.saved + of_head.backward)
            yield "backward of the head", {"activations": saved + norm.saved, "logits": work}
            yield "backward of the norm", {"activations": saved + norm.backward + (norm.saved if self.cuda else 0.0)}
        yield "backward of the last layer", {"activations": saved + again + last.backward}
        if self.stage.first:
            gradient = self.model.size * self._rows * shape.hidden  # gradient of the embedding table, unsharded
            yield "backward of the embedding", {"activations": (flying - 1) * kept + hidden, "buffers": gradient}
        yield "optimizer", {}

    def _passage(self, tokens: float) -> RankMicrobatch:
        sequence = self.layout.tensor if self.layout.sequence else 1
        experts = max(1, self.model.shape.experts // self.layout.expert)
        local = tokens / self.layout.context
        return RankMicrobatch(
            local, self.model.size, self.cuda, self.layout.tensor, sequence, self.layout.expert_tensor, experts
        )

    def _layers(self, microbatch: RankMicrobatch) -> dict[bool, LayerActivations]:
        """Return the activations of a mixture of experts (True) and of a dense layer (False), for the kinds in this stage."""
        kinds = ((True, self.stage.sparse), (False, self.stage.dense))
        return {sparse: megatron_layer(self.model.shape, sparse, microbatch) for sparse, count in kinds if count}

    @property
    def _recomputes(self) -> bool:
        """Return whether layers are recomputed.

        Selective recomputation of core attention keeps as much as flash attention does; other modules are not counted.
        """
        settings = self.model.policy.megatron_cfg
        return settings.activation_checkpointing and settings.recompute_granularity != "selective"

    def _kept(self, layer: LayerActivations) -> float:
        """Return the bytes that a layer keeps from the forward pass to the backward pass."""
        settings = self.model.policy.megatron_cfg
        if not self._recomputes:
            return layer.saved
        several = settings.recompute_num_layers or 1
        if settings.recompute_method == "block":
            recomputed = min(1.0, several / max(1, self.stage.layers))
            return recomputed * layer.input + (1 - recomputed) * layer.saved
        return layer.input / several

    def _again(self, layers: dict[bool, LayerActivations]) -> float:
        """Return the bytes of the activations that are recomputed at one time."""
        settings = self.model.policy.megatron_cfg
        if not self._recomputes:
            return 0.0
        largest = max(layer.saved for layer in layers.values())
        return largest * (1 if settings.recompute_method == "block" else settings.recompute_num_layers or 1)


ModelMemory = FSDPMemory | MegatronMemory


def stage_memories(model: TrainModel, layout: Parallelism, cuda: bool) -> list[ModelMemory]:
    """Return the model on a rank of each pipeline stage."""
    if not uses_megatron(model.policy):
        return [FSDPMemory(model, layout, cuda)]
    return [MegatronMemory(model, layout, cuda, stage) for stage in stages(model)]
