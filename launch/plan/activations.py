"""Activation memory of layers, the last norm and the head, in bytes for one microbatch on one rank.

The counts follow the tensors that autograd saves for each operation. Widths are elements per token after tensor parallelism: h
is the hidden size; q, k and v are the widths of queries, keys and values; o is the width of the attention output; i is the MLP
width. c is the bytes of an element (2 or 4).

  Hugging Face's eager modules (FSDP2)
    RMSNorm           (4 + 2c) h + 4    input in float32, its normalized value, the output; 1 / rms in float32
    attention         c (q + k + v + o)   after rotary embeddings, which do not save their input; 4 per head: log-sum-exp
    norms of q and k  (4 + c) (q + k)    rotary embeddings read their output and do not save it
    MLP               4 c i             gate, up, silu(gate), product
    experts           c (2h + 4i)       per copy of a token: input, gate and up, silu, product, output before its weight
    With selective recomputation (`pipeline/train/recompute.py`), a layer saves instead of these tensors:
    layer's input     c h
    attention         c (q + k + v + o + h)   outputs of its matrix products and of the kernel; 4 per head: log-sum-exp
    MLP, experts      c (2i + h)        outputs of their matrix products; for experts, per copy of a token
    Parallelism changes the counts:
    context           for each of a rank's two chunks of a sequence, attention saves keys and values up to the chunk's end:
                      context + 1/2 times the keys and values of the rank's own tokens
    sequence          tensor-parallel ranks divide the tokens outside of attention and MLP, and save the gathered inputs of
                      attention and MLP
  Megatron-Core's local modules (no TransformerEngine: CPU)
    RMSNorm           (8 + c) h + 4     input and normalized value as float32, the output
    attention         c (q + 2k) + c (q + k + o)   the joint projection, of which the values are a view; after rotary embeddings
    rotary            4 c head_dim      cosine and sine for queries and for keys, in each layer
    MLP               5 c i             gate and up, silu(gate), up + 0, product
    experts           c (h + 6i)        input, gate and up, silu, up + 0, product, product by weight
  Megatron-Core on TransformerEngine (GPU)
    RMSNorm           2 c h + 4         input, output
    attention         as above, without cosine and sine
    MLP               3 c i             the activation is one kernel that saves its input
    experts           c (h + 4i)        likewise, per copy of a token

  Head (`pipeline/train/logprobs.py`) for chunks of n rows, with v entries of the vocabulary on this rank
    forward pass      8 n v             the logits in float32, and the same size inside logsumexp
                      20 n v            with the most likely tokens, which a sort by 64-bit keys finds
    saved             4 n v             the softmax, if a batch is one chunk; several chunks save nothing
    backward pass     `head_activations`  with several chunks: the softmax and the gradient of the previous chunk and the new
                                        logits before and after their cast, 12 n v; also the head's weight gradient in float32

  State spaces (Mamba-2), with f = 4 bytes
    projection, convolution  c (p + 2 u)   p: rows of the joint projection; u: channels of the convolution
    gated norm          f (4 w) + 2 c w    w: width of all heads; gate and output in float32
    scan without kernels f (3 w + 3 q m)   q: tokens of a chunk, m: heads; the decays between its tokens
    delta nets          the same, but `DeltaNet.scanned` for the scan
  Each layer of a hybrid model counts the mean over its mixers and the mean over its MLPs, so that the sum over all layers is
  right. With FSDP2, tensor-parallel ranks share the sequences of mixers that tensor parallelism does not cut. Sequences are
  assumed to be many, so that every rank has an equal share of the tokens.

Flash attention kernels, on a GPU and on the CPU, save no probabilities. On the CPU, and on a GPU in float32 or with unequal
head widths, attention runs once for each group of sequences of equal length. A copy that joins the outputs takes c o more.

Not counted: masks of context parallelism where attention runs without kernels (tokens of a chunk x sequence length), sinks of
gpt_oss, the gates of Qwen3.5's attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from launch.plan.memory_parts import TrainModel
from pipeline.models.mixers import DeltaNet
from pipeline.models.shape import ModelShape

ROTARY = 64  # qk_rope_head_dim in the config.json of DeepSeek-V3 and of all models with its architecture


@dataclass(frozen=True, slots=True)
class RankMicrobatch:
    """A microbatch on one rank, and the parallel sizes that divide it."""

    tokens: float  # on this rank
    size: int  # bytes of an element (c)
    cuda: bool
    tensor: int = 1
    sequence: int = 1  # ranks that share the tokens outside of attention and MLP: tensor, or 1
    expert_tensor: int = 1
    experts: int = 1  # number of experts on this rank
    context: int = 1  # context-parallel ranks, whose keys and values attention gathers (FSDP2)
    token_split: int = 1  # ranks that divide the tokens before their experts (FSDP2 with tensor parallelism)

    @property
    def keys(self) -> float:
        """Return the mean number of keys that attention saves for each of this rank's tokens (FSDP2)."""
        return self.context + 0.5 if self.context > 1 else 1.0


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes of a layer's activations."""

    saved: float  # from the forward pass to the backward pass
    input: float  # kept instead of `saved` with recomputation
    backward: float  # additional workspace of the backward pass
    forward: float  # peak of a forward pass without a graph


