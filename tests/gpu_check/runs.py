"""Small runs from end to end: SFT, then GRPO from its result, whose train and generate ranks share GPUs or have their own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.gpu_check.measurement import Place
from tests.gpu_check.table import FAILED, PASSED, Result

TINY = Path(__file__).parents[2] / "recipes/tiny"
SFT, SHARED, APART = "tiny_sft", "tiny_grpo", "tiny_grpo apart"
STEPS = {"full": {SFT: 100, SHARED: 5, APART: 5}, "tiny": {SFT: 2, SHARED: 2, APART: 2}}
"""After 100 steps of SFT some answers are right, so that GRPO has a gradient."""
MEASURED = {
    "train/loss": "loss",
    "train/reward": "reward",
    "train/gen_logprob_error_max": "largest log-prob gap",
    "time/refit": "refit, s",
}
"""Metrics of the last step, and their names in the table."""


def folder(name: str, place: Place) -> Path:
    return place.folder / "runs" / name.replace(" ", "-")


def command(name: str, place: Place, vllm: bool) -> list[str]:
    """Return the command of a run. vllm: whether it is installed; else transformers decodes."""
    recipe, _, _ = name.partition(" ")
    steps, count = STEPS[place.size][name], 2 if name == APART else 1
    keys = [f"recipe={recipe}", f"run_dir={folder(name, place)}", "cluster.executor=local"]
    keys += [f"cluster.train.ranks_per_node={count}"]
    if place.device == "cuda":
        keys.append("policy.precision=bfloat16")
    if name == SFT:
        keys += [f"sft.max_num_steps={steps}", f"checkpointing.save_period={steps}", "sft.val_at_end=false"]
    else:
        keys += [f"grpo.max_num_steps={steps}", "grpo.val_at_start=false", "grpo.val_at_end=false", "needs=[]"]
        trained = folder(SFT, place) / "hf"
        keys += (
            [f"policy.model_name={trained}"] if trained.exists() else [f"policy.model_name={TINY}", "policy.random_init=true"]
        )
        keys += [f"cluster.generate.ranks_per_node={count}"]
        keys += [f"policy.generation.backend={'vllm' if vllm else 'transformers'}"]
        keys += [f"policy.generation.colocated.enabled={str(name == SHARED).lower()}"]
        if not place.full:
            keys += ["grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "policy.train_global_batch_size=16"]
    return [sys.executable, "launch/submit.py", *keys]


def judge(name: str, status: int, output: str, run: Path) -> Result:
    """Read what a run has written."""
    if status or not (run / "done.json").exists():
        return Result(name, FAILED, f"submit.py ended with status {status}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    placed = re.findall(r"this machine has .*?: (.*?); set cluster", output)
    times = [line for line in lines if "time/step" in line]
    numbers = {"steps": float(len(times)), "first step, s": times[0]["time/step"], "last step, s": times[-1]["time/step"]}
    numbers |= {name: times[-1][key] for key, name in MEASURED.items() if key in times[-1]}
    return Result(name, PASSED, *placed[:1], numbers=numbers)
