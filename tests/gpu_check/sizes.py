"""The models and batches that are measured, as recipes."""

from __future__ import annotations

from dataclasses import dataclass

from tests.gpu_check.measurement import Place
from tests.launch.plan.memory_cases import MEDIUM, Case


@dataclass(frozen=True)
class Size:
    model: dict[str, int]  # changes of recipes/tiny/config.json
    sequences: int  # of a rank's microbatch
    length: int  # of each sequence, in tokens
    steps: int  # measured, after WARM_UP


LLAMA_1B = {  # Llama 3.2 1B, with an output layer of its own
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
SIZES = {"full": Size(LLAMA_1B, sequences=4, length=4096, steps=5), "tiny": Size({}, sequences=4, length=32, steps=1)}
REPEATED = {
    "full": Size(MEDIUM | {"max_position_embeddings": 2048}, sequences=2, length=1500, steps=3),
    "tiny": Size({}, sequences=2, length=100, steps=3),
}
"""Beyond one block of keys, FlashAttention's backward pass adds in another order each time."""


def case(name: str, recipe: str, place: Place, model: dict[str, int], *overrides: str, ranks: int = 1) -> Case:
    """Return a case of a recipe in the precision that the device is fast in."""
    precision = "bfloat16" if place.device == "cuda" else "float32"
    gpus = ranks if place.device == "cuda" else 0
    given = (f"policy.precision={precision}", *overrides)
    return Case(name, recipe, ranks=ranks, gpus=gpus, overrides=given, changes=model)


def training_case(place: Place, size: Size, *overrides: str, ranks: int = 1) -> Case:
    """Return a case of SFT in which each rank has one microbatch of all sequences."""
    tokens, together = size.sequences * size.length, size.sequences * ranks
    packed = [f"policy.sequence_packing.{key}={tokens}" for key in ("train_mb_tokens", "logprob_mb_tokens")]
    lengths = [f"policy.train_global_batch_size={together}", f"policy.max_total_sequence_length={size.length}"]
    return case("step", "tiny_sft", place, size.model, *packed, *lengths, *overrides, ranks=ranks)