def norms(shape: ModelShape) -> tuple[int, bool, int]:
    """Return (number of RMSNorms of width h, whether queries and keys have norms, total width of latents' norms) of a layer."""
    if shape.latent:
        return 2, False, shape.norms_layer - 2 * shape.hidden
    count, remainder = divmod(shape.norms_layer, shape.hidden)
    return count, remainder == 2 * shape.head_dim, 0


def latent_projections(shape: ModelShape) -> int:
    """Return the number of parameters of a layer's latent projections, which tensor parallelism does not divide."""
    _, _, latent = norms(shape)
    return shape.hidden * (latent + ROTARY) if latent else 0


def state_space(shape: ModelShape, microbatch: RankMicrobatch) -> float:
    """Return the bytes per token that a state space or a delta net saves."""
    if shape.state is None:
        return 0.0
    of, c = shape.state, microbatch.size
    saved_bytes = c * (sum(of.projected) + 2 * sum(of.convolved)) + 16 * of.width + 2 * c * of.width
    if not microbatch.cuda:
        saved_bytes += 4 * of.scanned
    return saved_bytes / microbatch.tensor


def _mean(shape: ModelShape, attention: float, states: float) -> float:
    """Return the mean of a quantity over all layers.

    attention: its value in a layer with attention. states: its value in a layer with a state space or a delta net.
    """
    return (
        attention if shape.state is None else (shape.attention_layers * attention + shape.state_layers * states) / shape.layers
    )


def _sharing(shape: ModelShape, microbatch: RankMicrobatch) -> int:
    """Return the number of tensor-parallel ranks that divide the tokens of state spaces and delta nets (FSDP2).

    Where every rank holds the whole mixer, the ranks divide the sequences. Delta nets without sequence parallelism are cut by
    tensor parallelism instead, and every rank computes all tokens.
    """
    return microbatch.sequence if isinstance(shape.state, DeltaNet) else microbatch.tensor


@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of a layer's tensors on one rank, in elements per token, after tensor parallelism."""

    hidden: int
    query: float
    key: float
    value: float
    output: float  # of attention
    heads: float

    @classmethod
    def of(cls, shape: ModelShape, microbatch: RankMicrobatch) -> Widths:
        """Return the widths after `microbatch.tensor` ranks divide the heads."""
        tensor, kv = microbatch.tensor, shape.heads if shape.latent else shape.kv_heads
        return cls(
            shape.hidden,
            shape.heads * shape.head_dim / tensor,
            kv * shape.head_dim / tensor,
            kv * shape.value_dim / tensor,
            shape.heads * shape.value_dim / tensor,
            shape.heads / tensor,
        )


