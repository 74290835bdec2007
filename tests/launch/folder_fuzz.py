"""Run every command over folders with one mutated file: a run's, a sweep's, a model's, or a data file.

A case follows from a seed alone: one mutated copy of what `write` writes, and the commands that read such a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow
from pyarrow import parquet
from safetensors.numpy import save_file

from launch import (
    audit,
    bundle,
    contamination,
    evaluate,
    export,
    lineage,
    registry,
    report,
    status,
    steer,
    submit,
    sweep,
    timeline,
    track,
)
from launch.executors import local
from launch.governance import audit_log, export_lineage, inputs
from launch.governance.model_registry import ModelRegistry
from launch.runs import evaluation_sources, follower_process, score_tables, suites
from launch.runs.follower_process import FollowRequest
from launch.sweeps.sweep_folder import SweepFolder, SweepJob, SweepPlan
from pipeline import config
from pipeline.checkpoints.checkpoint import Checkpoints
from pipeline.config import CheckpointingConfig
from pipeline.files.storage import NO_RETRIES
from pipeline.job.startup import Startup
from pipeline.lineage.input_records import MARK
from pipeline.lineage.lineage_observer import hash_inputs
from pipeline.steering import steer_files
from pipeline.steering.steer_files import ChangeAnswer, KeyChange
from pipeline.tracking.position import Position
from tests.launch import fuzz, made_runs, mutations, written_traces
from tests.launch.fuzz import Case, Outcome
from tests.launch.model import write_recipe

RUN, SWEEP, MODEL = "runs/run", "runs/sweeps/suite/1", "model"
BACKEND = ("policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=false")
TEXTS = made_runs.Texts("?", "a", "b", "c")


# ---- folders ------------------------------------------------------------------------------------------------------------


def write(folder: Path) -> None:
    """Write a model, data, a run with all files that it may have, and a sweep."""
    write_recipe(folder)
    _write_weights(folder / MODEL)
    write_run(folder)
    write_sweep(folder)
    parquet.write_table(pyarrow.table({"input": ["1+1=", "2+2="], "output": ["2", "4"]}), folder / "data.parquet")


def _write_weights(folder: Path) -> None:
    sizes = json.loads((folder / "config.json").read_text())
    hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
    square, half = (hidden, hidden), (hidden // 2, hidden)
    layer = {f"self_attn.{name}_proj.weight": square if name in "qo" else half for name in "qkvo"}
    layer |= {f"mlp.{name}_proj.weight": square for name in ("gate", "up", "down")}
    layer |= {f"{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes = {f"model.layers.0.{name}": shape for name, shape in layer.items()} | {"model.norm.weight": (hidden,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (vocabulary, hidden))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, folder / "model.safetensors")


def write_run(folder: Path) -> None:
    """Write a run that was started twice, changed, saved, exported, evaluated, registered and tracked."""
    run = folder / RUN
    made_runs.folder(run, str(folder / "tiny.yaml"), *BACKEND)
    inputs.write(config.read(run / "recipe.yaml"), run)
    assert not list(hash_inputs(run))
    failure = {"rank": 1, "realm": "train", "host": "n1", "verb": "step", "phase": "loss", "message": "no", "traceback": "T\n"}
    first = made_runs.attempt(run, "1-0", written_traces.BEGAN - 1000, "requeue: a rank failed", failure, "a log\n")
    (first / "failed_step").write_text("train 0\n")
    (first / "bad_nodes").write_text("n1: its disk is full\n")
    latest = made_runs.attempt(run, "1-1", written_traces.BEGAN, "stop: crashed", failure, "a log\n")
    (latest / "progress").write_text("5")
    (run / "attempts/current").write_text("1-1")
    written_traces.cluster(latest, train=2, generate=2, steps=3)
    startup = Startup(latest, {"train": (0, 1), "generate": (2, 3)}, lambda: dict.fromkeys(range(4), ("load", "policy")))
    for stage in ("join the world", "set up", "first step"):
        startup.enter(stage)
    startup.end()
    _write_resources(latest / "resources")
    made_runs.steps(run, 1, 6, TEXTS, lr=0.1)
    steer_files.ask(run, {"grpo.max_num_steps": 9})
    change = KeyChange("grpo.max_num_steps", 10, 20, 10)
    steer_files.write_answer(run, ChangeAnswer(1, 3, (change,), "me", "here", 1e9, 1e9), NO_RETRIES)
    steer_files.ask(run, {"grpo.max_num_steps": 30})
    checkpoints = Checkpoints(run, "1-1", CheckpointingConfig(keep_top_k=None))
    for step in (3, 5):
        partial = checkpoints.begin(step)
        shutil.copytree(folder / MODEL, partial / "hf")
        made = checkpoints.commit(partial, step, 0.5, {"step": step})
    out = folder / "exported"
    shutil.copytree(made.folder / "hf", out, ignore=shutil.ignore_patterns(MARK))
    receipt = audit_log.as_record(audit_log.record("export", run, {"out": str(out)}))
    export_lineage.write(run, made.folder, made.step, out, "hf", receipt)
    _write_evaluation(run)
    ModelRegistry(folder / "runs/registry").add("m", out, root=folder / "runs")
    Position(last=3, digests={1: "a", 3: "b"}, attached={"recipe.yaml": "1"}).write(run / "tracking/wandb.json")


def _write_resources(folder: Path) -> None:
    folder.mkdir()
    for rank in range(2):
        lines = [{"time": 1e9 + at, "cpu": 3.0 * at, "rss_gb": 1.0, "waiting": 0.5 * at} for at in range(3)]
        (folder / f"rank{rank:05d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    warning = {"time": 1e9, "step": 6, "check": "memory", "rank": 0, "message": "97% full"}
    (folder / "warnings.jsonl").write_text(json.dumps(warning) + "\n")


def _write_evaluation(run: Path) -> None:
    source = evaluation_sources.of_checkpoint(
        run, evaluation_sources.read_run(run), evaluation_sources.select(run, "tiny", 5), "tiny"
    )
    folder = source.run_dir
    folder.mkdir(parents=True)
    config.write(suites.inspect("tiny", source, ()).recipe, folder / "recipe.yaml")
    metric = {"value": 0.5, "low": 0.4, "high": 0.6}
    task = {"metric": "score", "metrics": {"score": metric}, "questions": 2, "samples": 2, "truncated": 0.0, "unparsed": 0.5}
    scores = {"suite": "tiny", "model": "m", "step": 5, "tasks": {"addition": task}, "warnings": ["few"]}
    (folder / score_tables.SCORES).write_text(json.dumps(scores))
    (folder / "values.json").write_text(json.dumps({"addition": {"score": {"q0": [1.0], "q1": [0.0]}}}))
    (folder / "answers").mkdir()
    made_runs.ended(folder, 5)
    follower_process.write_record(folder.parent, FollowRequest(run, "tiny"), {3: "its job failed"})


def write_sweep(folder: Path) -> None:
    """Write a sweep of two runs, one of them complete."""
    text = {
        "name": "suite",
        "seeds": [1, 2],
        "runs": {"tiny": {"recipe": str(folder / "tiny.yaml")}},
        "gates": {"learns": {"value": "last(train/loss)", "at_most": 1}},
    }
    (folder / "suite.yaml").write_text(json.dumps(text))
    place = SweepFolder(folder / SWEEP)
    place.path.mkdir(parents=True)
    shutil.copy(folder / "suite.yaml", place.path)
    jobs = [
        SweepJob(f"tiny-{seed}", str(folder / "tiny.yaml"), [], str(place.path / f"runs/tiny-{seed}"), "tiny", seed)
        for seed in (1, 2)
    ]
    plan = SweepPlan("1", "local", str(folder), str(folder / "baseline.json"), [], jobs)
    (place.path / "sweep.json").write_text(json.dumps(asdict(plan)))
    for job in jobs:
        run = made_runs.folder(Path(job.run_dir), str(folder / "tiny.yaml"), f"grpo.seed={job.seed}", *BACKEND)
        made_runs.attempt(run, "local-1-0", written_traces.BEGAN, "done")
        made_runs.steps(run, 1, 3, TEXTS, loss=0.5)
        made_runs.ended(run, 3)
        place.record(job.name, "1")


# ---- cases --------------------------------------------------------------------------------------------------------------

OF_RUN = (
    ("status", RUN),
    ("status", RUN, "json=true"),
    ("status", "runs"),
    ("report", RUN, "out=report.html"),
    ("timeline", RUN, "out=trace.json"),
    ("bundle", RUN, "out=bundle.tar.gz"),
    ("evaluate", "suite=tiny", f"run={RUN}", "dry_run=true"),
    ("evaluate", "suite=tiny", f"run={RUN}", "step=5", "detach=true"),
    ("contamination", f"{RUN}/evaluations/tiny/step_000005", f"run={RUN}"),
    ("steer", RUN, "grpo.max_num_steps=12", "wait=false"),
    ("lineage", RUN, "root=runs"),
    ("lineage", "made_from=data.jsonl", "root=runs"),
    ("audit", "verify", "root=runs"),
    ("registry", "show", "name=m", "registry=runs/registry"),
    ("registry", "promote", "name=m", "version=1", "stage=production", "registry=runs/registry"),
    ("registry", "add", "name=n", "export=exported", "registry=runs/registry", "root=runs"),
    ("track", RUN, "trackers=wandb", "logger.wandb.mode=offline"),
    ("submit", f"follow={RUN}"),
    ("submit", "recipe=tiny.yaml", "plan=true", f"plan_from={RUN}"),
    ("submit", f"recipe={RUN}/recipe.yaml", "dry_run=true"),
    ("submit", f"recipe={RUN}/recipe.yaml", "detach=true"),
)
OF_RUN_WITH_TORCH = (("export", RUN, "out=out"),)
OF_SWEEP = (
    ("status", f"{SWEEP}/runs"),
    ("sweep", f"check={SWEEP}"),
    ("sweep", "sweep=suite.yaml", "id=1", "dry_run=true"),
    ("sweep", "sweep=suite.yaml", "id=1"),
)
OF_MODEL = (
    ("submit", "recipe=tiny.yaml", "policy.random_init=false", "show=true"),
    ("submit", "recipe=tiny.yaml", "policy.random_init=false", "dry_run=true"),
    ("submit", "recipe=tiny.yaml", "plan=true"),
    ("submit", "recipe=tiny_sft", f"policy.model_name={MODEL}", "dry_run=true"),
    ("evaluate", "suite=tiny", f"model={MODEL}", "dry_run=true"),
)
OF_DATA = (
    ("submit", "recipe=tiny.yaml", "dry_run=true"),
    ("submit", "recipe=tiny.yaml", "plan=true"),
    ("submit", "recipe=tiny.yaml", "dry_run=true", "data.train.data_path=data.parquet"),
    ("lineage", "made_from=data.jsonl", "root=runs"),
)
KINDS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "run": ("runs", OF_RUN),
    "sweep": ("runs/sweeps", OF_SWEEP),
    "model": (MODEL, OF_MODEL),
    "data": (".", OF_DATA),
}
"""What is mutated: the folder with the files, and the commands that read it."""
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "audit": audit.main,
    "bundle": bundle.main,
    "contamination": contamination.main,
    "evaluate": evaluate.main,
    "export": export.main,
    "lineage": lineage.main,
    "registry": registry.main,
    "report": report.main,
    "status": status.main,
    "steer": steer.main,
    "submit": submit.main,
    "sweep": sweep.main,
    "timeline": timeline.main,
    "track": track.main,
}


class Folders:
    """Writes the folders once into the current folder, and puts them back before each case."""

    def __init__(self, kept: Path):
        self._kept, self._work = kept, Path("work").absolute()
        self._work.mkdir()
        write(self._work)
        shutil.copytree(self._work, kept, symlinks=True)

    def put_back(self) -> Path:
        """Return the folder, as it was written."""
        for path in self._work.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(self._work)
        shutil.copytree(self._kept, self._work, symlinks=True)
        return self._work


def cases(kind: str, seed: int, folder: Path, torch: bool = False) -> tuple[str, list[Case]]:
    """Mutate a file of `folder`; return what was done and the commands that may read it."""
    draw = random.Random(f"{kind} {seed}")
    below, commands = KINDS[kind]
    path = Path(below) / draw.choice(_of_kind(kind, folder / below))
    done = f"{path}: {mutations.mutate(draw, folder / path)}"
    commands += OF_RUN_WITH_TORCH if torch and kind == "run" else ()
    return done, [Case(command, list(arguments)) for command, *arguments in commands]


def _of_kind(kind: str, folder: Path) -> list[Path]:
    if kind == "data":
        return [Path(name) for name in ("data.jsonl", "data.jsonl", "data.parquet")]
    return mutations.files(folder, (".lock", "sweeps", "plotly") if kind == "run" else (".lock",))


def fuzz_folders(kind: str, seeds: Iterable[int], torch: bool = False) -> Iterator[tuple[str, Outcome]]:
    """Yield (what was mutated, outcome) of each command over each mutated folder.

    torch: also of commands that import it, which takes seconds
    """
    with fuzz.surroundings() as writes, _jobs_that_end_at_once():
        folders = Folders(Path("kept").absolute())
        for seed in seeds:
            folder = folders.put_back()
            done, made = cases(kind, seed, folder, torch)
            os.chdir(folder)
            for case in made:
                yield f"{kind} {seed}: {done}", fuzz.run(case, writes, COMMANDS[case.command])
            os.chdir("..")


def _jobs_that_end_at_once() -> contextlib.AbstractContextManager:
    """Start a process that ends at once in place of a run's controller, which would take minutes."""

    def start(run_dir: Path, environment: dict[str, str], log: Path) -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True)

    return mock.patch.object(local, "start_controller", start)
