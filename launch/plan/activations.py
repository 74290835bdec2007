"""Activation memory of layers, the last norm and the head, in bytes for one microbatch on one rank.

`LayerActivations` counts the tensors that autograd saves for each operation of a layer. IMPLEMENTATIONS has how often each
operation saves a tensor: Hugging Face's eager modules (FSDP2), the same with selective recomputation
(`pipeline/train/recompute.py`), and Megatron-Core's local modules (CPU) and TransformerEngine's (GPU), whose norms and
activation functions are one kernel each.
Widths are elements per token after tensor parallelism, and c is the bytes of an element (2 or 4).

    RMSNorm     its input and normalized value, in float32 where the norm is not one kernel, and its output
    attention   queries, keys and values as projected and after rotary embeddings, the output; 4 bytes per head: log-sum-exp
    MLP         gate, up, their activation and product, as far as they are not one kernel
    experts     the same per copy of a token, and the copy itself

Parallelism changes the counts:
    context     for each of a rank's two chunks of a sequence, attention saves keys and values up to the chunk's end (FSDP2)
    sequence    tensor-parallel ranks divide the tokens outside of attention and MLP; FSDP2 saves the gathered inputs of both
Each layer of a hybrid model counts the mean over its mixers and over its MLPs, so that the sum over all layers is right.

Flash attention kernels, on a GPU and on the CPU, save no probabilities. On the CPU, and on a GPU in float32 or with unequal
head widths, attention runs once for each group of sequences of equal length, and a copy joins the outputs.

Not counted: masks of context parallelism where attention runs without kernels (tokens of a chunk x sequence length), sinks of
gpt_oss, the gates of Qwen3.5's attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from launch.plan.memory_parts import TrainModel
from pipeline.models.backend_support import CUT_LATENTS
from pipeline.models.mixers import DeltaNet
from pipeline.models.shape import ModelShape

ROTARY = 64  # qk_rope_head_dim in the config.json of DeepSeek-V3 and of all models with its architecture


@dataclass(frozen=True, slots=True)
class Implementation:
    """How many tensors the operations of a layer save. Bytes are per element of a width."""

    norm: tuple[int, int]  # (bytes of float32, tensors of c) of an RMSNorm
    head_norm: tuple[int, int]  # the same of norms of queries and keys
    keys_normed: bool  # whether the norm of keys saves as much as that of queries
    query: int
    key: int
    value: int
    latent: tuple[int, int]  # further keys and values with latent attention
    rotary: int  # cosine and sine of queries and of keys
    mlp: int
    expert: int
    expert_input: int
    hidden: int  # tensors of the hidden width: the layer's input, the outputs of attention and of the MLP
    gathers: bool  # whether a layer saves its gathered inputs with sequence parallelism


IMPLEMENTATIONS = {
    "eager": Implementation((4, 2), (4, 1), True, 1, 1, 1, (1, 1), 0, 4, 4, 2, 0, True),
    "selective": Implementation((0, 0), (0, 0), True, 1, 1, 1, (0, 0), 0, 2, 2, 1, 3, False),
    "local": Implementation((8, 1), (8, 0), True, 2, 3, 0, (-1, 1), 4, 5, 6, 1, 0, False),
    "fused": Implementation((0, 2), (0, 1), False, 2, 3, 0, (-1, 1), 0, 3, 4, 1, 0, False),
}
"""Counted in the modules of transformers, of Megatron-Core (megatron/core/transformer, megatron/core/fusions) and of
TransformerEngine; measured by `tests.launch.plan memory`, but for TransformerEngine's."""


@dataclass(frozen=True, slots=True)
class RankMicrobatch:
    """A microbatch on one rank, and the parallel sizes that divide it."""

    tokens: float  # on this rank
    size: int  # bytes of an element (c)
    cuda: bool
    tensor: int = 1
    sequence: int = 1  # ranks that share the tokens outside of attention and MLP: tensor, or 1
    expert_tensor: int = 1  # ranks that cut each expert
    expert_tokens: float = 1.0  # tokens that reach this rank's experts, as a share of `tokens`
    context: int = 1  # context-parallel ranks, whose keys and values attention gathers (FSDP2)
    mixer_tensor: int | None = None  # ranks that divide state spaces and delta nets, or their tokens; None: as `tensor`