def hugging_face_layer(shape: ModelShape, sparse: bool, microbatch: RankMicrobatch) -> LayerActivations:
    """Return the activations of one layer of Hugging Face's eager modules. sparse: whether it is a mixture of experts."""
    c, w = microbatch.size, Widths.of(shape, microbatch)
    count, of_heads, latent = norms(shape)
    hidden, gathered = w.hidden / microbatch.sequence, w.hidden if microbatch.sequence > 1 else 0.0
    keys = microbatch.keys * (w.key + w.value)
    attention = c * (w.query + keys + w.output) + 4 * w.heads
    if not (microbatch.cuda and c == 2 and shape.head_dim == shape.value_dim):
        attention += c * w.output
    if of_heads:
        attention += (4 + c) * (w.query + w.key)
    if latent:  # latents, their norms, and the joint keys and values projected from them
        attention += (4 + 2 * c) * latent + c * (w.key + w.value)
    states = state_space(shape, replace(microbatch, tensor=_sharing(shape, microbatch)))
    saved_bytes = count * ((4 + 2 * c) * hidden + 4) + _mean(shape, attention, states)
    if gathered:  # the inputs of both blocks are gathered, and saved as gathered for their weights' gradients
        saved_bytes += 2 * c * (gathered - hidden)
    forward = c * (2 * hidden + gathered + 3 * w.query + keys)
    if sparse:
        copies = shape.experts_per_token / microbatch.token_split
        width, shared = shape.expert_width / microbatch.expert_tensor, shape.shared_width
        saved_bytes += c * (copies * (2 * w.hidden + 4 * width) + 4 * shared / microbatch.tensor)
        backward = c * (3 * copies + 1) * w.hidden
        forward = max(forward, c * (2 * hidden + gathered + copies * (3 * w.hidden + 4 * width)))
    else:
        width = shape.mean_width / microbatch.tensor
        saved_bytes += 4 * c * width
        backward = c * (2 * width + w.hidden)
        forward = max(forward, c * (2 * hidden + gathered + 3 * width))
    return _of_tokens(microbatch, saved_bytes, c * hidden, backward + c * gathered, forward)


def selective_bytes(shape: ModelShape, sparse: bool, microbatch: RankMicrobatch) -> float:
    """Return the bytes that a Hugging Face layer keeps with selective recomputation, instead of `LayerActivations.saved`."""
    c, w = microbatch.size, Widths.of(shape, microbatch)
    keys = microbatch.keys * (w.key + w.value)
    attention = c * (w.query + keys + w.output) + 4 * w.heads
    _, _, latent = norms(shape)
    if latent:
        attention += c * (latent + ROTARY)
    states = c * sum(shape.state.projected) / _sharing(shape, microbatch) if shape.state else 0.0
    saved_bytes = c * 2 * w.hidden / microbatch.sequence + _mean(shape, attention, states)
    if sparse:
        copies = shape.experts_per_token / microbatch.token_split
        width, shared = shape.expert_width / microbatch.expert_tensor, shape.shared_width
        saved_bytes += c * (copies * (2 * width + w.hidden) + (2 * shared / microbatch.tensor + w.hidden if shared else 0))
    else:
        saved_bytes += c * (2 * shape.mean_width / microbatch.tensor + w.hidden)
    return microbatch.tokens * saved_bytes


