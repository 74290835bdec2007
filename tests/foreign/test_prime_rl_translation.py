"""Keys of prime-rl become our keys with our meaning, a note, or a problem that names what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.recipes import reading
from launch.recipes.foreign import ForeignSource
from launch.recipes.prime_rl import reading_prime_rl
from pipeline.config.config_tree import ConfigMapping
from pipeline.config.loading import Layers
from tests.problems import refused

RL = """
max_steps = 20
seq_len = 2048
[model]
name = "m"
[orchestrator]
batch_size = 128
group_size = 16
[[orchestrator.train.source]]
name = "words"
[orchestrator.train.source.env.taskset]
id = "reverse-text"
longest = 5
[orchestrator.train.source.env.agent.harness]
id = "null"
[trainer.optim]
lr = 3e-6
[ckpt]
[inference]
"""
SFT = 'max_steps = 5\n[model]\nname = "m"\n[data]\nname = "d"\nbatch_size = 4\nseq_len = 1024\n'


def layers(folder: Path, text: str, *arguments: str, name: str = "rl.toml") -> Layers:
    path = folder / name
    path.write_text(text)
    return reading_prime_rl.read(ForeignSource(path, arguments))


def value(found: Layers, key: str) -> Any:
    node = found.trees[0].find(key)
    return node.plain() if isinstance(node, ConfigMapping) else node and node.value


TRANSLATED = [
    ("", "grpo.num_prompts_per_step", 8),
    ("", "env.words.kwargs", {"taskset": "reverse-text", "config": {"longest": 5}}),
    ("", "data.train.dataset_name", "pipeline.environments.verifiers.tasks"),
    ("", "loss_fn.drift_penalty", 1e-3),
    ("--trainer.loss.dppo-mask-low 0.1", "loss_fn.ratio_clip_min", 0.1),
    ("--orchestrator.max-off-policy-steps 0", "grpo.async_grpo.enabled", False),
    ("--trainer.model.seq-len 4096", "policy.sequence_packing.train_mb_tokens", 4096),
    ("--trainer.model.ac None", "policy.dtensor_cfg.activation_checkpointing", False),
    ("--no-trainer.model.ac", "policy.dtensor_cfg.activation_checkpointing", False),
    ("--trainer.model.lora.rank 8", "policy.dtensor_cfg.lora_cfg.dim", 8),
    ("--trainer.model.lora.target-modules q_proj k_proj", "policy.dtensor_cfg.lora_cfg.target_modules", ["q_proj", "k_proj"]),
    ("--trainer.model.full-offload", "policy.max_grad_norm", None),
    ("--trainer.optim.max-norm None", "policy.max_grad_norm", None),
    ("--trainer.optim.type sgd", "policy.optimizer.kwargs.momentum", 0.9),
    ("--trainer.optim.type muon", "policy.optimizer.name", "torch.optim.Muon"),
    ("--trainer.optim.type muon", "policy.optimizer.kwargs.adamw", {"betas": [0.9, 0.95]}),
    ("--deployment.num-infer-gpus 6", "cluster.generate.gpus_per_node", 6),
    ("", "cluster.share_nodes", True),
    (
        "--deployment.type multi_node --deployment.num-train-nodes 2 --deployment.num-infer-nodes 1"
        " --deployment.num-infer-replicas 3",
        "cluster.generate.nodes",
        3,
    ),
    ("--slurm.partition gpus --slurm.time 1-02:30:00", "cluster.time_min", 1590),
    ("--ckpt.interval 5 --ckpt.keep-last 2", "checkpointing.save_period", 5),
    ("--monitors.wandb.project p", "logger.wandb.project", "p"),
    ("--inference.vllm.quantization fp8", "policy.generation.vllm_cfg.precision", "fp8"),
    ("--inference.vllm.max_num_batched_tokens 4096", "policy.generation.vllm_kwargs.max_num_batched_tokens", 4096),
]


@pytest.mark.parametrize(("options", "key", "expected"), TRANSLATED, ids=[f"{o} {k}" for o, k, _ in TRANSLATED])
def test_a_key_becomes_ours(tmp_path: Path, options: str, key: str, expected: object) -> None:
    found = layers(tmp_path, RL, *options.split())
    assert not found.problems and value(found, key) == expected


REFUSED = [
    ("--orchestrator.batch-size many", "orchestrator.batch_size", "expected a whole number"),
    ("--trainer.optim.lr fast", "trainer.optim.lr", "expected a number"),
    ("--orchestrator.algo.type max_rl", "orchestrator.algo.type", "MaxRL"),
    ("--orchestrator.algo.type opd", "orchestrator.algo.type", "algorithm=distillation"),
    ("--trainer.loss.type ipo", "trainer.loss.type", "symmetric trust region"),
    ("--trainer.loss.adv-tau 2", "trainer.loss.adv_tau", "a factor on advantages"),
    (
        "--orchestrator.algo.length_penalty.type linear",
        "orchestrator.algo.length_penalty.type",
        "a penalty on tokens and turns",
    ),
    ("--orchestrator.batch-size 100", "orchestrator.batch_size", "a multiple of orchestrator.group_size=16"),
    ("--trainer.optim.type sign_sgd", "trainer.optim.type", "this optimizer"),
    ("--trainer.model.quantization.type fp8", "trainer.model.quantization.type", "training in 8 bits"),
    ("--trainer.model.name other", "trainer.model.name", "expected one of the two"),
    ("--orchestrator.batchsize 3", "orchestrator.batchsize", "did you mean 'orchestrator.batch_size'"),
    ("--trainer.loss.klt 3", "trainer.loss.klt", "neither a key of prime-rl"),
    ("--trainer.model.lora.rnk 3", "trainer.model.lora.rnk", "neither a key of prime-rl"),
    ("--orchestrator.eval.interval 3", "orchestrator.eval.source", "got no source of tasks"),
    ("--trainer.optim.lrr 3", "trainer.optim.lrr", "did you mean 'trainer.optim.lr'"),
]


@pytest.mark.parametrize(("options", "key", "text"), REFUSED, ids=[o for o, _, _ in REFUSED])
def test_what_is_missing_is_named(tmp_path: Path, options: str, key: str, text: str) -> None:
    found = layers(tmp_path, RL, *options.split())
    assert [problem.key for problem in found.problems] == [key] and text in found.problems[0].message


SOURCES = [
    ('[orchestrator.train.source.curriculum.sampler]\ntype = "difficulty_pool"\n', "pools of tasks by their difficulty"),
    ('[orchestrator.train.source.env.agent.runtime]\ntype = "prime"\n', "tasks in containers or sandboxes"),
    ('[orchestrator.train.source.env.player.harness]\nid = "null"\n', "environments of several agents"),
    ("[orchestrator.train.source.sampler]\ntype = 'x'\n", "did you mean 'sampling'?"),
    ("[orchestrator.train.source.sampling]\ntemperature = 0.5\n", "another sampling for a source"),
]


@pytest.mark.parametrize(("more", "text"), SOURCES, ids=[text for _, text in SOURCES])
def test_a_source_that_is_not_supported_is_named(tmp_path: Path, more: str, text: str) -> None:
    found = layers(tmp_path, RL.replace("[trainer.optim]", f"{more}[trainer.optim]"))
    assert any(text in problem.message for problem in found.problems)


def test_a_gate_on_groups_without_advantages_is_dynamic_sampling(tmp_path: Path) -> None:
    gate = '[orchestrator.train.source.curriculum.gates.zero]\ntype = "advantage_range"\n[trainer.optim]'
    found = layers(tmp_path, RL.replace("[trainer.optim]", gate))
    assert not found.problems and value(found, "grpo.use_dynamic_sampling") is True


def test_several_sources_and_an_evaluation(tmp_path: Path) -> None:
    second = '[[orchestrator.train.source]]\nratio = 3\n[orchestrator.train.source.env.taskset]\nid = "sums"\n[trainer.optim]'
    evaluation = "[orchestrator.eval]\ninterval = 5\nnum_examples = 64\ngroup_size = 4\n[[orchestrator.eval.source]]\n"
    evaluation += '[orchestrator.eval.source.env.taskset]\nid = "sums"\n'
    found = layers(tmp_path, RL.replace("[trainer.optim]", second) + evaluation)
    assert not found.problems and value(found, "data.train") is None
    assert {name: one["weight"] for name, one in value(found, "data.datasets").items()} == {"words": 1.0, "sums": 3.0}
    assert value(found, "data.validations.sums.kwargs") == {"taskset": "sums", "size": 64}
    assert value(found, "grpo.val_period") == 5 and value(found, "grpo.val_num_generations_per_prompt") == 4


def test_files_of_sections_and_overlays(tmp_path: Path) -> None:
    """An orchestrator's file with a trainer's; a later file wins; a value has the line of its file."""
    (tmp_path / "train.toml").write_text("[model]\nseq_len = 4096\n[optim]\nlr = 1e-5\n")
    (tmp_path / "more.toml").write_text("[trainer.optim]\nlr = 2e-5\n")
    orchestrator = (
        'batch_size = 32\ngroup_size = 8\n[model]\nname = "m"\n[[train.source]]\n[train.source.env.taskset]\nid = "sums"\n'
    )
    words = ("--trainer", "@", "train.toml", "@", "more.toml", "--trainer.model.name", "m")
    found = layers(tmp_path, orchestrator, *words, name="orch.toml")
    assert not found.problems and value(found, "policy.optimizer.kwargs.lr") == 2e-5
    assert value(found, "grpo.num_prompts_per_step") == 4 and value(found, "policy.sequence_packing.train_mb_tokens") == 4096
    node = found.trees[0].find("grpo.num_generations_per_prompt")
    assert node is not None and "orch.toml:2" in (node.origin or "")


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "rl.toml").write_text(RL)
    found = layers(tmp_path, "LR=1e-5\nuv run rl @ rl.toml --trainer.optim.lr $LR\n", "--max-steps", "9", name="run.sh")
    assert value(found, "policy.optimizer.kwargs.lr") == 1e-5 and value(found, "grpo.max_num_steps") == 9


def test_supervised_training(tmp_path: Path) -> None:
    found = layers(
        tmp_path, SFT + 'subsets = ["a", "b"]\nprobabilities = [0.2, 0.8]\n[val]\ninterval = 10\n[val.data]\nname = "v"\n'
    )
    assert not found.problems and value(found, "algorithm") == "sft"
    assert {name: one["weight"] for name, one in value(found, "data.datasets").items()} == {"part_0": 0.2, "part_1": 0.8}
    assert value(found, "sft.val_period") == 10 and value(found, "data.validation.dataset_name") == "v"
    assert value(found, "policy.sequence_packing.train_mb_tokens") == 1024
    masked = layers(tmp_path, SFT + "[data.loss_mask]\nuser = true\n")
    assert [problem.key for problem in masked.problems] == ["data.loss_mask.user"]


def test_a_file_that_is_not_toml_is_refused(tmp_path: Path) -> None:
    with refused(("recipe", "bad-format")):
        layers(tmp_path, "a = = 1\n")


def test_our_commands_read_it(tmp_path: Path) -> None:
    """A whole reading, whose keys our schema and checks accept."""
    path = tmp_path / "rl.toml"
    path.write_text(RL)
    recipe = reading.load(str(path), ["--orchestrator.batch-size", "64", "grpo.seed=7"])
    assert recipe.grpo.num_prompts_per_step == 4 and recipe.grpo.seed == 7 and recipe.loss_fn.use_dppo
