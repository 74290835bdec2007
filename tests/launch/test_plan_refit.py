"""python launch/plan_refit.py: its output for the tiny models, and its errors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import plan_refit
from pipeline.models.shape import ModelShape

ROOT = Path(__file__).parents[2]
TINY, TINY_MOE = (ROOT / f"recipes/{name}/config.json" for name in ("tiny", "tiny_moe"))


def plan(*arguments):
    """Return (status, output, errors) of the command, run from the repository's root as a user does."""
    command = [sys.executable, "launch/plan_refit.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stdout, done.stderr


def parameters(config: Path) -> int:
    return ModelShape.of(json.loads(config.read_text())).parameters


def row(output: str, name: str) -> list[str]:
    """Return the min, mean and max of a line."""
    (line,) = (line for line in output.splitlines() if line.strip().startswith(name))
    return re.split(r"\s{2,}", line.strip())[1:]


def test_a_dense_model_under_fsdp(capsys):
    """The recipe's own model may be missing: it has the shape of its needed recipe's initial model."""
    assert plan_refit.main(["recipe=tiny_grpo", "cluster.network.nic_gb_per_s=1"]) == 0
    output = capsys.readouterr().out
    size = parameters(TINY) * 4
    assert f"{parameters(TINY):,} parameters" in output
    assert "FSDP2 trains" in output
    assert row(output, "bytes into a generate rank") == [f"{size / 1e6:.3g} MB"] * 3  # TP 1: all of it, once
    assert re.search(r"predicted .* bound by (copies|NIC out|NIC in|node|relayed copies)", output)
    assert re.search(r"broadcast .* for the reference", output)


def test_a_mixture_of_experts_under_megatron(capsys):
    layout = [
        "policy.megatron_cfg.enabled=true",
        "policy.megatron_cfg.expert_model_parallel_size=2",
        "policy.generation.vllm_cfg.tensor_parallel_size=2",
        "policy.generation.vllm_cfg.expert_parallel_size=2",
        "policy.precision=bfloat16",
    ]
    assert plan_refit.main(["recipe=tiny_grpo", f"model_config={TINY_MOE}", *layout]) == 0
    output = capsys.readouterr().out
    assert f"{parameters(TINY_MOE):,} parameters" in output
    assert "2 ranks, 2 a node, expert_model_parallel 2; Megatron-Core" in output
    assert "2 ranks, 2 a node, tensor_parallel 2, expert_parallel 2; 1 engine of 2 ranks" in output
    shape = ModelShape.of(json.loads(TINY_MOE.read_text()))
    everywhere = shape.other  # norms and routers are on both ranks, all else is cut in two
    size = 2 * (everywhere + (shape.parameters - everywhere) / 2)
    assert row(output, "bytes into a generate rank")[1] == f"{size / 1e3:.3g} kB"


SMALL_DEEPSEEK = [  # its three dense layers and the first with experts, on two ranks each
    "recipe=deepseek_v3_grpo",
    "policy.hf_config_overrides.num_hidden_layers=4",
    "policy.megatron_cfg.pipeline_model_parallel_size=1",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage=null",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage=null",
    "policy.megatron_cfg.expert_model_parallel_size=2",
    *(f"policy.generation.vllm_cfg.{name}_parallel_size=2" for name in ("tensor", "expert")),
    *(f"cluster.{name}.{key}" for name in ("train", "generate") for key in ("nodes=1", "gpus_per_node=2")),
]


@pytest.mark.full
def test_deepseek_is_planned():
    status, output, errors = plan(*SMALL_DEEPSEEK)
    assert status == 0 and "1 engine of 2 ranks" in output, errors


def test_what_cannot_be_recorded_is_one_error_that_names_the_rank(capsys, monkeypatch):
    def record_sides(recipe, progress):
        progress("vLLM, rank 1 of 2")
        raise KeyError("layers.3.mlp.gate.e_score_correction_bias")

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("pipeline.refit.recorded_sides.record_sides", record_sides)
    assert plan_refit.main(SMALL_DEEPSEEK) == 2
    progress, error = capsys.readouterr().err.splitlines()
    assert progress == "recording vLLM, rank 1 of 2"
    assert error.startswith(
        "error: policy.model_name: got unsloth/DeepSeek-V3-bf16, of which vLLM, rank 1 of 2 cannot be recorded"
    )
    assert "(KeyError: 'layers.3.mlp.gate.e_score_correction_bias'); expected" in error and error.endswith("[unsupported]")


def test_fewer_layers_than_stages_are_refused(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert plan_refit.main(SMALL_DEEPSEEK[:2]) == 2
    assert "num_layers_in_first_pipeline_stage: got first 3 and last 2" in capsys.readouterr().err


BLOCKED = """
import sys
sys.modules |= dict.fromkeys(("torch", "transformers", "vllm", "megatron"))
sys.path.insert(0, ".")
from launch import plan_refit
sys.exit(plan_refit.main(sys.argv[1:]))
"""
VLLM = "policy.generation.vllm_cfg"


def test_without_the_packages_of_a_run_it_says_what_to_install():
    command = [sys.executable, "-c", BLOCKED, "recipe=tiny_grpo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2 and not done.stdout
    assert "torch" in done.stderr and "make setup" in done.stderr and "[not-installed]" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "key", "code"),
    [
        (["recipe=tiny_grp"], "tiny_grp", ""),
        (["recipe=tiny_sft"], "algorithm", "unsupported"),
        (["recipe=tiny_grpo", "model_config=recipes/tiny_grpo.yaml"], "recipes/tiny_grpo.yaml", ""),
        (["recipe=tiny_grpo", "model_config=recipes/tiny/tokenizer.json"], "model_config", "bad-format"),
        (["recipe=tiny_grpo", "cluster.network.nic_gb_per_s=0"], "cluster.network.nic_gb_per_s", ""),
        (["recipe=tiny_grpo", "policy.model_name=nowhere/model"], "policy.model_name", ""),
        (["recipe=tiny_grpo", f"{VLLM}.tensor_parallel_size=3"], f"{VLLM}.tensor_parallel_size", ""),
    ],
)
def test_wrong_input_is_refused_before_anything_is_planned(arguments, key, code, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert plan_refit.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and key in errors
    assert f"[{code}]" in errors or not code


def test_the_command_ends_with_status_2():
    status, output, errors = plan("recipe=tiny_grpo", "cluster.train.ranks=2")
    assert (status, output) == (2, "")
    assert "cluster.train.ranks" in errors