@dataclass(frozen=True)
class LayerActivations:
    """The activations of one layer, in bytes. sparse: whether it is a mixture of experts."""

    shape: ModelShape
    sparse: bool
    at: RankMicrobatch
    implementation: str  # in IMPLEMENTATIONS

    @property
    def of(self) -> Implementation:
        """Return the numbers of tensors that the layer's operations save."""
        return IMPLEMENTATIONS[self.implementation]

    @property
    def input(self) -> float:
        """Return the bytes that are kept instead of `saved` with recomputation of the whole layer."""
        return self.at.tokens * self.at.size * self._hidden

    @cached_property
    def saved(self) -> float:
        """Return the bytes from the forward pass to the backward pass."""
        shape, at, of = self.shape, self.at, self.of
        count, _, _ = norms(shape)
        saved_bytes = count * (self._bytes(of.norm) * self._hidden + 4 / at.sequence) + self._mean(
            self._attention(), self._state_space()
        )
        saved_bytes += at.size * 2 * (self._gathered - self._hidden) * (of.gathers and at.sequence > 1)
        saved_bytes += at.size * of.hidden * self._hidden
        if self.sparse:
            experts = self._copies * (of.expert_input * shape.expert_input + of.expert * self._width)
            return at.tokens * (saved_bytes + at.size * (experts + of.mlp * shape.shared_width / at.tensor))
        return at.tokens * (saved_bytes + at.size * of.mlp * self._width)

    @property
    def norm(self) -> float:
        """Return the bytes that the model's last norm saves."""
        return self.at.tokens * (self._bytes(self.of.norm) * self._hidden + self.at.size * self._gathered)

    @property
    def backward(self) -> float:
        """Return the bytes of the backward pass's workspace, in addition to `saved`."""
        at, hidden = self.at, self.shape.hidden
        inner = ((self.of.expert_input + 1) * self._copies + 1) * hidden if self.sparse else 2 * self._width + hidden
        return at.tokens * at.size * (inner + self._gathered)

    @property
    def forward(self) -> float:
        """Return the peak bytes of a forward pass without a graph."""
        hidden, (query, key, value, _) = 2 * self._hidden + self._gathered, self._widths
        inner = self._copies * (3 * self.shape.expert_input + 4 * self._width) if self.sparse else 4 * self._width
        return self.at.tokens * self.at.size * (hidden + max(inner, 3 * query + key + value))

    @property
    def _hidden(self) -> float:
        return self.shape.hidden / self.at.sequence

    @property
    def _gathered(self) -> float:
        return self.shape.hidden if self.at.sequence > 1 else 0.0

    @property
    def _copies(self) -> float:
        """Return the number of copies of each of the rank's tokens that its experts compute."""
        return self.shape.experts_per_token * self.at.expert_tokens

    @property
    def _width(self) -> float:
        """Return the width of an expert or of an MLP."""
        return self.shape.expert_width / self.at.expert_tensor if self.sparse else self.shape.mean_width / self.at.tensor

    @property
    def _widths(self) -> tuple[float, float, float, float]:
        """Return the widths of queries, keys, values and the output of attention."""
        shape, tensor = self.shape, self.at.tensor
        kv_heads = shape.heads if shape.latent else max(shape.kv_heads, tensor)  # a rank computes with one whole head at least
        sizes = (shape.heads * shape.head_dim, kv_heads * shape.head_dim)
        query, key, value, output = (
            size / tensor for size in (*sizes, kv_heads * shape.value_dim, shape.heads * shape.value_dim)
        )
        keys = self.at.context + 0.5 if self.at.context > 1 else 1.0
        return query, keys * key, keys * value, output

    def _bytes(self, tensors: tuple[int, int]) -> int:
        return tensors[0] + tensors[1] * self.at.size

    def _attention(self) -> float:
        """Return the bytes per token that attention saves."""
        shape, c, of, (query, key, value, output) = self.shape, self.at.size, self.of, self._widths
        flash = self.at.cuda and (self.implementation == "fused" or (c == 2 and shape.head_dim == shape.value_dim))
        joined = not flash and self.implementation != "selective"
        saved_bytes = c * (of.query * query + of.key * key + of.value * value + (1 + joined) * output)
        saved_bytes += 4 * shape.heads / self.at.tensor + c * of.rotary * shape.head_dim
        _, of_heads, latent = norms(shape)
        if of_heads:
            saved_bytes += self._bytes(of.head_norm) * (query + key * of.keys_normed)
        if latent:  # latents, their norms, and the joint keys and values projected from them
            saved_bytes += self._bytes(of.norm) * latent + c * (of.latent[0] * key + of.latent[1] * value)
        return saved_bytes

    def _state_space(self) -> float:
        """Return the bytes per token that a state space or a delta net saves: projection, convolution, gated norm and scan.

        Recomputed selectively, only the projection. The gate and the output are in float32.
        """
        mixer, c = self.shape.state, self.at.size
        if mixer is None:
            return 0.0
        saved_bytes = c * sum(mixer.projected)
        if self.implementation != "selective":
            saved_bytes += 2 * c * (sum(mixer.convolved) + mixer.width) + 16 * mixer.width
            saved_bytes += 0 if self.at.cuda else 4 * mixer.scanned
        return saved_bytes / (self.at.mixer_tensor or self.at.tensor)

    def _mean(self, attention: float, states: float) -> float:
        shape = self.shape
        return (shape.attention_layers * attention + shape.state_layers * states) / shape.layers if shape.state else attention


