"""Translate the entry point `sft`: supervised training on messages."""

from __future__ import annotations

from typing import Any

from launch.recipes.prime_rl import prime_rl_training
from launch.recipes.prime_rl.prime_rl_defaults import DEPLOYMENT
from launch.recipes.translation.rules import Changed, Done, Ignored, Only, apply
from launch.recipes.translation.translator import Translator
from pipeline.algorithms.sections import UNBOUNDED

RULES = (
    Done(
        "data.batch_size data.seq_len data.micro_batch_size data.name data.subsets data.splits data.probabilities data.shuffle"
    ),
    Done("data.seed val.interval val.eval_on_start val.data.name val.data.subsets val.data.splits max_steps"),
    Only("data.type", ("sft",), "fake data", "sft"),
    Only("data.fake", (None,), "fake data", "sft"),
    Only("data.fake.*", (), "fake data", "no section data.fake"),
    Only("data.loss_mask.assistant", (True, None), "a loss without the assistant's turns", "true"),
    Only("data.loss_mask.system data.loss_mask.user data.loss_mask.tool", (False, None), "a loss on other turns", "false"),
    Changed("data.stopping_strategy", ("all_exhausted", None), "data sets are drawn by weight, and repeat where they end"),
    Ignored("data.num_workers data.length data.input_ids val.data.*"),
    Ignored("eval eval.* inference inference.*", "launch/evaluate.py evaluates checkpoints, in jobs of their own"),
    Ignored("renderer.*", "the tokenizer's chat template renders messages"),
    Ignored("ckpt ckpt.* resume resume.* monitors monitors.* tokenizer.* slurm slurm.*"),
    Ignored("output_dir clean run.* matmul_precision memory_profiler_path gc gc.* trace_path dist_timeout_seconds"),
    Ignored("heartbeat* log.* weight_broadcast.* dry_run env_vars.* deployment deployment.*"),
)


def translate(t: Translator) -> None:
    """Translate supervised training."""
    t.put("algorithm", "sft", "data.name")
    prime_rl_training.model(t, "model")
    steps = prime_rl_training.length(t, "sft", "")
    prime_rl_training.optimizer(t, "", steps)
    prime_rl_training.shared(t, "")
    _batches(t)
    _data(t)
    given = {**DEPLOYMENT, **(t.get("deployment") or {})}
    nodes = given.get("num_train_nodes", 2) if given["type"] == "multi_node" else 1
    gpus = given["num_train_gpus"] if given["type"] == "single_node" else given["gpus_per_node"]
    t.put("cluster.train.nodes", nodes, "deployment.num_train_nodes")
    t.put("cluster.train.gpus_per_node", gpus, "deployment.num_train_gpus")
    apply(t, RULES)


def _batches(t: Translator) -> None:
    size, tokens, micro = (t.get(f"data.{name}") for name in ("batch_size", "seq_len", "micro_batch_size"))
    t.put("policy.train_global_batch_size", size, "data.batch_size")
    t.put("policy.train_micro_batch_size", micro, "data.micro_batch_size")
    t.put("policy.sequence_packing.enabled", True, "data.seq_len")
    for passes in ("train", "logprob"):
        t.put(f"policy.sequence_packing.{passes}_mb_tokens", tokens * micro, "data.seq_len")
    t.put("policy.max_total_sequence_length", tokens, "data.seq_len")
    t.put("data.max_input_seq_length", tokens, "data.seq_len")
    t.put("data.overlong_prompts", "drop", "data.seq_len")
    text = (
        f"an update has {size} records; prime-rl's has {size} rows of {tokens} tokens, each of several records."
        " policy.train_global_batch_size=N sets another size. Longer records are left out; prime-rl cuts them"
    )
    t.change(f"data.batch_size={size}", text)


def _data(t: Translator) -> None:
    t.put("data.shuffle", t.get("data.shuffle"), "data.shuffle")
    t.put("sft.seed", t.get("data.seed"), "data.seed")
    t.put("sft.max_val_samples", UNBOUNDED, "val.data.name")
    _sets(t, "data", "data.train", "data.datasets")
    validates = isinstance(t.get("val"), dict)
    t.put("sft.val_period", t.get("val.interval", 50) if validates else 0, "val.interval")
    if validates:
        t.put("sft.val_at_start", t.get("val.eval_on_start") is True, "val.eval_on_start")
        _sets(t, "val.data", "data.validation", "data.validations")


def _sets(t: Translator, theirs: str, one: str, several: str) -> None:
    name: Any = t.get(f"{theirs}.name", "PrimeIntellect/Reverse-Text-SFT")
    subsets, splits, weights = (t.get(f"{theirs}.{key}") for key in ("subsets", "splits", "probabilities"))
    number = max(len(subsets or [None]), len(splits or [None]))
    if number > 1 and one == "data.train":
        t.put(one, None, f"{theirs}.subsets")
    for index in range(number):
        ours = one if number == 1 else f"{several}.part_{index}"
        t.put(f"{ours}.dataset_name", name, f"{theirs}.name")
        t.put(f"{ours}.split", splits[index] if splits else "train", f"{theirs}.splits")
        if subsets:
            t.put(f"{ours}.subset", subsets[index], f"{theirs}.subsets")
        if weights and number > 1:
            t.put(f"{ours}.weight", weights[index], f"{theirs}.probabilities")
