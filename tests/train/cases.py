"""Tiny models, packed batches of a fixed data set, and the outputs of Hugging Face's eager models for them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from pipeline.boxes import whole
from pipeline.config import DTensorConfig, GenerationConfig, OptimizerConfig, PolicyConfig
from pipeline.train.context_parallel import LocalBatch, localize
from pipeline.train.train_backend import Loss, TrainBackend
from pipeline.types import LossOutput, Outputs, PackedBatch, TopK
from tests.models import cases as megatron_cases
from tests.train.float64 import Float64

VOCABULARY = 61  # odd, so that two ranks get unequal parts of it
LENGTHS = (5, 5, 1, 9, 3, 3, 12, 2)
LONG = 1500  # tokens of each sequence of `pack_long`
TEMPERATURE = 0.7
SHAPE = {name: size for name, size in megatron_cases.SHAPE.items() if name != "tie_word_embeddings"}


def configs() -> dict[str, PreTrainedConfig]:
    return {
        "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=megatron_cases.LLAMA3_ROPE),
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
VALUED = ("llama", "qwen3", "qwen3_moe")  # families with a checkpoint of a classifier
PADDING = 60  # a classifier's padding token; no sequence ends in it
EXPORTED = {"qwen3_tied": "bfloat16", "qwen3_moe": "float32"}  # families and precisions that exports are tested with


def tolerance(family: str) -> float:
    """Return the tolerance of gradients, as a share of the largest entry: processors round float32 differently, by up to
    1.4e-6.

    transformers rounds a router's softmax to float32 in any precision.
    """
    return 3e-6 if family in MIXTURES else 2e-6


def write_models(folder: Path) -> None:
    """Write one checkpoint per family.

    Every tensor is random, also biases and norms, which would otherwise start at 0 and 1.
    """
    for family, config in configs().items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(folder / family)


def write_classifiers(folder: Path) -> None:
    """Write `<family>_values`, sequence classifiers with one label, for some of the families. Every tensor is random."""
    for family in VALUED:
        torch.manual_seed(4)
        config = configs()[family]
        config.num_labels = 1
        config.pad_token_id = PADDING
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
        model.save_pretrained(folder / f"{family}_values")


def policy(model: Path | str, **changes) -> PolicyConfig:
    """Return a recipe's policy section, resolved: float32, no clipping, AdamW."""
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
    """Return [(tokens [L] int64, weights of the tokens' log-probs in the loss [L] float32)]."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, VOCABULARY, (length,), generator=generator), torch.randn(length, generator=generator))
        for length in LENGTHS
    ]


def pack(chosen: list[int], device: str = "cpu") -> PackedBatch:
    """Pack these of the `sequences()`, end to end."""
    return _packed([sequences()[i] for i in chosen], device)


def pack_long(device: str = "cuda", seed: int = 1) -> PackedBatch:
    """Pack two sequences over many blocks of keys, which attention's backward on a GPU adds up in any order by default."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, VOCABULARY, (LONG,), generator=generator) for _ in range(2)]
    return _packed([(tokens, torch.randn(LONG, generator=generator)) for tokens in drawn], device)


def _packed(chosen: list[tuple[torch.Tensor, torch.Tensor]], device: str) -> PackedBatch:
    tokens, weights = zip(*chosen, strict=True)
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
        rewards=torch.zeros(len(lengths), device=device),
    )


def localized(tokens: torch.Tensor, positions: torch.Tensor, candidates: torch.Tensor | None = None) -> LocalBatch:
    """Return packed tokens [T] with positions [T] and a teacher's candidates [T, K], all on one rank."""
    starts = (positions == 0).nonzero()[:, 0].tolist()
    ends = [*starts[1:], len(tokens)]
    zeros = torch.zeros(len(tokens), device=tokens.device)
    batch = PackedBatch(
        tokens=tokens,
        positions=positions,
        cu_seqlens=torch.tensor([*starts, len(tokens)], dtype=torch.int32, device=tokens.device),
        lengths=tuple(end - start for start, end in zip(starts, ends, strict=True)),
        loss_mask=zeros.bool(),
        generate_logprobs=zeros,
        advantages=zeros,
        rewards=zeros[: len(starts)],
        teacher=None if candidates is None else TopK(candidates, candidates.float()),
    )
    return localize(batch, 1, 0, 1)


