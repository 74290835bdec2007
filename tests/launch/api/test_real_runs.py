"""The Python API with real runs of the tiny model: submit, watch, stop, continue, export, evaluate."""

import hetstep
import pytest

from tests.launch.api import program
from tests.launch.waiting import wait_until

pytestmark = pytest.mark.full
SMALL = {
    "sft": {"max_val_samples": 16, "val_at_end": False},
    "policy": {"train_global_batch_size": 8, "scheduler": None},
    "checkpointing.save_consolidated": False,
    "cluster.train.ranks_per_node": 1,
}


def check_a_run(folder, executor: str, capfd) -> hetstep.Run:
    """Submit, stop after a few steps, continue to the end."""
    given = {**SMALL, "run_dir": folder, "cluster.executor": executor}
    run = hetstep.submit("tiny_sft", given, sft__max_num_steps=100_000)
    wait_until(lambda: len(run.metrics()) >= 2, "the second step", 300)
    assert run.status().state == "running"
    with pytest.raises(hetstep.RecipeError) as error:
        hetstep.submit("tiny_sft", given)
    assert error.value.codes == ("in-use",)
    assert run.stop_and_save().state == "stopped"
    step = run.checkpoint().step
    assert list(run.metrics("train/loss")) == list(range(1, step + 1))
    again = hetstep.submit("tiny_sft", given, sft__max_num_steps=step + 2)
    assert again.wait().state == "done"
    assert list(again.metrics("train/loss")) == list(range(1, step + 3))
    assert hetstep.submit("tiny_sft", given, sft__max_num_steps=step + 2).status().state == "done"
    assert capfd.readouterr() == ("", "")
    return again


def test_a_run_on_this_machine(tmp_path, capfd):
    run = check_a_run(tmp_path / "run", "local", capfd)
    exported = run.export()
    assert exported == run.folder / f"hf_step_{run.checkpoint().step}" and (exported / "model.safetensors").exists()
    small = {"evaluate.tasks.addition.data.max_samples": 8, "policy.generation.backend": "transformers"}
    evaluation = run.evaluate("tiny", small, cluster__executor="local")
    assert evaluation.wait().state == "done"
    score = evaluation.scores()["addition"]
    assert score.questions == 8 and score.low <= score.value <= score.high and "addition" in evaluation.table()
    assert run.evaluate("tiny", small, cluster__executor="local").scores() == evaluation.scores()  # not run again
    of_model = hetstep.evaluate("tiny", small, model=exported, cluster__executor="local", run_dir=tmp_path / "of_model")
    of_model.wait()
    (compared,) = of_model.compare(evaluation)
    assert compared.difference.gained == compared.difference.lost == 0
    assert isinstance(hetstep.load(evaluation.folder), hetstep.EvaluationRun)


@pytest.mark.slurm
def test_a_run_under_slurm(tmp_path, slurm_cluster, monkeypatch, capfd):
    slurm_cluster.enter(monkeypatch)
    check_a_run(tmp_path / "run", "slurm", capfd)


def test_a_program_without_torch_submits_and_watches(tmp_path):
    done = program.run(
        f"""
import hetstep
given = {SMALL!r} | {{"cluster.executor": "local"}}
run = hetstep.submit("tiny_sft", given, sft__max_num_steps=2, run_dir="run")
assert run.wait().state == "done"
print(sorted(run.metrics("train/loss")), run.status().step)
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2] 2\n", "")
