"""Run an evaluation of one task a turn. Arguments: folder of the model, number of turns."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

from typing_extensions import override

from pipeline import config
from pipeline.evaluation.answers import AnswerLog
from pipeline.evaluation.engines import Engines
from pipeline.evaluation.sampled import GenerationTask
from pipeline.main import main as run
from tests.benchmarks import our_evaluation
from tests.benchmarks.contender import Turns
from tests.benchmarks.evaluation import ANSWER, FOLDER, LONGEST, TOGETHER, cpu_s, write_records
from tests.world.secret import write_secret

TURNS: Turns | None = None  # set by `main`


class MeasuredTask(GenerationTask):
    """Waits for its turn, and measures the asking."""

    @override
    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        turns = our_evaluation.TURNS
        assert turns is not None
        turns.wait()
        begun, began = cpu_s(), time.perf_counter()
        super().ask(engines, answers)
        spent = {"cpu_s": cpu_s() - begun, "wall_s": time.perf_counter() - began}
        texts = {answer.question: answer.text for answer in answers.all()}
        turns.reply({**spent, "texts": [texts[question.id] for question in self._questions.values()]})


def main() -> None:
    model, count = sys.argv[1], int(sys.argv[2])
    our_evaluation.TURNS = Turns()
    run_dir = FOLDER.absolute() / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    attempt = run_dir / "attempts/1-0"
    attempt.mkdir(parents=True)
    task = {
        "kind": "tests.benchmarks.our_evaluation.FirstTask",
        "env_name": "exact",
        "apply_chat_template": False,
        "max_new_tokens": ANSWER,
    }
    tasks = {}
    for turn, path in enumerate(write_records(run_dir, count)):
        tasks[f"turn{turn}"] = {**task, "data": {"data_path": str(path)}}
        task["kind"] = "tests.benchmarks.our_evaluation.MeasuredTask"
    recipe = {
        "algorithm": "evaluate",
        "evaluate": {"tasks": tasks},
        "policy": {
            "model_name": str(Path(model).absolute()),
            "max_total_sequence_length": LONGEST + ANSWER,
            "precision": "float32",
            "generation": {
                "backend": "vllm",
                "max_num_seqs": TOGETHER,
                "vllm_cfg": {"enforce_eager": True},
                "vllm_kwargs": {"kv_cache_memory_bytes": 256 << 20},
            },
        },
        "env": {"exact": {"kind": "exact_match"}},
        "cluster": {"executor": "local"},
    }
    import yaml

    (run_dir / "suite.yaml").write_text(yaml.safe_dump(recipe))
    config.write(config.load(str(run_dir / "suite.yaml"), [f"run_dir={run_dir}"]), run_dir / "recipe.yaml")
    write_secret(run_dir)
    (attempt / "started").write_text(str(time.time()))
    os.environ |= {
        "HETSTEP_RANK": "0",
        "HETSTEP_WORLD_SIZE": "1",
        "HETSTEP_LOCAL_RANK": "0",
        "HETSTEP_NODE": "here",
        "HETSTEP_MASTER_ADDR": "127.0.0.1",
        "HETSTEP_ATTEMPT": attempt.name,
        "HETSTEP_END_TIME": "",
    }
    run(run_dir)


class FirstTask(MeasuredTask):
    """Says that the model is loaded."""

    @override
    def ask(self, engines: Engines, answers: AnswerLog) -> None:
        assert our_evaluation.TURNS is not None
        our_evaluation.TURNS.reply({})
        super().ask(engines, answers)


if __name__ == "__main__":
    main()
