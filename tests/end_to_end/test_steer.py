"""steer.py during real runs: locally and under Slurm, two commands at once, and kills, to the last bit."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.checkpoints.checkpoint import complete_in
from pipeline.observe.metrics import read
from pipeline.steering import steer_files
from tests.end_to_end.runs import LOCAL, ROOT, SLURM, Fault, Run, launch, pids_of, printed, submit
from tests.launch.waiting import wait_until

LR = "policy.optimizer.kwargs.lr"
LONG = ("grpo.max_num_steps=7", "cluster.timeouts.silence=300")
HALVE = '{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.5, "total_iters": 9}}'
FIRST = (f"{LR}=1e-3", "loss_fn.reference_policy_kl_penalty=0.2", "loss_fn.ratio_clip_max=0.1")
SECOND = (f"{LR}=5e-4", f"policy.scheduler={HALVE}", "grpo.max_num_steps=6")


def steer(run_dir: Path, *arguments: str, env: dict | None = None) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "launch/steer.py"), str(run_dir), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=env or os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class Held:
    """A run whose rank 0 is stopped in its third step, in which two commands ask for changes at once."""

    def __init__(self, folder: Path, *overrides: str):
        self.folder = folder
        fault = Fault("step", victim=0, count=5, signal=signal.SIGSTOP, once=True)  # two updates in a step
        self.process = launch(folder, *LOCAL, *LONG, *overrides, fault=fault)
        wait_until(lambda: (pids_of(folder) / "done").exists(), "the third step", 300)
        self.pid = int((pids_of(folder) / "0").read_text())
        self.commands = [steer(folder, *FIRST)]
        wait_until(lambda: steer_files.numbers(folder), "the first request", 200)
        self.commands.append(steer(folder, *SECOND, "wait=false"))
        assert self.commands[1].wait(200) == 0
        os.kill(self.pid, signal.SIGCONT)

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: any(line["step"] >= step for line in read(self.folder / "metrics.jsonl")), f"step {step}", 200)

    def told(self) -> list[str]:
        return [command.communicate(timeout=300)[0] for command in self.commands]


def end(held: Held) -> Run:
    try:
        return Run(held.folder, held.process.wait(300), printed(held.folder), 0.0)
    finally:
        held.process.kill()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_steered_run_equals_one_that_is_killed_and_resumed(tmp_path):
    """Also one without a checkpoint, which repeats the steps before the changes."""
    held = Held(tmp_path / "whole")
    first, second = held.told()
    assert "change 1 took effect after step 3: from step 4 on" in first and "change 2 is requested" in second
    whole = end(held)
    assert whole.status == 0, whole.output
    lines = {line["step"]: line for line in whole.metrics()}
    assert list(lines) == [1, 2, 3, 4, 5, 6]
    assert [step for step, line in lines.items() if "steer/changes" in line] == [3] and lines[3]["steer/changes"] == 6
    assert lines[3]["train/lr"] == 3e-3 and 2.5e-4 < lines[4]["train/lr"] < 5e-4
    assert json.loads((whole.folder / "done.json").read_text())["step"] == 6
    assert [len(each["changes"]) for each in complete_in(whole.folder / "checkpoints")[-1].state["steer"]] == [3, 3]
    answers = steer_files.answers(whole.folder)
    assert [(each.request, each.step, each.refused) for each in answers] == [(1, 3, ""), (2, 3, "")]
    assert [(c.old, c.new) for c in answers[1].changes if c.key == LR] == [(1e-3, 5e-4)]  # after the first

    for period in (1, 100):
        held = Held(tmp_path / f"killed_{period}", f"checkpointing.save_period={period}")
        held.told()
        held.wait_for_step(4)
        os.kill(held.pid, signal.SIGKILL)
        assert end(held).status != 0 and not (held.folder / "done.json").exists()
        again = submit(held.folder, *LOCAL, *LONG, f"checkpointing.save_period={period}")
        assert again.status == 0, again.output
        assert again.metrics() == whole.metrics()
        assert len(steer_files.answers(held.folder)) == 2


@pytest.mark.full
def test_supervised_training_with_other_weights_of_data_sets(tmp_path):
    """A request that waits from the start is taken after the first step; a run that resumes after it goes on alike."""
    data = "{dataset_name: scratchpad_addition, kwargs: {size: 60, digits: [1, %d]}}"
    sets = ["data.train=null", *(f"data.datasets.{name}={data % n}" for name, n in (("one", 1), ("two", 2)))]
    keys = ["policy.train_global_batch_size=8", "policy.scheduler=null", *sets]
    found = {}
    for name, stops in (("whole", [4]), ("resumed", [2, 4])):
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        values = {"data.datasets.one.weight": 9.0, "data.datasets.two.weight": 1.0, "sft.val_period": 2, LR: 1e-3}
        steer_files.ask(folder, values)
        for steps in stops:
            command = [sys.executable, "launch/submit.py", "recipe=tiny_sft", f"run_dir={folder}", *LOCAL, *keys]
            subprocess.run([*command, f"sft.max_num_steps={steps}"], cwd=ROOT, check=True, timeout=400)
        found[name] = Run(folder, 0, "", 0.0).metrics()
        assert [(each.step, each.refused) for each in steer_files.answers(folder)] == [(1, "")]
        state = complete_in(folder / "checkpoints")[-1].state["stream"]
        assert state["weights"] == {"one": 9.0, "two": 1.0}
    losses = [[(line["step"], line["train/loss"], line["train/lr"]) for line in lines] for lines in found.values()]
    assert losses[0] == losses[1] and [lr for _, _, lr in losses[0]] == [2e-3, 1e-3, 1e-3, 1e-3]
    validated = [any(key.startswith("val/") for key in line) for line in found["whole"]]
    assert validated == [False, True, False, True]


@pytest.mark.slurm
@pytest.mark.full
@pytest.mark.timeout(900)
def test_under_slurm(tmp_path, slurm_cluster):
    folder = tmp_path / "run"
    process = launch(folder, *SLURM, "grpo.max_num_steps=400", "cluster.timeouts.silence=120", env=slurm_cluster.env)
    try:
        wait_until(lambda: (folder / "metrics.jsonl").exists() and read(folder / "metrics.jsonl"), "the first step", 300)
        refused = steer(folder, "grpo.num_prompts_per_step=2", env=slurm_cluster.env)
        out, err = refused.communicate(timeout=200)
        assert refused.returncode == 2 and "[not-live]" in err, (out, err)
        changed = steer(folder, f"{LR}=1e-4", env=slurm_cluster.env)
        out, err = changed.communicate(timeout=300)
        assert changed.returncode == 0, err
        (answer,) = steer_files.answers(folder)
        assert f"after step {answer.step}: from step {answer.step + 1} on" in out
        last = answer.step + 3
        ended = steer(folder, f"grpo.max_num_steps={last}", "checkpointing.save_period=50", env=slurm_cluster.env)
        out, err = ended.communicate(timeout=300)
        assert ended.returncode == 0, err
        assert process.wait(300) == 0, printed(folder)
    finally:
        process.kill()
    rates = {line["step"]: line["train/lr"] for line in read(folder / "metrics.jsonl")}
    assert rates[answer.step] == 3e-3 and rates[answer.step + 1] == 1e-4
    assert json.loads((folder / "done.json").read_text())["step"] == max(last, steer_files.answers(folder)[-1].step)
