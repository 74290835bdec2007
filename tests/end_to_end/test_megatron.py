"""Whole runs on Megatron-Core: in every layout FSDP2's numbers, on both executors; killed, and resumed at another layout."""

import functools
import os
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, ROOT, SLURM, Fault, submit

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "dense": LlamaConfig(**SHAPE),
    "mixture": Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True),
}
FIVE_STEPS = ("grpo.max_num_steps=5", "checkpointing.enabled=false")
KEYS = ("train/loss", "train/reward", "train/grad_norm", "train/reference_kl", "train/completion_tokens")


def megatron(**keys) -> tuple[str, ...]:
    return ("policy.megatron_cfg.enabled=true", *(f"policy.megatron_cfg.{key}={value}" for key, value in keys.items()))


LAYOUTS = {
    "tp2": ("dense", megatron(tensor_model_parallel_size=2)),
    "pp2": ("dense", megatron(pipeline_model_parallel_size=2)),
    "cp2": ("dense", megatron(context_parallel_size=2)),
    "tp2_sp": ("dense", megatron(tensor_model_parallel_size=2, sequence_parallel="true")),
    "ep2": ("mixture", megatron(expert_model_parallel_size=2, freeze_moe_router="false")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / name)
    return folder


def of(model) -> tuple[str, ...]:
    keys = ("policy.random_init=false", f"policy.model_name={model}", "policy.tokenizer.name=recipes/tiny")
    # Only vLLM samples from a mixture of experts; for the others transformers is quicker to start.
    return (*keys, "policy.generation.backend=vllm", "cluster.timeouts.silence=120") if model.name == "mixture" else keys


@pytest.fixture(scope="module")
def fsdp(models, tmp_path_factory):
    """Return a model's metrics of five steps on FSDP2."""

    @functools.cache
    def metrics(name: str) -> list[dict]:
        run = submit(tmp_path_factory.mktemp("fsdp") / "run", *LOCAL, *FIVE_STEPS, *of(models / name))
        assert run.status == 0, run.output
        return run.metrics()

    return metrics


def assert_equal(lines, expected, tolerance=1e-4):
    assert [line["step"] for line in lines] == [line["step"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        for key in KEYS:
            assert line[key] == pytest.approx(other[key], rel=tolerance, abs=1e-6), (line["step"], key)


# The others in little, and with them all their combinations: tests/train/megatron.
QUICK = ("tp2",)


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.long) for n in LAYOUTS])
def test_equals_fsdp2(tmp_path, models, fsdp, layout):
    model, keys = LAYOUTS[layout]
    run = submit(tmp_path / "run", *LOCAL, *FIVE_STEPS, *of(models / model), *keys)
    assert run.status == 0, run.output
    assert "Megatron-Core trains" in run.output
    assert_equal(run.metrics(), fsdp(model))


@pytest.mark.slurm
@pytest.mark.full
@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.long if i else []) for i, n in enumerate(LAYOUTS)])
def test_equals_fsdp2_on_slurm(tmp_path, models, fsdp, slurm_cluster, layout):
    model, keys = LAYOUTS[layout]
    env = slurm_cluster.env
    run = submit(tmp_path / "run", *SLURM, *FIVE_STEPS, *of(models / model), *keys, env=env)
    assert run.status == 0, run.output
    assert_equal(run.metrics(), fsdp(model))


TP2 = megatron(tensor_model_parallel_size=2)
PP2 = megatron(pipeline_model_parallel_size=2)


@pytest.fixture(scope="module")
def tp2(models, tmp_path_factory):
    """Run four steps at tp2 with asynchronous checkpoints after each, and greedy validation at the end."""
    run = submit(tmp_path_factory.mktemp("tp2") / "run", *LOCAL, *of(models / "dense"), *TP2, *SAVED)
    assert run.status == 0, run.output
    return run


SAVED = ("checkpointing.async_save=true", "grpo.val_at_end=true", "grpo.max_val_samples=6")


@pytest.mark.full  # by default: tests/train/megatron/test_checkpoints.py
def test_a_killed_run_resumes_bit_for_bit(tmp_path, models, tp2):
    """Kill it in the step after a save began, which may or may not have ended."""
    keys = (*LOCAL, *of(models / "dense"), *TP2, *SAVED)
    broken = submit(tmp_path / "run", *keys, fault=Fault("step", victim=1, count=4))
    assert broken.status == 1, broken.output
    rerun = submit(tmp_path / "run", *keys)
    assert rerun.status == 0, rerun.output
    assert rerun.metrics() == tp2.metrics()


@pytest.mark.long
def test_resumes_at_another_layout(tmp_path, models, tp2):
    keys = (*LOCAL, *of(models / "dense"), *SAVED)
    shutil.copytree(tp2.folder, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "done.json").unlink()
    for step in (3, 4):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step_{step:06d}")
    rest = submit(tmp_path / "run", *keys, *PP2)
    assert rest.status == 0, rest.output
    assert rest.metrics()[:2] == tp2.metrics()[:2]
    assert_equal(rest.metrics(), tp2.metrics(), tolerance=1e-5)
    assert rest.metrics() != tp2.metrics()  # two steps were taken anew


@pytest.mark.full  # by default: tests/train/megatron/test_export.py
def test_the_exported_checkpoint_gives_the_runs_completions(tp2, tmp_path):
    """Compare transformers' greedy completions with the last validation's."""
    out = tmp_path / "hf"
    command = [sys.executable, str(ROOT / "launch/export.py"), f"run={tp2.folder}", f"out={out}"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    records = read_rollouts(tp2.folder / "rollouts" / "val_000004.jsonl")
    assert len(records) == 6
    for record in records:
        prompt = torch.tensor([record["prompt_tokens"]])
        said = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :].tolist()
        assert said[: len(record["completion_tokens"])] == record["completion_tokens"]