def megatron_layer(shape: ModelShape, sparse: bool, microbatch: RankMicrobatch) -> LayerActivations:
    """Return the activations of one Megatron-Core layer: TransformerEngine's modules on a GPU, local modules on the CPU."""
    c, w, fused = microbatch.size, Widths.of(shape, microbatch), microbatch.cuda
    hidden = w.hidden / microbatch.sequence
    count, of_heads, latent = norms(shape)
    norm = 2 * c if fused else 8 + c
    attention = c * (2 * w.query + 3 * w.key + w.output) + 4 * w.heads
    if not fused:
        attention += c * (w.output + 4 * shape.head_dim)
    if of_heads and fused:
        attention += c * w.query  # a contiguous copy of the queries
    elif of_heads:
        attention += 8 * (w.query + w.key) - (4 * w.key if c == 4 else 0)
    if latent:
        attention += norm * latent + c * (w.value - w.key)
    mixers = _mean(shape, attention, state_space(shape, microbatch))
    saved_bytes = count * (norm * hidden + 4 / microbatch.sequence) + mixers
    if sparse:
        copies, shared = shape.experts_per_token, shape.shared_width / microbatch.tensor
        of_rank = copies * microbatch.expert_tensor / microbatch.sequence
        width = shape.expert_width / microbatch.expert_tensor
        saved_bytes += of_rank * c * (shape.expert_input + (4 if fused else 6) * width) + (3 if fused else 5) * c * shared
        backward = c * (2 * of_rank + 1) * w.hidden
        if not fused:  # one expert at a time; three products by its float64 weights are in float64 too
            backward += 3 * 8 * of_rank * width / microbatch.experts
        forward = c * (2 * hidden + of_rank * (2 * shape.expert_input + 4 * width))
    else:
        width = shape.mean_width / microbatch.tensor
        saved_bytes += (3 if fused else 5) * c * width
        backward = c * (2 * width + hidden)
        forward = c * (2 * hidden + 4 * width)
    if microbatch.sequence > 1:  # a rank gathers all ranks' tokens in the forward pass and again in the backward pass
        backward += c * w.hidden
        forward += c * w.hidden
    return _of_tokens(microbatch, saved_bytes, c * hidden, backward, forward)


def final_norm(shape: ModelShape, microbatch: RankMicrobatch, fused: bool) -> LayerActivations:
    """Return the activations of the last norm. fused: whether the norm is TransformerEngine's."""
    c, hidden = microbatch.size, shape.hidden / microbatch.sequence
    saved_bytes = (2 * c if fused else 8 + c) * hidden + (c * shape.hidden if microbatch.sequence > 1 else 0)
    return _of_tokens(microbatch, saved_bytes, 0, (2 * c if fused else 16) * hidden, (c if fused else 8) * hidden)


def _of_tokens(
    microbatch: RankMicrobatch, saved_bytes: float, at_once: float, backward: float, forward: float
) -> LayerActivations:
    tokens = microbatch.tokens
    return LayerActivations(tokens * saved_bytes, tokens * at_once, tokens * backward, tokens * forward)


# ---- the head -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadActivations:
    """Bytes of the head's activations."""

    saved: float  # from the forward pass to the backward pass
    forward: float  # peak of the forward pass, with or without a graph
    backward: float  # workspace of the backward pass, without `saved`
    gradient: float  # gradient of the head's weight, in the compute precision


def head_activations(model: TrainModel, tokens: float, tensor: int) -> HeadActivations:
    """Return the activations of the head for a microbatch of `tokens` tokens on this rank.

    tensor: the number of ranks that divide the vocabulary.
    """
    c, hidden = model.size, model.shape.hidden
    if model.values:
        cast = 4 * tokens * hidden if c < 4 else 0.0
        return HeadActivations(cast, cast, 4 * tokens * hidden + c * tokens * hidden, c * hidden)
    vocabulary = -(-model.shape.vocabulary // tensor)
    rows = min(tokens, model.policy.logprob_chunk_size or tokens)
    logits, weight = rows * vocabulary, vocabulary * hidden
    forward = (20 if model.top_k else 8) * logits
    of_hidden = c * tokens * hidden
    if rows < tokens:
        backward = of_hidden + 4 * weight + max(12 * logits, c * weight + (4 + c) * logits)
        return HeadActivations(0.0, forward, backward, c * weight)
    half = c if c < 4 else 0
    work = max(4 + half, 8 if model.entropy else 4) * logits
    return HeadActivations(4 * logits, forward, of_hidden + max(work, c * (logits + weight)), c * weight)
