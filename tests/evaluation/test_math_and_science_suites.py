"""The suites math and science run whole on data of their formats, with random weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.evaluation.answers import read_answers
from tests.data.test_chat import CHATML
from tests.evaluation.sample_records import RECORDS, write

ROOT = Path(__file__).parents[2]
SMALL = (
    *(
        "policy.random_init=true",
        "policy.precision=float32",
        "policy.generation.backend=transformers",
        "cluster.executor=local",
    ),
    *("policy.hf_config_overrides.max_position_embeddings=8192", "policy.max_total_sequence_length=8192"),
    f"policy.tokenizer.chat_template={json.dumps(CHATML)}",
)
FEWER = [f"evaluate.tasks.{task}.{key}" for task in ("aime24", "aime25") for key in ("num_samples=2", "pass_at=[2]")]
SUITES = {
    "math": (("gsm8k", "minerva_math", "math500", "aime24", "aime25"), FEWER),
    "science": (("gpqa_diamond", "mmlu", "mmlu_pro", "arc_challenge"), []),
}


@pytest.mark.full
@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_runs_whole(suite: str, tmp_path: Path):
    tasks, fewer = SUITES[suite]
    overrides = [*SMALL, *fewer, *write(tmp_path, tasks), *(f"evaluate.tasks.{task}.max_new_tokens=6" for task in tasks)]
    folder = tmp_path / "run"
    command = [sys.executable, "launch/evaluate.py", f"suite={suite}", "model=recipes/tiny", f"run_dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    scores = json.loads((folder / "scores.json").read_text())["tasks"]
    assert set(scores) == set(tasks) and not any(summary["unjudged"] for summary in scores.values())
    for task, summary in scores.items():
        answers = read_answers(folder / "answers" / f"{task}.jsonl")
        split = {"aime24": "train", "gpqa_diamond": "gpqa_diamond/train"}.get(task, "test")
        assert summary["questions"] == sum(len(rows) for name, rows in RECORDS[task].items() if name.endswith(split))
        assert summary["samples"] == len(answers) and summary["truncated"] > 0
        assert 0 <= summary["metrics"]["unparsed"]["value"] <= 1
