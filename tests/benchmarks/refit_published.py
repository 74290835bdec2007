"""Compare the prices of refits with published ones: predicted and published, side by side.

Nothing is fitted. Bandwidths are those of the data sheets of the machines that were measured (DGX H100: a 400 Gb/s NIC for
each GPU, NVLink 4), latency and copying are the defaults of `cluster.network`. Where a layout was not published, the line says
which was assumed.

Sources: NeMo-RL's post "Optimizing Non-Colocated Refit for Asynchronous RL" (broadcast; buffers of 2% of a GPU's memory: pull
request 1418) and its pull requests 2971 and 2413 (shard to shard); prime-rl's pull request 3341; Perplexity's "Weight Transfer
for RL Post-Training in under 2 seconds"; checkpoint-engine's README.

Left out: pausing generation, and the work per tensor in Python, whose size the reasons give.
"""

from __future__ import annotations

import json
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launch.plan.refit import broadcast_seconds
from launch.plan.refit_time import Messages, loads, merge, price
from launch.plan_refit import PlanRefitRequest, RefitPrediction, load, model_folder, predict
from pipeline.config.cluster import NetworkConfig
from pipeline.config.generation import RefitConfig
from pipeline.models.shape import ModelShape

NETWORK = NetworkConfig()
GPUS = 8  # of a node
BUCKET = RefitConfig().bucket_bytes
NEMO_BUCKET = 80_000_000_000 // 50
CHECKPOINT_ENGINE_BUCKET = 8 << 30
SOURCES = 16  # ranks from which a generate rank receives in a round

