"""SFT, GRPO from its checkpoint, an export and its evaluation, as commands run them: what was made from the data of SFT?"""

import json
import os
import subprocess
import sys

import pytest

from launch.executors.executor import ROOT
from launch.governance import graph, search
from launch.governance.audit_check import read, verify
from launch.governance.model_registry import ModelRegistry
from pipeline.lineage.file_hashes import HashCache

pytestmark = pytest.mark.full
SMALL = ("cluster.executor=local", "cluster.train.ranks_per_node=1", "data.train.kwargs={}")
SFT = ("sft.max_num_steps=2", "sft.val_at_end=false")
GRPO = ("needs=[]", "grpo.max_num_steps=1", "grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0")
SAMPLER = ("policy.generation.backend=transformers",)


def run(command: str, *arguments: str, status: int = 0) -> str:
    """Run a command that ends with this status, and return what it printed."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, str(ROOT / f"launch/{command}.py"), *arguments]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_everything_is_traced_to_the_data(tmp_path):
    root, sums, prompts = tmp_path / "runs", tmp_path / "sums.jsonl", tmp_path / "prompts.jsonl"
    sums.write_text("".join(json.dumps({"input": f"{n}+1=", "output": f"{n + 1};{n + 1}"}) + "\n" for n in range(1, 9)))
    prompts.write_text("".join(json.dumps({"input": f"{n}+2=", "answer": str(n + 2)}) + "\n" for n in range(1, 8)))
    sft = ("policy.train_global_batch_size=4", "policy.scheduler=null", *SFT, *SMALL)
    run("submit", "recipe=tiny_sft", f"run_dir={root}/sft", f"data.train.data_path={sums}", *sft)
    batch = ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "policy.train_global_batch_size=4")
    grpo = (f"policy.model_name={root}/sft/hf", "cluster.generate.ranks_per_node=1", *batch, *GRPO, *SMALL, *SAMPLER)
    run("submit", "recipe=tiny_grpo", f"run_dir={root}/grpo", f"data.train.data_path={prompts}", *grpo)
    run("export", f"run={root}/grpo", f"out={tmp_path}/adder")
    few = "evaluate.tasks.addition.data.max_samples=8"
    place = (f"model={tmp_path}/adder", f"run_dir={root}/score", "cluster.executor=local")
    run("evaluate", "suite=tiny", *place, few, *SAMPLER)

    found = graph.read(root)
    renamed = sums.rename(tmp_path / "renamed.txt")
    made = search.descendants(found, search.nodes_at(found, renamed, HashCache(None)))
    kinds = [(each.node.kind, each.node.label) for each in made]
    assert kinds == [
        *(("run", "sft"), ("checkpoint", "sft, step 2"), ("run", "grpo"), ("checkpoint", "grpo, step 1")),
        *(("export", "hf of grpo, step 1"), ("evaluation", f"tiny of {tmp_path.name}/adder")),
    ]
    (begin,) = search.nodes_at(found, root / "score", HashCache(None))
    above = {(found.nodes[key].kind, found.nodes[key].label) for key in found.beyond([begin.key], down=False)}
    assert above >= {*kinds[:-1], ("data", "sums.jsonl"), ("data", "prompts.jsonl")}
    assert all(node.facts["code"] and node.facts["recipe"] for node in found.nodes.values() if node.kind == "run")
    listed = run("lineage", f"made_from={renamed}", f"root={root}")
    assert "made from" in listed and "2 runs, 2 checkpoints, 1 export, 1 evaluation" in listed
    assert not verify(root).findings and verify(root).receipts == 4
    assert [line["action"] for line in read(root)] == ["submit", "submitted"] * 2 + ["export", "submit", "submitted"]
    version = ModelRegistry(root / "registry").add("adder", tmp_path / "adder", root=root)
    assert [(each["suite"], each["questions"]) for each in version.scores] == [("tiny", 8)]
