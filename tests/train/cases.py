"""Tiny real models, packed batches of one fixed data set, and what Hugging Face's eager models say about them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline.boxes import whole
from pipeline.config import DTensorConfig, GenerationConfig, OptimizerConfig, PolicyConfig
from pipeline.train.base import TrainBackend
from pipeline.types import LossOutput, PackedBatch

VOCABULARY = 61  # odd, so that two ranks get unequal parts of it
LENGTHS = (5, 5, 1, 9, 3, 3, 12, 2)
TEMPERATURE = 0.7
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def configs() -> dict[str, PreTrainedConfig]:
    return {
        "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
        "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=False),
        "qwen3": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False),
        "qwen3_tied": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
        # The second layer is dense; three experts, so that two ranks get unequal parts of them.
        "qwen3_moe": Qwen3MoeConfig(
            **SHAPE,
            head_dim=16,
            moe_intermediate_size=24,
            num_experts=3,
            num_experts_per_tok=2,
            mlp_only_layers=[1],
            tie_word_embeddings=False,
        ),
        "mixtral": MixtralConfig(
            **SHAPE, num_local_experts=4, num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, tie_word_embeddings=False
        ),
    }


FAMILIES = tuple(configs())
MIXTURES = ("qwen3_moe", "mixtral")
EXPORTED = {"qwen3_tied": "bfloat16", "qwen3_moe": "float32"}  # families and precisions that exports are tested with


def tolerance(family: str) -> float:
    """Of gradients, as a share of the largest entry; transformers rounds a router's softmax to float32 in any precision."""
    return 3e-6 if family in MIXTURES else 1e-6


def write_models(folder: Path) -> None:
    """One checkpoint per family. Every tensor is random: biases and norms too, which would else start at 0 and 1."""
    for family, config in configs().items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(folder / family)


def policy(model: Path | str, **changes) -> PolicyConfig:
    """A recipe's policy section, resolved: float32, no clipping, AdamW."""
    return PolicyConfig(
        **{
            "model_name": str(model),
            "precision": "float32",
            "max_total_sequence_length": 64,
            "logprob_chunk_size": 16,
            "max_grad_norm": None,
            "dtensor_cfg": DTensorConfig(),
            "optimizer": OptimizerConfig(kwargs={"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}),
            "generation": GenerationConfig(temperature=TEMPERATURE),
            **changes,
        }
    )


def sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[(tokens [L] int64, weights of the tokens' log-probs in the loss [L] float32)]"""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, VOCABULARY, (length,), generator=generator), torch.randn(length, generator=generator))
        for length in LENGTHS
    ]


def pack(chosen: list[int], device: str = "cpu") -> PackedBatch:
    """Those of the `sequences()`, end to end."""
    tokens, weights = zip(*(sequences()[i] for i in chosen), strict=True)
    lengths = tuple(len(t) for t in tokens)
    total = sum(lengths)
    return PackedBatch(
        tokens=torch.cat(tokens).to(device),
        positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
        lengths=lengths,
        loss_mask=torch.ones(total, dtype=torch.bool, device=device),
        generate_logprobs=torch.zeros(total, device=device),
        advantages=torch.cat(weights).to(device),
    )


def check_layout(trained: TrainBackend, files: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every region of this rank shows what the file has there. {name: which of its entries this rank holds, bool}"""
    assert {name: tuple(tensor.shape) for name, tensor in files.items()} == trained.shapes
    held = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in trained.shapes.items()}
    for region in trained.layout():
        local = trained.local(region.tensor)
        seen = local.as_strided(region.box.size, region.strides, local.storage_offset() + region.offset)
        box = region.box.within(whole(trained.shapes[region.name]))
        assert torch.equal(seen, files[region.name][box].to(local.dtype)), region
        assert not held[region.name][box].any(), f"{region} is held twice"
        held[region.name][box] = True
    return held


def check_all_held(held: dict[str, torch.Tensor]) -> None:
    """The train ranks together hold every entry. Collective."""
    for name, entries in held.items():
        count = entries.to(torch.int32)
        dist.all_reduce(count)
        assert count.min() > 0, name


def loss(logprobs: torch.Tensor, batch: PackedBatch) -> LossOutput:
    """A weighted sum of log-probs over the global count of tokens, with one metric of each kind."""
    share = -(logprobs * batch.advantages).sum() / sum(LENGTHS)
    detached = logprobs.detach()
    metrics = {"logprob": detached.sum() / sum(LENGTHS), "logprob_max": batch.advantages.max(), "logprob_min": detached.min()}
    return LossOutput(share, metrics)


def eager(folder: Path, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """(log-probs of each sequence [L], gradients by name, loss), one sequence at a time, by HF eager in `dtype`."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    # Rotary frequencies are derived in float32 by any model; keep to that, so that only rounding differs.
    logprobs, total = [], 0.0
    for tokens, weights in sequences():
        logits = model(tokens[None]).logits[0, :-1] / TEMPERATURE
        following = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        logprobs.append(torch.cat([torch.zeros(1, dtype=dtype), following.detach()]))
        total = total - (following * weights[1:]).sum() / sum(LENGTHS)
    total.backward()
    return logprobs, {name: parameter.grad for name, parameter in model.named_parameters()}, total.detach()
