"""List the tensors of a model's checkpoint from its config.json alone, without torch, transformers or weights.

Plans use the list where neither library is installed. Names and shapes are those on disk, as transformers saves a model: one
tensor per expert, except for gpt_oss, which has one tensor for all experts of a layer. Tests compare them with transformers.

Not supported: quantized checkpoints (gpt_oss is described as dequantized), the layers for multi-token prediction, which
transformers does not load, and the other parts of multimodal models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from pipeline.models.family import Split
from pipeline.models.sizes import QWEN3_5, layer_kinds, sizes

Part = Literal["embedding", "output", "attention", "mlp", "shared", "routed", "router", "norm", "buffer"]
"""The part of the model to which a tensor belongs. attention: attention, or another mixer in its place; router: also the
projections to and from the latent of experts; shared: experts that process every token; routed: experts that a router selects;
norm: norms of layers and inside attention; buffer: saved, but not a parameter (the bias of DeepSeek's router)."""


class Tensor(NamedTuple):
    """A tensor on disk, e.g. Tensor("model.layers.3.mlp.experts.17.up_proj.weight", (768, 2048), "routed", "rows", 3, 17)."""

    name: str
    shape: tuple[int, ...]
    part: Part
    split: Split = "none"  # how tensor parallelism cuts it
    layer: int | None = None
    expert: int | None = None

    @property
    def numel(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


def tensors(config: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a causal language model, in the model's order, without a tied output layer.

    config: config.json of one of `sizes.MODEL_TYPES`. Raises ValueError for another family, KeyError for a missing key.
    """
    of = sizes(config)
    vocabulary = (of.vocab_size, of.hidden_size)
    kinds = layer_kinds(of)
    blocks = {kind: list(_layer(of, kind)) for kind in set(kinds)}
    hybrid = of.model_type == "nemotron_h"
    model, embedding, norm = ("backbone", "embeddings", "norm_f") if hybrid else ("model", "embed_tokens", "norm")
    listing = [Tensor(f"{model}.{embedding}.weight", vocabulary, "embedding", "rows")]
    for i, kind in enumerate(kinds):
        listing += [Tensor(f"{model}.layers.{i}.{t.name}", t.shape, t.part, t.split, i, t.expert) for t in blocks[kind]]
    listing.append(Tensor(f"{model}.{norm}.weight", (of.hidden_size,), "norm"))
    return listing if of.tie_word_embeddings else [*listing, Tensor("lm_head.weight", vocabulary, "output", "rows")]


# ---- a layer; names are within it ---------------------------------------------------------------------------------------


def _layer(of: SimpleNamespace, kind: str) -> Iterator[Tensor]:
    if of.model_type == "nemotron_h":
        yield from _hybrid_layer(of, kind)
        return
    sparse = kind == "sparse" or of.model_type == "qwen3_5_moe_text"
    if kind == "linear_attention":
        yield from _delta_net(of)
    else:
        yield from _latent_attention(of) if of.model_type == "deepseek_v3" else _attention(of)
    if of.model_type == "glm4":
        yield from _linear("mlp.gate_up_proj", 2 * of.intermediate_size, of.hidden_size, "mlp", "halves")
        yield from _linear("mlp.down_proj", of.hidden_size, of.intermediate_size, "mlp", "columns")
    elif not sparse:
        yield from _mlp("mlp", of.hidden_size, of.intermediate_size, "mlp", getattr(of, "mlp_bias", False))
    elif of.model_type == "gpt_oss":
        yield from _stacked_experts(of)
    else:
        yield from _experts(of)
    names = ["input_layernorm", "post_attention_layernorm"]
    if of.model_type == "gemma3_text":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    elif of.model_type == "glm4":
        names += ["post_self_attn_layernorm", "post_mlp_layernorm"]
    yield from (_norm(name, of.hidden_size) for name in names)


def _linear(name: str, rows: int, columns: int, part: Part, split: Split, bias: bool = False) -> Iterator[Tensor]:
    """Yield the tensors of a linear layer. A split by rows also cuts the bias; otherwise every rank has the whole bias."""
    yield Tensor(f"{name}.weight", (rows, columns), part, split)
    if bias:
        yield Tensor(f"{name}.bias", (rows,), part, split if split == "rows" else "none")


def _norm(name: str, size: int) -> Tensor:
    return Tensor(f"{name}.weight", (size,), "norm")


def _attention(of: SimpleNamespace) -> Iterator[Tensor]:
    """Yield the tensors of grouped-query attention."""
    queries, keys = of.num_attention_heads * of.head_dim, of.num_key_value_heads * of.head_dim
    bias = of.model_type == "qwen2" or getattr(of, "attention_bias", False)
    gated = queries if of.model_type in QWEN3_5 else 0  # each head's gate follows its query
    for name, rows in (("q", queries + gated), ("k", keys), ("v", keys)):
        yield from _linear(f"self_attn.{name}_proj", rows, of.hidden_size, "attention", "rows", bias)
    bias = bias and of.model_type not in ("qwen2", "glm4", "glm4_moe")
    yield from _linear("self_attn.o_proj", of.hidden_size, queries, "attention", "columns", bias)
    if of.model_type in ("qwen3", "qwen3_moe", "gemma3_text", *QWEN3_5) or getattr(of, "use_qk_norm", False):
        yield from (_norm(f"self_attn.{name}_norm", of.head_dim) for name in "qk")
    if of.model_type == "gpt_oss":
        yield Tensor("self_attn.sinks", (of.num_attention_heads,), "attention", "rows")


def _latent_attention(of: SimpleNamespace) -> Iterator[Tensor]:
    """Yield the tensors of multi-head latent attention.

    Every rank has the whole down-projections, because every head needs the latent.
    """
    linear = partial(_linear, part="attention")
    heads, hidden, rank = of.num_attention_heads, of.hidden_size, of.kv_lora_rank
    query = heads * (of.qk_nope_head_dim + of.qk_rope_head_dim)
    if of.q_lora_rank is None:
        yield from linear("self_attn.q_proj", query, hidden, split="rows")
    else:
        yield from linear("self_attn.q_a_proj", of.q_lora_rank, hidden, split="none", bias=of.attention_bias)
        yield _norm("self_attn.q_a_layernorm", of.q_lora_rank)
        yield from linear("self_attn.q_b_proj", query, of.q_lora_rank, split="rows")
    down = rank + of.qk_rope_head_dim
    yield from linear("self_attn.kv_a_proj_with_mqa", down, hidden, split="none", bias=of.attention_bias)
    yield _norm("self_attn.kv_a_layernorm", rank)
    yield from linear("self_attn.kv_b_proj", heads * (of.qk_nope_head_dim + of.v_head_dim), rank, split="rows")
    yield from linear("self_attn.o_proj", hidden, heads * of.v_head_dim, split="columns", bias=of.attention_bias)


def _mlp(
    name: str,
    hidden: int,
    width: int,
    part: Part,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Tensor]:
    """Yield the tensors of a gated MLP or of one expert."""
    gate, up, down = names
    yield from _linear(f"{name}.{gate}", width, hidden, part, "rows", bias)
    yield from _linear(f"{name}.{up}", width, hidden, part, "rows", bias)
    yield from _linear(f"{name}.{down}", hidden, width, part, "columns", bias)


def _experts(of: SimpleNamespace) -> Iterator[Tensor]:
    """Yield the tensors of a router, its experts, and the shared experts, which are one MLP."""
    mixtral, count = of.model_type == "mixtral", experts(of)
    width = of.intermediate_size if mixtral else of.moe_intermediate_size
    module, names = ("block_sparse_moe", ("w1", "w3", "w2")) if mixtral else ("mlp", ("gate_proj", "up_proj", "down_proj"))
    yield Tensor(f"{module}.gate.weight", (count, of.hidden_size), "router")
    if of.model_type in ("deepseek_v3", "glm4_moe"):
        yield Tensor(f"{module}.gate.e_score_correction_bias", (count,), "buffer")
    for i in range(count):
        for tensor in _mlp(f"{module}.experts.{i}", of.hidden_size, width, "routed", names=names):
            yield tensor._replace(expert=i)
    if of.model_type == "qwen3_5_moe_text":
        yield from _mlp(f"{module}.shared_expert", of.hidden_size, of.shared_expert_intermediate_size, "shared")
        yield Tensor(f"{module}.shared_expert_gate.weight", (1, of.hidden_size), "router")
    if shared := getattr(of, "n_shared_experts", 0):
        yield from _mlp(f"{module}.shared_experts", of.hidden_size, width * shared, "shared")


def _hybrid_layer(of: SimpleNamespace, kind: str) -> Iterator[Tensor]:
    """Yield the tensors of one of Nemotron-H's layers."""
    yield _norm("norm", of.hidden_size)
    match kind:
        case "linear_attention":
            yield from _state_space(of)
        case "full_attention":
            yield from (t._replace(name=t.name.replace("self_attn", "mixer")) for t in _attention(of))
        case "mlp":
            yield from _plain_mlp("mixer", of.hidden_size, of.intermediate_size, "mlp")
        case _:
            yield Tensor("mixer.gate.weight", (of.n_routed_experts, of.hidden_size), "router")
            yield Tensor("mixer.gate.e_score_correction_bias", (of.n_routed_experts,), "buffer")
            latent = of.moe_latent_size
            if latent is not None:
                yield from _linear("mixer.fc1_latent_proj", latent, of.hidden_size, "router", "none")
                yield from _linear("mixer.fc2_latent_proj", of.hidden_size, latent, "router", "none")
            for i in range(of.n_routed_experts):
                mlp = _plain_mlp(f"mixer.experts.{i}", latent or of.hidden_size, of.moe_intermediate_size, "routed")
                yield from (tensor._replace(expert=i) for tensor in mlp)
            yield from _plain_mlp("mixer.shared_experts", of.hidden_size, of.moe_shared_expert_intermediate_size, "shared")


def _plain_mlp(name: str, hidden: int, width: int, part: Part) -> Iterator[Tensor]:
    """Yield the tensors of an MLP without a gate."""
    yield from _linear(f"{name}.up_proj", width, hidden, part, "rows")
    yield from _linear(f"{name}.down_proj", hidden, width, part, "columns")


def _state_space(of: SimpleNamespace) -> Iterator[Tensor]:
    """Yield the tensors of a Mamba-2 mixer. Each part of its joint projection and of its convolution is cut by rows."""
    inner, shared = of.mamba_num_heads * of.mamba_head_dim, of.n_groups * of.ssm_state_size
    convolved = (inner, shared, shared)
    projected = (inner, *convolved, of.mamba_num_heads)
    yield from _linear("mixer.in_proj", sum(projected), of.hidden_size, "attention", projected)
    yield Tensor("mixer.conv1d.weight", (sum(convolved), 1, of.conv_kernel), "attention", convolved)
    yield Tensor("mixer.conv1d.bias", (sum(convolved),), "attention", convolved)
    for name in ("A_log", "D", "dt_bias"):
        yield Tensor(f"mixer.{name}", (of.mamba_num_heads,), "attention", "rows")
    yield Tensor("mixer.norm.weight", (inner,), "attention", "rows")
    yield from _linear("mixer.out_proj", of.hidden_size, inner, "attention", "columns")


def _delta_net(of: SimpleNamespace) -> Iterator[Tensor]:
    """Yield the tensors of a gated delta net. Queries, keys and values are cut by rows, in projection and convolution."""
    keys, values = of.linear_num_key_heads * of.linear_key_head_dim, of.linear_num_value_heads * of.linear_value_head_dim
    parts, heads = (keys, keys, values), of.linear_num_value_heads
    yield from _linear("linear_attn.in_proj_qkv", sum(parts), of.hidden_size, "attention", parts)
    for name, rows in (("z", values), ("b", heads), ("a", heads)):
        yield from _linear(f"linear_attn.in_proj_{name}", rows, of.hidden_size, "attention", "rows")
    yield Tensor("linear_attn.conv1d.weight", (sum(parts), 1, of.linear_conv_kernel_dim), "attention", parts)
    for name in ("A_log", "dt_bias"):
        yield Tensor(f"linear_attn.{name}", (heads,), "attention", "rows")
    yield Tensor("linear_attn.norm.weight", (of.linear_value_head_dim,), "attention")
    yield from _linear("linear_attn.out_proj", of.hidden_size, values, "attention", "columns")


def _stacked_experts(of: SimpleNamespace) -> Iterator[Tensor]:
    """Yield gpt_oss's router and experts. All experts share a tensor, in which gate and up alternate in the last dimension."""
    count, hidden, width = experts(of), of.hidden_size, of.intermediate_size
    yield Tensor("mlp.router.weight", (count, hidden), "router")
    yield Tensor("mlp.router.bias", (count,), "router")
    yield Tensor("mlp.experts.gate_up_proj", (count, hidden, 2 * width), "routed")
    yield Tensor("mlp.experts.gate_up_proj_bias", (count, 2 * width), "routed")
    yield Tensor("mlp.experts.down_proj", (count, width, hidden), "routed")
    yield Tensor("mlp.experts.down_proj_bias", (count, hidden), "routed")


def experts(of: SimpleNamespace) -> int:
    """Return the number of routed experts of a sparse layer; 0 for a model without experts."""
    if of.model_type == "nemotron_h" and "moe" not in of.layers_block_type:
        return 0
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next((count for name in names if (count := getattr(of, name, 0))), 0)