QWEN = {"model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
MODELS = {
    "Qwen3-30B-A3B": QWEN
    | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
    | {"num_hidden_layers": 48, "num_attention_heads": 32},
    "Qwen3-235B-A22B": QWEN
    | {"hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536}
    | {"num_hidden_layers": 94, "num_attention_heads": 64},
    "DeepSeek-V3": DEEPSEEK
    | {"vocab_size": 129280, "n_routed_experts": 256, "num_attention_heads": 128, "first_k_dense_replace": 3},
    "Kimi-K2": DEEPSEEK
    | {"vocab_size": 163840, "n_routed_experts": 384, "num_attention_heads": 64, "first_k_dense_replace": 1},
}
"""Sizes from the models' config.json on the Hugging Face Hub."""

MEGATRON, VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"
OURS = {
    "Qwen3-30B-A3B": [
        "cluster.train.nodes=2",
        "cluster.generate.nodes=2",
        f"{MEGATRON}.expert_model_parallel_size=8",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        f"{VLLM}.tensor_parallel_size=8",
    ],
    "DeepSeek-V3": [
        "cluster.train.nodes=32",
        "cluster.generate.nodes=32",
        f"{MEGATRON}.expert_model_parallel_size=16",
        f"{MEGATRON}.pipeline_model_parallel_size=16",
        f"{MEGATRON}.num_layers_in_first_pipeline_stage=3",
        f"{MEGATRON}.num_layers_in_last_pipeline_stage=2",
        f"{VLLM}.tensor_parallel_size=32",
    ],
}


@dataclass(frozen=True)
class Line:
    what: str
    published: tuple[float, float]  # seconds, from and to
    predicted: float
    assumed: str
    why: str = ""  # why it is off by more than 2

    @property
    def ratio(self) -> float:
        """Return published over predicted; 1 within the published range."""
        low, high = self.published
        return min(max(self.predicted, low), high) / self.predicted


def print_published() -> None:
    network = NETWORK
    print(
        f"\nrefits as published and as predicted: {network.nic_gb_per_s:g} GB/s a NIC, {network.node_gb_per_s:g} GB/s within"
        f" a node, {GPUS} GPUs with a NIC each in a node, {network.latency_us:g} us a message, copies at"
        f" {network.memory_gb_per_s:g} GB/s, buckets of {BUCKET / 1e6:.0f} MB"
    )
    print(f"{'':44s}{'published':>14s}{'predicted':>12s}{'ratio':>8s}")
    for line in lines():
        low, high = line.published
        seconds = f"{low:g} s" if low == high else f"{low:g} to {high:g} s"
        print(f"{line.what:44s}{seconds:>14s}{f'{line.predicted:.2f} s':>12s}{line.ratio:8.1f}")
        for text in (f"assumed: {line.assumed}", f"why: {line.why}" if line.why else ""):
            print(textwrap.indent(textwrap.fill(text, 110), "    ")) if text else None


def print_ours() -> None:
    """Return `launch/plan_refit.py`'s prediction of our refit for their layouts."""
    print(f"\n{'our plan, for the same model and layout':44s}{'predicted':>12s}{'bound by':>16s}")
    for name, layout in OURS.items():
        found = plan_ours(name, layout)
        print(f"{name:44s}{f'{found.price.seconds:.2f} s':>12s}{found.price.limit:>16s}")
        print(textwrap.indent(textwrap.fill(" ".join(layout), 110), "    "))


def plan_ours(name: str, layout: list[str]) -> RefitPrediction:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(MODELS[name], file)
        file.flush()
        overrides = ["policy.precision=bfloat16", "policy.megatron_cfg.enabled=true"]
        overrides += [f"cluster.{realm}.ranks_per_node={GPUS}" for realm in ("train", "generate")]
        with model_folder(Path(file.name)) as folder:
            recipe, _ = load(PlanRefitRequest("tiny_grpo", [*overrides, *layout]), folder)
            return predict(recipe)


def lines() -> list[Line]:
    return [*broadcasts(), *reshards(), prime_rl(), *perplexity(), checkpoint_engine()]


def broadcasts() -> list[Line]:
    found = []
    for name, train, tensor, seconds in (
        ("Qwen3-30B-A3B", 16, 8, 1.5),
        ("Qwen3-235B-A22B", 128, 8, 5.0),
        ("DeepSeek-V3", 256, 32, 14.0),
    ):
        total = 2 * ModelShape.of(MODELS[name]).parameters
        predicted = inclusive_broadcast(total, train)
        found.append(
            Line(
                f"NeMo-RL broadcast, {name}",
                (seconds, seconds),
                predicted,
                f"{total / 1e9:.0f} GB in bfloat16; {train} train GPUs, engines of TP {tensor}, as in the authors' other table",
                _per_tensor(name, seconds - predicted),
            )
        )
    return found


def inclusive_broadcast(total: int, train: int) -> float:
    """Return seconds.

    All train ranks gather all bytes and belong to the broadcast's group, so both phases can use all NICs of a node and overlap.
    """
    return broadcast_seconds(total, NEMO_BUCKET, train // GPUS, NETWORK, nics=GPUS)


def reshards() -> list[Line]:
    """Predict feed-forward weights sent from train shards to generate shards, and all others broadcast afterwards."""
    found = []
    for name, layout, train, generate, tensor, seconds in (
        ("Qwen3-30B-A3B", "EP8 PP2 to TP8 DP2, as published", 16, 16, 8, (0.74, 1.0)),
        ("DeepSeek-V3", "EP16 PP16 to TP32 DP8, as in an earlier table of the authors", 256, 256, 32, (2.4, 2.8)),
    ):
        shape = ModelShape.of(MODELS[name])
        total, cut = 2 * shape.parameters, 2 * (shape.mlp + shape.routed)
        predicted = exchange(train, generate, cut // tensor) + inclusive_broadcast(total - cut, train)
        found.append(
            Line(
                f"NeMo-RL shard to shard, {name}",
                seconds,
                predicted,
                f"{layout}; {cut / total:.0%} of {total / 1e9:.0f} GB shard to shard, the rest broadcast",
                _per_tensor(name, seconds[0] - predicted),
            )
        )
    return found


def prime_rl() -> Line:
    return Line(
        "prime-rl over RDMA, 82.5 GB a GPU",
        (1.86, 1.86),
        exchange(64, 32, 82_501_000_000),
        "64 train and 32 generate GPUs (H200), as published; the transfer alone, without pausing generation",
    )


def perplexity() -> list[Line]:
    total = ModelShape.of(MODELS["Kimi-K2"]).parameters  # bytes, in FP8
    return [
        Line(
            f"Perplexity, Kimi-K2, engines of {size} GPUs",
            (1.3, 1.3),
            exchange(256, 128, total // size),
            f"256 train and 128 generate GPUs and FP8 on the wire, as published; engines of {size}, which were not",
            ""
            if size == 16
            else "were it one engine, the NICs would be idle most of the time: the published pipeline gathers"
            " full tensors and quantizes them before it sends",
        )
        for size in (16, 128)
    ]


def checkpoint_engine() -> Line:
    total = ModelShape.of(MODELS["Kimi-K2"]).parameters  # bytes, in FP8
    return Line(
        "checkpoint-engine broadcast, Kimi-K2",
        (16.04, 16.04),
        broadcast_seconds(total, CHECKPOINT_ENGINE_BUCKET, 256 // GPUS, NETWORK, nics=GPUS),
        "256 GPUs (H20) in engines of TP 16, FP8, as published; each GPU's share waits in its host's memory; 8 NICs of 50 GB/s"
        " a node",
        "copies from the host, broadcasts and the engines' own loading follow each other: its README says that the"
        " three-stage pipeline is not there; 16 GPUs take it 14.4 s, so the network is not what bounds it",
    )


def exchange(train: int, generate: int, received: int) -> float:
    """Return seconds for every generate rank to get `received` bytes, point to point and evenly from all train ranks."""
    return price(loads(even(train, generate, received), np.arange(train + generate) // GPUS), NETWORK).seconds


def even(train: int, generate: int, received: int) -> Messages:
    """Predict rounds of a bucket per generate rank; its sources rotate, so all train ranks send equally much in every round."""
    rounds, sources = -(-received // BUCKET), min(SOURCES, train)
    round, target, source = (axis.ravel() for axis in np.mgrid[:rounds, :generate, :sources])
    size = np.full(len(round), received // (rounds * sources))
    return merge(round, (target * sources + source + round) % train, target + train, size, np.zeros(len(round), bool))


def _per_tensor(name: str, seconds: float) -> str:
    model, shape = MODELS[name], ModelShape.of(MODELS[name])
    tensors = shape.routed // (model["hidden_size"] * shape.expert_width)
    return (
        f"the wire is idle most of the time. The {seconds:.1f} s more would be {seconds / tensors * 1e6:.0f} us for each of"
        f" {tensors} expert tensors, which are gathered, packed and loaded one by one, from Python"
    )


if __name__ == "__main__":
    print_published()
    print_ours()
