"""Asynchronous sampling in whole runs: age 0 equals the synchronous run, and a kill neither loses nor repeats a rollout."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoints.checkpoint import ROLLOUTS
from pipeline.coordination import buffer
from pipeline.observe.metrics import read_rollouts
from tests.end_to_end.runs import LOCAL, Fault, submit

ON = "grpo.async_grpo.enabled=true"
AHEAD = (ON, "grpo.async_grpo.max_trajectory_age_steps=2", "loss_fn.use_importance_sampling_correction=true")
IN_FLIGHT = (*AHEAD, "grpo.async_grpo.in_flight_weight_updates=true")
# Two answers at a time, and long ones: at every checkpoint some have ended, some are under way, some have not begun.
SLOW = ("policy.generation.max_num_seqs=2", "policy.generation.max_new_tokens=30")


def without_async(run) -> list[dict]:
    return [{key: value for key, value in line.items() if not key.startswith("async/")} for line in run.metrics()]


def trained_on(folder: Path) -> Counter:
    """Return how often each (prompt, sample) was, by what the run wrote of its steps."""
    records = [record for path in folder.glob("rollouts/step_*.jsonl") for record in read_rollouts(path)]
    return Counter((record["prompt_index"], record["sample"]) for record in records)


@pytest.mark.full  # by default: tests/rollout/test_async_collector.py compares what is sampled
def test_age_0_is_the_synchronous_run_to_the_last_bit(tmp_path, uninterrupted):
    run = submit(tmp_path / "run", *LOCAL, ON, "grpo.async_grpo.max_trajectory_age_steps=0")
    assert run.status == 0, run.output
    assert without_async(run) == uninterrupted
    assert all(line["async/age_max"] == 0 for line in run.metrics())


@pytest.mark.long
def test_age_0_leaves_the_checkpoints_of_the_synchronous_run(tmp_path):
    """Check with validation between its steps."""
    shape = ("grpo.max_num_steps=2", "grpo.val_period=1", "grpo.max_val_samples=3")
    runs = [
        submit(tmp_path / "sync", *LOCAL, *shape),
        submit(tmp_path / "ahead", *LOCAL, *shape, ON, "grpo.async_grpo.max_trajectory_age_steps=0"),
    ]
    assert [run.status for run in runs] == [0, 0], runs[0].output + runs[1].output
    synchronous, ahead = runs
    assert without_async(ahead) == synchronous.metrics()
    paths = sorted(synchronous.folder.glob("checkpoints/step_*/*.safetensors"))
    assert len(paths) == 4
    for path in paths:
        expected, found = load_file(path), load_file(ahead.folder / path.relative_to(synchronous.folder))
        assert expected.keys() == found.keys()
        assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert not list(ahead.folder.glob(f"checkpoints/*/{ROLLOUTS}"))


def kill_and_rerun(folder: Path, victim: int, count: int, *overrides: str) -> None:
    """Kill a rank at the third step, check what the checkpoint kept, resume, and count."""
    broken = submit(folder, *LOCAL, *overrides, fault=Fault("step", victim, count=count))
    assert broken.status == 1, broken.output
    latest = max(path for path in folder.glob("checkpoints/step_*"))
    step = int(latest.name.removeprefix("step_"))
    assert 0 < step < 4
    entries = buffer.decode_groups((latest / ROLLOUTS).read_bytes())
    expected = buffer.resumed_metrics(entries)
    rerun = submit(folder, *LOCAL, *overrides)
    assert rerun.status == 0, rerun.output

    assert trained_on(folder) == {(prompt, sample): 1 for prompt in range(16) for sample in range(4)}
    log = max(folder.glob("attempts/*"), key=lambda path: path.stat().st_mtime) / "rank00000.log"
    assert f"resumed: {expected['async/resumed_rollouts_kept']:.0f} finished rollouts kept" in log.read_text()
    first = next(line for line in rerun.metrics() if line["step"] == step + 1)
    assert expected.items() <= first.items()
    assert max(line["async/age_max"] for line in rerun.metrics()) <= 2

    later = [one for path in folder.glob("rollouts/step_*.jsonl") for one in read_rollouts(path)]
    tokens = {(one["prompt_index"], one["sample"]): one["completion_tokens"] for one in later}
    for entry in entries:  # what was finished is trained on as it was
        for sample, rollout in entry.rollouts.items():
            assert tokens[entry.prompt.index, sample] == rollout.tokens.tolist()


@pytest.mark.full  # by default: test_kill.py, and tests/rollout/test_buffer.py
def test_a_killed_run_loses_no_rollout_and_repeats_none(tmp_path):
    kill_and_rerun(tmp_path / "run", 0, 3, *IN_FLIGHT, *SLOW, "grpo.async_grpo.stragglers=keep")


@pytest.mark.long
@pytest.mark.parametrize("stragglers", ["wait", "keep"])
@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_kill_of_any_rank_loses_no_rollout(tmp_path, victim, in_flight, stragglers):
    ahead = IN_FLIGHT if in_flight else AHEAD
    kill_and_rerun(tmp_path / "run", victim, 5, *ahead, *SLOW, f"grpo.async_grpo.stragglers={stragglers}")


@pytest.mark.long
@pytest.mark.parametrize("stragglers", ["cut", "wait"])
def test_answers_are_truncated_only_if_the_recipe_says_so(tmp_path, stragglers):
    ahead = (f"grpo.async_grpo.stragglers={stragglers}", "grpo.async_grpo.straggler_share=0.5")
    run = submit(tmp_path / "run", *LOCAL, *IN_FLIGHT, *SLOW, *ahead)
    assert run.status == 0, run.output
    assert trained_on(run.folder) == {(prompt, sample): 1 for prompt in range(16) for sample in range(4)}
    records = [record for path in run.folder.glob("rollouts/step_*.jsonl") for record in read_rollouts(path)]
    cut = [one for one in records if one["finish"] == "length" and len(one["completion_tokens"]) < 30]
    assert bool(cut) == (stragglers == "cut")
