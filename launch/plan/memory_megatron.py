"""Memory of a rank that trains with Megatron-Core, as `pipeline.train.megatron` holds things.

Weights are in the recipe's precision, in one buffer, whole on every data rank; gradients in another, float32 with
distributed_data_parallel_config.grad_reduce_in_fp32. Main weights in float32 (of weights in half precision) and Adam's moments
are cut over data and context ranks, those of experts over the ranks that hold the same experts. Gradients' memory is there all
the time. Stage s of p keeps the activations of min(p - s, microbatches) microbatches (1F1B); the fullest stage counts.

Tokens are taken to spread evenly over experts: a rank receives as many copies as it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch.plan.activations import Layer, Passage, final_norm, latent_projections, megatron
from launch.plan.cut import Cut
from launch.plan.memory_head import head
from launch.plan.memory_load import Load, Model
from launch.plan.memory_parts import Parts, add


@dataclass(frozen=True, slots=True)
class Stage:
    """Of the pipeline: how many layers of each kind, and which ends."""

    number: int
    dense: int
    sparse: int
    first: bool
    last: bool

    def count(self, sparse: bool) -> int:
        return self.sparse if sparse else self.dense


def stages(model: Model) -> list[Stage]:
    """As Megatron-Core divides layers; those with an MLP are taken to come first."""
    megatron_cfg, shape = model.policy.megatron_cfg, model.shape
    size = megatron_cfg.pipeline_model_parallel_size
    first, last = megatron_cfg.num_layers_in_first_pipeline_stage, megatron_cfg.num_layers_in_last_pipeline_stage
    given = {0: first} if first is not None else {}
    if last is not None:
        given[size - 1] = last
    middle = (shape.layers - sum(given.values())) // max(1, size - len(given))
    found, done = [], 0
    for number in range(size):
        count = given.get(number, middle)
        dense = max(0, min(shape.dense_layers - done, count))
        found.append(Stage(number, dense, count - dense, number == 0, number == size - 1))
        done += count
    return found


@dataclass(frozen=True)
class Megatron:
    """One model on one rank of one stage."""

    model: Model
    cut: Cut
    cuda: bool
    stage: Stage

    # ---- parameters -----------------------------------------------------------------------------------------------------

    @property
    def dense_parameters(self) -> float:
        """All but experts: norms and routers are whole on every rank."""
        shape, tensor = self.model.shape, self.cut.tensor
        layers = self.stage.dense + self.stage.sparse
        norms = shape.largest_layer - shape.attention_layer - max(shape.sparse_layer, shape.mlp_layer)
        shared = 3 * shape.hidden * shape.shared_width
        whole = latent_projections(shape)
        total = layers * ((shape.attention_layer - whole) / tensor + whole + norms)
        total += self.stage.dense * shape.mlp_layer / tensor
        total += self.stage.sparse * (shared / tensor + self._router)
        if self.stage.first:
            total += self._rows * shape.hidden
        if self.stage.last:
            total += shape.hidden + self.head_parameters
        return total

    @property
    def head_parameters(self) -> float:
        """Of the last stage, besides the embedding. One that is tied to it is there twice if that is on another stage."""
        if self.model.values:
            return self.model.shape.hidden
        tied = not self.model.output
        return 0.0 if tied and self.stage.first else self._rows * self.model.shape.hidden

    @property
    def _rows(self) -> int:
        """Of the vocabulary."""
        return -(-self.model.shape.vocabulary // self.cut.tensor)

    @property
    def _router(self) -> float:
        shape = self.model.shape
        if not shape.sparse_layers:
            return 0.0
        return shape.sparse_layer - 3 * shape.hidden * shape.shared_width - shape.routed / shape.sparse_layers

    @property
    def expert_parameters(self) -> float:
        shape = self.model.shape
        if not shape.sparse_layers:
            return 0.0
        return self.stage.sparse * shape.routed / shape.sparse_layers / (self.cut.expert * self.cut.expert_tensor)

    # ---- what lies there all the time -----------------------------------------------------------------------------------

    @property
    def resident(self) -> Parts:
        dense, experts, c = self.dense_parameters, self.expert_parameters, self.model.size
        weights = c * (dense + experts)
        if not self.model.trained:
            return {} if self.model.offload and self.cuda else {"weights": weights}
        frozen = self.stage.sparse * self._router if self.model.policy.megatron_cfg.freeze_moe_router else 0.0
        dense -= frozen
        share = dense / (self.cut.data * self.cut.context) + experts / self.cut.expert_data
        settings = self.model.policy.megatron_cfg.distributed_data_parallel_config
        gradients = (4 if settings.grad_reduce_in_fp32 else c) * (dense + experts)
        return {
            "weights": weights + (4 * share if c < 4 else 0.0),
            "gradients": gradients,
            "optimizer": 8 * share,
        }

    @property
    def host(self) -> float:
        """Reference weights; while those are used, the policy's too; and an offloaded model's."""
        weights = self.model.size * (self.dense_parameters + self.expert_parameters)
        return weights * (2 * self.model.reference + (self.model.offload and self.cuda))

    # ---- phases ---------------------------------------------------------------------------------------------------------

    def passage(self, tokens: float) -> Passage:
        sequence = self.cut.tensor if self.cut.sequence else 1
        local = tokens / self.cut.context
        experts = max(1, self.model.shape.experts // self.cut.expert)
        return Passage(local, self.model.size, self.cuda, self.cut.tensor, sequence, self.cut.expert_tensor, experts)

    def of_layer(self, sparse: bool, tokens: float) -> Layer:
        return megatron(self.model.shape, sparse, self.passage(tokens))

    @property
    def _kinds(self) -> list[bool]:
        return [sparse for sparse in (True, False) if self.stage.count(sparse)]

    def phases(self, load: Load) -> Iterator[tuple[str, Parts]]:
        """(what happens, bytes on the device besides `resident`)"""
        yield "log-probs", self._forward(load.forward_tokens)
        if self.model.trained:
            yield from self._training(load)

    def _forward(self, tokens: float) -> Parts:
        passage = self.passage(tokens)
        hidden = self.model.size * passage.tokens * self.model.shape.hidden
        layer = max((self.of_layer(sparse, tokens).forward for sparse in self._kinds), default=0.0)
        loaded = self.model.offload and self.cuda
        whole = {"buffers": self.model.size * (self.dense_parameters + self.expert_parameters)} if loaded else {}
        if self.stage.last:
            of_head = head(self.model, passage.tokens, self.cut.tensor)
            if of_head.forward > layer:
                return add({"activations": hidden, "logits": of_head.forward}, whole)
        return add({"activations": hidden + layer}, whole)

    def _training(self, load: Load) -> Iterator[tuple[str, Parts]]:
        shape, passage = self.model.shape, self.passage(load.train_tokens)
        layers = {sparse: self.of_layer(sparse, load.train_tokens) for sparse in self._kinds}
        flying = min(self.cut.pipeline - self.stage.number, load.microbatches)
        kept = sum(self.stage.count(sparse) * self._kept(layer) for sparse, layer in layers.items())
        last, again = layers[self._kinds[0]], self._again(layers)
        hidden = self.model.size * passage.tokens * shape.hidden
        saved = flying * kept + (flying * hidden / passage.sequence if self.cut.pipeline > 1 else 0.0)
        if self.stage.last:
            of_head = head(self.model, passage.tokens, self.cut.tensor)
            norm = final_norm(shape, passage, self.cuda)
            work = max(of_head.forward, of_head.saved + of_head.backward)
            yield "backward of the head", {"activations": saved + norm.saved, "logits": work}
            yield "backward of the norm", {"activations": saved + norm.backward + (norm.saved if self.cuda else 0.0)}
        yield "backward of the last layer", {"activations": saved + again + last.backward}
        if self.stage.first:
            table = self.model.size * self._rows * shape.hidden  # its gradient, whole
            yield "backward of the embedding", {"activations": (flying - 1) * kept + hidden, "buffers": table}
        yield "optimizer", {}

    def _kept(self, layer: Layer) -> float:
        """Of a layer, by the recipe's recomputation. Selective recomputation of the attention's core keeps what flash
        attention keeps anyway; other modules are not looked at."""
        settings = self.model.policy.megatron_cfg
        if not settings.activation_checkpointing or settings.recompute_granularity == "selective":
            return layer.saved
        several = settings.recompute_num_layers or 1
        if settings.recompute_method == "block":
            layers = self.stage.dense + self.stage.sparse
            recomputed = min(1.0, several / max(1, layers))
            return recomputed * layer.input + (1 - recomputed) * layer.saved
        return layer.input / several

    def _again(self, layers: dict[bool, Layer]) -> float:
        """What is recomputed at a time."""
        settings = self.model.policy.megatron_cfg
        if not settings.activation_checkpointing or settings.recompute_granularity == "selective":
            return 0.0
        largest = max(layer.saved for layer in layers.values())
        return largest * (1 if settings.recompute_method == "block" else settings.recompute_num_layers or 1)
