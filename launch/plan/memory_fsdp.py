"""Memory of a rank that trains with FSDP2, as `pipeline.train.fsdp` holds things.

Trained parameters, their gradients and Adam's moments are float32, cut over all ranks. The root's parameters (embedding, norm,
head) are gathered for a whole microbatch, a layer's for as long as it computes and the next one's ahead of time. Gradients are
summed in float32, one layer at a time. They stay until the next step begins, so forward passes find them there. On one rank
without offloading, in float32, the plain module runs: nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launch.plan.activations import Layer, Passage, final_norm, hugging_face, selected
from launch.plan.cut import Cut
from launch.plan.memory_head import head
from launch.plan.memory_load import Load, Model
from launch.plan.memory_parts import Parts, add


@dataclass(frozen=True)
class FSDP:
    """One model on one rank."""

    model: Model
    cut: Cut
    cuda: bool

    # ---- parameters -----------------------------------------------------------------------------------------------------

    @property
    def plain(self) -> bool:
        """Return whether nothing is gathered."""
        two_precisions = self.model.trained and self.model.size < 4
        return self.cut.ranks == 1 and not two_precisions and not self.offloads

    @property
    def offloads(self) -> bool:
        return self.cuda and (self.model.policy.dtensor_cfg.cpu_offload or self.model.offload)

    @property
    def adapted(self) -> bool:
        return self.model.trained and self.model.policy.dtensor_cfg.lora_cfg.enabled

    @property
    def root(self) -> float:
        """Return the number of parameters of embedding, last norm and head after tensor parallelism."""
        return (self.model.table + self.model.output) / self.cut.tensor + self.model.shape.hidden

    def layer(self, sparse: bool) -> float:
        shape = self.model.shape
        cut = shape.attention_layer + (shape.sparse_layer if sparse else shape.mlp_layer)
        return cut / self.cut.tensor + (shape.largest_layer - shape.attention_layer - max(shape.sparse_layer, shape.mlp_layer))

    @property
    def largest(self) -> float:
        shape = self.model.shape
        return max(self.layer(True) if shape.sparse_layers else 0, self.layer(False) if shape.dense_layers else 0)

    @property
    def parameters(self) -> float:
        """Return how many parameters this rank holds."""
        shape = self.model.shape
        whole = self.root + shape.sparse_layers * self.layer(True) + shape.dense_layers * self.layer(False)
        return whole / self.cut.data

    @property
    def adapters(self) -> float:
        """Return how many parameters of adapters this rank holds: its share of dim x (in + out) of each linear layer."""
        shape, lora = self.model.shape, self.model.policy.dtensor_cfg.lora_cfg
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        attention = 2 * (shape.hidden + query) + 2 * (shape.hidden + key)
        mlp = 3 * (shape.hidden + shape.dense_width) if shape.dense_layers else 0
        return lora.dim * (shape.layers * attention + shape.dense_layers * mlp) / self.cut.data

    # ---- what lies there all the time -----------------------------------------------------------------------------------

    @property
    def resident(self) -> Parts:
        """Return the bytes on the device, gradients included."""
        if self.offloads:
            return {}
        if not self.model.trained:
            return {"weights": self.model.size * self.parameters}
        if self.adapted:
            trained, whole = self.adapters, self.model.size * self.parameters
            return {
                "weights": whole + 4 * trained,
                "merged weights": whole,  # as if everything were adapted
                "gradients": 4 * trained,
                "optimizer": 8 * trained,
            }
        held = {"weights": 4 * self.parameters, "gradients": 4 * self.parameters, "optimizer": 8 * self.parameters}
        stays = self.cuda and not self.model.policy.dtensor_cfg.reference_cpu_offload
        return held | ({"other models": self.reference} if stays and self.reference else {})

    @property
    def reference(self) -> float:
        return self.model.size * self.parameters if self.model.reference and not self.adapted else 0.0

    @property
    def host(self) -> float:
        """Return the bytes in host memory: of what is offloaded, and of reference weights."""
        reference = 0.0 if "other models" in self.resident else self.reference
        return reference + (self.parameters * (16 if self.model.trained else self.model.size) if self.offloads else 0.0)

    # ---- phases ---------------------------------------------------------------------------------------------------------

    def passage(self, tokens: float) -> Passage:
        return Passage(tokens, self.model.size, self.cuda, self.cut.tensor, 1, self.cut.tensor)

    def of_layer(self, sparse: bool, tokens: float) -> Layer:
        return hugging_face(self.model.shape, sparse, self.passage(tokens))

    def phases(self, load: Load) -> Iterator[tuple[str, Parts]]:
        """Yield (what happens, bytes on the device besides `resident`; negative where gradients are not there yet)."""
        forward = self._forward(load.forward_tokens)
        yield "log-probs", forward
        if self.cuda and self.reference and not self.offloads and "other models" not in self.resident:
            yield "log-probs of the reference", add(forward, {"other models": self.reference})
        if self.model.trained:
            yield from self._training(load)

    def _forward(self, tokens: float) -> Parts:
        shape, c = self.model.shape, self.model.size
        layer = max(self.of_layer(sparse, tokens).forward for sparse in self._kinds)
        of_head = head(self.model, tokens, self.cut.tensor)
        hidden = c * tokens * shape.hidden
        gathered = self._gathered(3) if not self.plain else 0.0
        if of_head.forward > layer:
            return {"activations": hidden, "logits": of_head.forward, "buffers": gathered}
        return {"activations": hidden + layer, "buffers": gathered}

    @property
    def _kinds(self) -> list[bool]:
        shape = self.model.shape
        return [sparse for sparse, count in ((True, shape.sparse_layers), (False, shape.dense_layers)) if count]

    def _gathered(self, layers: int) -> float:
        return self.model.size * (self.root + layers * self.largest)

    def _training(self, load: Load) -> Iterator[tuple[str, Parts]]:
        shape, c, tokens = self.model.shape, self.model.size, load.train_tokens
        recomputes = self.model.policy.dtensor_cfg.activation_checkpointing
        layers = {sparse: self.of_layer(sparse, tokens) for sparse in self._kinds}
        counts = {True: shape.sparse_layers, False: shape.dense_layers}
        last = layers[self._kinds[0]]
        norm, of_head = final_norm(shape, self.passage(tokens), False), head(self.model, tokens, self.cut.tensor)
        kept = {sparse: self._kept(sparse, layer, tokens) for sparse, layer in layers.items()}
        saved = sum(counts[sparse] * kept[sparse] for sparse in layers)
        again = last.saved - kept[self._kinds[0]] + last.input if recomputes else 0.0
        missing = {} if load.microbatches > 1 or self.offloads or self.adapted else {"gradients": -4 * self.parameters}
        flying = self._in_flight()
        at_head = {"activations": saved + norm.saved, "logits": max(of_head.forward, of_head.saved + of_head.backward)}
        yield "backward of the head", add(at_head, {"buffers": 0 if self.plain else self._gathered(2)}, missing)
        held = {"activations": saved + again, "buffers": flying}
        yield "backward of the norm", add({"activations": saved + norm.backward, "buffers": flying}, missing)
        yield "backward of the last layer", add(held, {"activations": last.backward}, missing)
        if recomputes and shape.layers > 1:  # the layer behind it is being reduced
            before = {"activations": last.backward - last.input, "buffers": self._reducing}
            yield "backward of the layer before", add(held, before, missing)
        if not self.plain:
            yield "reduction of the last layer", self._reduction(saved - (0 if recomputes else last.saved), missing)
            yield "reduction of the first layer", self._reduction(0.0, {})
            yield "reduction of the root", {"buffers": (2 * c + 4 + 4 / self.cut.data) * self.root}
        yield "optimizer", {}

    def _kept(self, sparse: bool, layer: Layer, tokens: float) -> float:
        """Return the bytes that a layer of `tokens` keeps from the forward pass to the backward pass."""
        dtensor = self.model.policy.dtensor_cfg
        if not dtensor.activation_checkpointing:
            return layer.saved
        if dtensor.recompute_granularity == "full":
            return layer.input
        return selected(self.model.shape, sparse, self.passage(tokens))

    def _in_flight(self) -> float:
        """Return the bytes of gathered weights, a layer's, the next one's and the root's, and of the head's gradient.

        All of them are there while a layer goes backward.
        """
        if self.plain:
            return 0.0
        prefetched = self.model.size * self.largest if self.cut.data > 1 else 0.0
        return self._gathered(1) + prefetched + self.model.size * self.model.output / self.cut.tensor

    def _reduction(self, saved: float, missing: Parts) -> Parts:
        """Return the bytes at the end of a layer's backward pass: its gradient as computed and in float32, whole and cut."""
        own = self.model.size * self.largest
        return add({"activations": saved, "buffers": self._in_flight() + own + self._reducing}, missing)

    @property
    def _reducing(self) -> float:
        """Return the bytes of a layer's gradient in float32: this rank's part and, where there are several, the whole."""
        if self.plain:
            return 0.0
        return 4 * self.largest * (1 + 1 / self.cut.data) if self.cut.data > 1 else 4 * self.largest