def check_layout(trained: TrainBackend, files: dict[str, torch.Tensor], within: float = 0.0) -> dict[str, torch.Tensor]:
    """Check that every region of this rank equals the file, and return {name: bool mask of the entries that this rank
    holds}.
    """
    assert {name: tuple(tensor.shape) for name, tensor in files.items()} == trained.shapes
    held = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in trained.shapes.items()}
    for region in trained.layout():
        local = trained.local_tensor(region.tensor)
        seen = local.as_strided(region.box.size, region.strides, local.storage_offset() + region.offset)
        box = region.box.within(whole(trained.shapes[region.name]))
        difference = seen - files[region.name][box].to(local.dtype)
        assert difference.numel() == 0 or difference.abs().max() <= within, region
        assert not held[region.name][box].any(), f"{region} is held twice"
        held[region.name][box] = True
    return held


def check_all_held(held: dict[str, torch.Tensor]) -> None:
    """Check that the train ranks together hold every entry. Collective."""
    for name, entries in held.items():
        count = entries.to(torch.int32)
        dist.all_reduce(count)
        assert count.min() > 0, name


def loss(outputs: Outputs, batch: PackedBatch) -> LossOutput:
    """Return a weighted sum of log-probs over the global count of tokens, with one metric of each kind."""
    share = -(outputs.logprobs * batch.advantages).sum() / sum(LENGTHS)
    detached = outputs.logprobs.detach()
    metrics = {"logprob": detached.sum() / sum(LENGTHS), "logprob_max": batch.advantages.max(), "logprob_min": detached.min()}
    return LossOutput(share, metrics)


def learn(trained: TrainBackend, batches: list[PackedBatch], of: Loss = loss) -> dict[str, float]:
    """Return the metrics of a step of the algorithm with one update."""
    metrics = trained.step(batches, of).metrics
    trained.advance_schedule()
    return metrics


def value_loss(outputs: Outputs, batch: PackedBatch) -> LossOutput:
    """Return a weighted sum of values over the global count of tokens."""
    share = (outputs.values * batch.advantages).sum() / sum(LENGTHS)
    return LossOutput(share, {"value": outputs.values.detach().sum() / sum(LENGTHS)})


def eager_values(folder: Path) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Return (values of each sequence [L], gradients by name, loss) by transformers' body and head in float64, one at a
    time.
    """
    model = eager_model(AutoModelForSequenceClassification, folder, torch.float64)
    values, total = [], 0.0
    with Float64():
        for tokens, weights in sequences():
            hidden = model.base_model(tokens[None]).last_hidden_state[0]
            values.append(model.score(hidden)[:, 0])
            total = total + (values[-1] * weights).sum() / sum(LENGTHS)
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [value.detach() for value in values], gradients, total.detach()


def eager_scores(folder: Path, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return the scores [S] of transformers' classifier for all sequences in one batch, padded on the right."""
    model = eager_model(AutoModelForSequenceClassification, folder, dtype)
    model.config.pad_token_id = PADDING
    tokens = torch.nn.utils.rnn.pad_sequence([t for t, _ in sequences()], batch_first=True, padding_value=PADDING)
    mask = torch.arange(tokens.size(1)) < torch.tensor(LENGTHS)[:, None]
    with torch.no_grad():
        return model(tokens, attention_mask=mask.long()).logits[:, 0]


def eager_model(auto: type, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    return auto.from_pretrained(folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager")


def eager(folder: Path, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], torch.Tensor]:
    """Return (log-probs of each sequence [L], gradients by name, loss), one sequence at a time, by HF eager in `dtype`."""
    model = eager_model(AutoModelForCausalLM, folder, dtype)
    # Rotary frequencies are made with the model, in float32; keep to these, so that only rounding differs.
    logprobs, total = logprobs_and_loss(model)
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logprobs, gradients, total.detach()


def logprobs_and_loss(model: nn.Module) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return (log-probs of each sequence [L], `loss` with a graph) by a transformers model, one sequence at a time."""
    logprobs, total = [], 0.0
    double = next(model.parameters()).dtype == torch.float64
    with Float64() if double else contextlib.nullcontext():
        for tokens, weights in sequences():
            logits = model(tokens[None]).logits[0, :-1] / TEMPERATURE
            following = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
            logprobs.append(torch.cat([torch.zeros(1, dtype=logits.dtype), following.detach()]))
            total = total - (following * weights[1:]).sum() / sum(LENGTHS)
    return logprobs, total
