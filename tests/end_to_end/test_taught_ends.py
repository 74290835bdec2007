"""SFT of a base model with a chat template of the recipe, then GRPO from what it exported: answers end where SFT taught."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from pipeline.config import PolicyConfig, TokenizerConfig
from pipeline.data.stop_tokens import stop_tokens
from pipeline.observe.metrics import read
from tests.data.test_chat import CHATML
from tests.end_to_end.runs import ROOT
from tests.generate.smollm2 import base_tokenizer, needs_smollm2

pytestmark = [pytest.mark.long, needs_smollm2]
SUMS = [("2+2", "4"), ("3+4", "7"), ("1+5", "6"), ("4+4", "8")]


def recipe(path, **sections):
    policy = {
        "train_global_batch_size": 4,
        "max_total_sequence_length": 160,
        "precision": "float32",
        "sequence_packing": {"train_mb_tokens": 256, "logprob_mb_tokens": 256},
        "optimizer": {"kwargs": {"lr": 2e-5}},
    }
    sections["policy"] = {**policy, **sections["policy"]}
    cluster = {"executor": "local", "train": {"ranks_per_node": 1}, "generate": {"ranks_per_node": 1}}
    path.write_text(yaml.safe_dump({**sections, "cluster": cluster}))
    return f"recipe={path}"


def run(path, folder):
    """Run a recipe to its end."""
    command = [sys.executable, str(ROOT / "launch/submit.py"), path, f"run_dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grpo_continues_from_an_export(tmp_path):
    base = base_tokenizer(tmp_path / "base")
    (tmp_path / "chatml.jinja").write_text(CHATML)
    asked = [{"input": f"What is {sum}? Answer with the number only.", "output": answer} for sum, answer in SUMS]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    data = {"train": {"data_path": "sums.jsonl"}}
    taught = recipe(
        tmp_path / "sft.yaml",
        algorithm="sft",
        sft={"max_num_steps": 6, "max_num_epochs": 6},
        policy={"model_name": "base", "tokenizer": {"chat_template": "chatml.jinja"}},
        data=data,
        checkpointing={"save_period": 6, "save_consolidated": True},
    )
    run(taught, tmp_path / "sft")
    exported = tmp_path / "sft/hf"
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    ends = stop_tokens(PolicyConfig(model_name=str(exported), tokenizer=TokenizerConfig(str(exported))))
    assert (exported / "chat_template.jinja").read_text() == CHATML
    assert [token.text for token in ends.tokens] == ["<|endoftext|>", "<|im_end|>"] and ends.taught == 2
    assert not (base / "generation_config.json").exists()

    improved = recipe(
        tmp_path / "grpo.yaml",
        algorithm="grpo",
        grpo={"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_num_steps": 1},
        policy={
            "model_name": str(exported),
            "generation": {"backend": "transformers", "max_new_tokens": 60, "temperature": 0.3},
        },
        data={"train": {**data["train"], "env_name": "sums"}},
        env={"sums": {"kind": "exact_match", "kwargs": {"pattern": r"(\d+)\.?$"}}},
    )
    run(improved, tmp_path / "grpo")
    (metrics,) = read(tmp_path / "grpo/metrics.jsonl")
    shown = ("completion_tokens", "completion_tokens_max", "truncated", "reward")
    print({name: metrics[f"train/{name}"] for name in shown})
    assert metrics["train/truncated"] == 0
