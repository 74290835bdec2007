"""Whole runs: the same numbers on both executors, and generation that equals a fresh engine with the exported checkpoint."""

import json

import pytest

from pipeline import config
from pipeline.observe.metrics import read, read_rollouts
from tests.end_to_end.runs import LOCAL, SLURM, Fault, submit

VLLM = ("policy.generation.backend=vllm", "cluster.timeouts.silence=120")


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Run three steps of vLLM and FSDP2 with greedy validation at the end, exported."""
    folder = tmp_path_factory.mktemp("local") / "run"
    run = submit(folder, *VLLM, *LOCAL, *EXPORTED)
    assert run.status == 0, run.output
    return run


EXPORTED = (
    "grpo.max_num_steps=3",
    "grpo.val_at_end=true",
    "grpo.max_val_samples=6",
    "checkpointing.save_consolidated=true",
)


@pytest.mark.slurm
def test_slurm_equals_local_to_the_last_bit(tmp_path, uninterrupted, slurm_cluster):
    """Environments have a node of their own, which the local run does not have."""
    apart = ("cluster.generate.nodes=1", "cluster.generate.ranks_per_node=2", "cluster.environment.nodes=1")
    run = submit(tmp_path / "run", *SLURM, *apart, "grpo.max_num_steps=2", env=slurm_cluster.env)
    assert run.status == 0, run.output
    assert run.metrics() == uninterrupted[:2]
    (log,) = run.folder.glob("attempts/*/rank00004.log")
    assert log.read_text().count("runs the environments of an engine") == 2


@pytest.mark.full  # by default with the transformers engine
@pytest.mark.slurm
def test_slurm_equals_local_with_vllm(tmp_path, local, slurm_cluster):
    run = submit(tmp_path / "run", *VLLM, *SLURM, *EXPORTED, env=slurm_cluster.env)
    assert run.status == 0, run.output
    assert len(run.metrics()) == 3
    assert run.metrics() == local.metrics()


@pytest.mark.full  # by default with the transformers engine: test_kill.py
def test_a_killed_run_of_vllm_resumes_bit_for_bit(tmp_path, local):
    """The engine starts anew, with another history, and still draws the same tokens."""
    broken = submit(tmp_path / "run", *VLLM, *LOCAL, *EXPORTED, fault=Fault("decode", victim=3, actor=2, count=3))
    assert broken.status == 1, broken.output
    assert [line["step"] for line in broken.metrics()] == [1, 2]
    rerun = submit(tmp_path / "run", *VLLM, *LOCAL, *EXPORTED)
    assert rerun.status == 0, rerun.output
    assert rerun.metrics() == local.metrics()


@pytest.mark.full  # by default: tests/generate/test_vllm.py and tests/train/test_layouts.py
def test_tensor_parallel_run_agrees(tmp_path, local):
    """One train rank pair and one engine pair under tensor parallelism: the same samples, the same numbers up to rounding."""
    tensor = ("policy.dtensor_cfg.tensor_parallel_size=2", "policy.generation.vllm_cfg.tensor_parallel_size=2")
    run = submit(tmp_path / "run", *VLLM, *LOCAL, "grpo.max_num_steps=2", "checkpointing.enabled=false", *tensor)
    assert run.status == 0, run.output
    for line, expected in zip(run.metrics(), local.metrics(), strict=False):
        assert line["train/gen_logprob_error_max"] < 1e-4
        for key in ("train/reward", "train/loss", "train/grad_norm", "train/reference_kl", "train/completion_tokens"):
            assert line[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), key
    assert len(run.metrics()) == 2


def test_sampled_logprobs_equal_the_train_backends(local):
    lines = read(local.folder / "metrics.jsonl")
    assert lines
    for line in lines:
        assert line["train/gen_logprob_error_max"] < 1e-4
        assert 1 <= line["train/token_mult_prob_error"] < 1 + 1e-4


def test_training_moved_the_policy(local):
    first, *_, last = local.metrics()
    assert first["train/loss"] != last["train/loss"]
    assert last["train/reference_kl"] > 1e-5


@pytest.mark.full  # by default: test_exported_checkpoint_loads_in_transformers, and tests/generate/test_vllm.py
def test_generation_equals_a_fresh_vllm_with_the_exported_checkpoint(local):
    """The process has no state of the run."""
    records = read_rollouts(local.folder / "rollouts" / "val_000003.jsonl")
    assert len(records) == 6
    assert all(record["spans"] == [[3, len(record["completion_tokens"])]] for record in records)
    from tests.end_to_end.fresh_vllm import greedy

    completions = greedy(local.folder / "hf", [record["prompt_tokens"] for record in records], max_tokens=12)
    assert completions == [record["completion_tokens"] for record in records]


def test_exported_checkpoint_loads_in_transformers(local):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(local.folder / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(local.folder / "hf")
    record = read_rollouts(local.folder / "rollouts" / "val_000003.jsonl")[0]
    prompt = torch.tensor([record["prompt_tokens"]])
    out = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
    assert out.tolist()[: len(record["completion_tokens"])] == record["completion_tokens"]
    assert tokenizer.decode(record["prompt_tokens"]) == record["prompt"]


def test_a_run_is_a_folder(local):
    folder = local.folder
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest
    assert {
        "recipe.yaml",
        "batch.sh",
        "metrics.jsonl",
        "tensorboard",
        "rollouts",
        "checkpoints",
        "attempts",
        "done.json",
        "hf",
    } <= {path.name for path in folder.iterdir()}
    logs = list(folder.glob("attempts/*/rank*.log"))
    assert len(logs) == 4


def test_a_finished_run_does_nothing_more(local):
    before = local.metrics()
    again = submit(local.folder, *VLLM, *LOCAL, *EXPORTED)
    assert again.status == 0, again.output
    assert local.metrics() == before


@pytest.mark.full
def test_the_engines_log_probs_replace_a_pass_and_a_choice_is_kept(tmp_path):
    """Both updates of a step have ratios to the engines. Recomputation and microbatches are chosen once, for both attempts."""
    section, packing = "policy.dtensor_cfg", "policy.sequence_packing"
    null = (
        f"{section}.activation_checkpointing=null",
        f"{section}.recompute_granularity=null",
        f"{packing}.train_mb_tokens=null",
    )
    keys = (*LOCAL, *null, "loss_fn.use_generation_logprobs=true", "cluster.generate.ranks_per_node=1")
    first = submit(tmp_path / "run", *keys, "grpo.max_num_steps=1")
    assert first.status == 0, first.output
    assert f"{section}.activation_checkpointing=true {packing}.train_mb_tokens=4096" in " ".join(first.output.split())
    second = submit(tmp_path / "run", *keys, "grpo.max_num_steps=2")
    assert second.status == 0, second.output
    assert "as the run began" in second.output
    policy = config.read(tmp_path / "run/recipe.yaml").policy
    assert policy.dtensor_cfg.activation_checkpointing and policy.sequence_packing.train_mb_tokens == 4096
    one, two = second.metrics()
    for line in (one, two):
        assert line["train/sampling_importance_ratio"] == pytest.approx(1)
        assert line["train/ratio_max"] > 1 > line["train/ratio_min"]
