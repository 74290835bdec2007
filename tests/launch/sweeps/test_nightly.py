"""The nightly suite on a real Slurm with the real pipeline passes, and planted regressions fail the right gates.

Speeds are compared with a run of the same recipe at the same time, so that whatever else this machine does slows both.
"""

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from launch.sweeps import suite
from tests.launch.sweeps.suites import ROOT, STANDIN, outcomes, sweep

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(7200)]
TENFOLD = "runs.tiny_sft.overrides.policy.optimizer.kwargs.lr=2.0e-2"
SLOWER = "runs.tiny_dpo.overrides.cluster.train.env_vars.HETSTEP_TEST_SLOWER=1.5"


def write_suite(folder: Path) -> Path:
    """Nightly's three recipes, and a second tiny_dpo beside the first."""
    nightly = asdict(suite.load("nightly").suite)
    runs = {name: nightly["runs"][name] for name in ("tiny_sft", "tiny_dpo")}
    learns = {"learns": {"value": "last(val/accuracy)", "at_least": 0.9}}
    runs["reference"] = {**runs["tiny_dpo"], "recipe": "tiny_dpo", "gates": learns}
    runs["tiny_grpo"] = nightly["runs"]["tiny_grpo"]
    speed = {"value": "median(time/step)", "speed": {"at_most": 1.25, "relative_to": "reference"}, "runs": ["tiny_dpo"]}
    changes = {"runs": runs, "gates": {"speed": speed}, "max_concurrent": len(runs), "folder": str(folder / "sweeps")}
    path = folder / "night.yaml"
    path.write_text(yaml.safe_dump({**nightly, "name": "night", **changes}, sort_keys=False))
    return path


def test_nightly_passes_and_planted_regressions_fail_the_gates_that_they_should(slurm_cluster, tmp_path):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    command = [f"sweep={write_suite(tmp_path)}", "wait=true", "cluster.executor=slurm"]
    env = {**os.environ, **slurm_cluster.env, "PYTHONPATH": str(STANDIN), "OMP_NUM_THREADS": "1"}

    def night(name: str, *more: str) -> tuple[int, str, dict[tuple[str, str], str]]:
        status, output = sweep(*command, f"id={name}", *more, env=env, cwd=tmp_path, timeout=2400)
        return status, output, outcomes(tmp_path / "sweeps/night" / name)

    status, output, found = night("first", "update_baseline=true")
    assert status == 0, output
    assert len(found) == 1 + 12 + 13 and ("tiny_sft", "completes") in found  # needed by all, run once
    status, output, found = night("second")
    assert status == 0, output
    assert set(found.values()) == {"passed"}
    status, output, found = night("planted", TENFOLD, SLOWER)
    assert status == 1, output
    assert {key for key, outcome in found.items() if outcome != "passed"} == {
        ("tiny_sft", "learns"),
        ("tiny_sft", "validation loss"),
        ("tiny_sft", "training loss"),
        ("tiny_dpo", "speed"),
    }
    assert "- **tiny_dpo, speed**: " in output and "times the baseline's" in output
    assert "tiny_sft has other overrides than in the baseline: +policy.optimizer.kwargs.lr=0.02" in output