def norms(shape: ModelShape) -> tuple[int, bool, int]:
    """Return (number of RMSNorms of width h, whether queries and keys have norms, total width of latents' norms) of a layer."""
    if shape.latent:
        return 2, False, shape.norms_layer - 2 * shape.hidden
    count, remainder = divmod(shape.norms_layer, shape.hidden)
    return count, remainder > 0, 0


def latent_projections(shape: ModelShape, sequence: bool = False) -> float:
    """Return the number of parameters of a layer's latent projections.

    Tensor parallelism of Megatron-Core and of vLLM does not divide them.
    """
    _, _, latent = norms(shape)
    return shape.hidden * (latent + ROTARY) if latent else 0


def whole_mixers(shape: ModelShape, sequence: bool) -> float:
    """Return a layer's mean number of parameters of mixers that FSDP2's tensor parallelism leaves whole on every rank.

    These are latent attention or its projections to latents, state spaces, and delta nets with sequence parallelism
    (`pipeline/train/tensor_parallel.py`).
    Tensor-parallel ranks divide the sequences of whole state spaces and delta nets.
    """
    if shape.latent:
        return latent_projections(shape) if shape.family in CUT_LATENTS else shape.attention_layer
    if shape.state is None or (isinstance(shape.state, DeltaNet) and not sequence):
        return 0.0
    mixer = shape.state
    matrices = shape.hidden * (sum(mixer.projected) + mixer.width)
    return shape.state_layers / shape.layers * (matrices + (mixer.kernel + 1) * sum(mixer.convolved) + mixer.width)


# ---- the head -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadActivations:
    """Bytes of the head's activations (`pipeline/train/logprobs.py`)."""

    forward: float  # peak of the forward pass, with or without a graph
    backward: float  # peak of the backward pass


def head_activations(model: TrainModel, tokens: float, tensor: int) -> HeadActivations:
    """Return the activations of the head for a microbatch of `tokens` tokens on this rank.

    The forward pass holds the logits of a chunk in float32 and as much inside logsumexp; 20 bytes a logit with the most likely
    tokens, which a sort by 64-bit keys finds. A batch of one chunk saves the softmax. Several chunks save nothing: the backward
    pass holds the softmax and the gradient of the previous chunk, the new logits before and after their cast, and the gradient
    of the head's weight in float32. tensor: the number of ranks that divide the vocabulary.
    """
    c, hidden = model.size, model.shape.hidden
    of_hidden = c * tokens * hidden
    if model.values:
        cast = 4 * tokens * hidden if c < 4 else 0.0
        return HeadActivations(cast, cast + 4 * tokens * hidden + of_hidden)
    vocabulary = -(-model.shape.vocabulary // tensor)
    rows = min(tokens, model.policy.logprob_chunk_size or tokens)
    logits, weight = rows * vocabulary, vocabulary * hidden
    forward = (20 if model.top_k else 8) * logits
    if rows < tokens:
        return HeadActivations(forward, of_hidden + 4 * weight + max(12 * logits, c * weight + (4 + c) * logits))
    half = c if c < 4 else 0
    work = max(4 + half, 8 if model.entropy else 4) * logits
    return HeadActivations(forward, 4 * logits + of_hidden + max(work, c * (logits + weight)))
