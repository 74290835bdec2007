"""The command that sends a run to trackers, and the check of their packages before submission."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

from launch import track
from launch.preflight import installed
from launch.terminal.command_line import parse
from launch.track import TrackRequest
from pipeline import config
from pipeline.config import RecipeError
from pipeline.trackers import TRACKERS
from pipeline.tracking.position import FOLDER, Position
from pipeline.tracking.tracking_process import alone
from tests.launch import made_runs
from tests.problems import named, refused

FIND_SPEC = importlib.util.find_spec


def find(monkeypatch, installed):
    """Let Python find the project's modules, and each package of others as `installed`."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: FIND_SPEC(name) if "." in name else installed)


@pytest.fixture
def without_packages(monkeypatch):
    find(monkeypatch, None)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_whose_package_is_missing_is_refused_before_submission(name, without_packages):
    key = f"logger.{name}_enabled"
    (problem,) = installed.problems(config.load("tiny_grpo", [f"{key}=true"]))
    assert (problem.key, problem.code) == (key, "not-installed") and f"pip install '.[{name}]'" in problem.message
    assert list(installed.problems(config.load("tiny_grpo", [f"{key}=false"]))) == []


@pytest.mark.parametrize(
    "elsewhere", ["cluster.train.container_image=/images/train.sqsh", "cluster.train.python=/other/python"]
)
def test_a_package_of_another_python_is_not_checked(elsewhere, without_packages):
    assert list(installed.problems(config.load("tiny_grpo", ["logger.wandb_enabled=true", elsewhere]))) == []


def test_an_installed_package_passes(monkeypatch):
    find(monkeypatch, "installed")
    assert list(installed.problems(config.load("tiny_grpo", [f"logger.{name}_enabled=true" for name in TRACKERS]))) == []


def test_each_trackers_package_is_an_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for kind in TRACKERS.values():
        (requirement,) = extras[kind.package]
        assert requirement.startswith(kind.package)


def test_a_run_needs_a_tracker(tmp_path):
    folder = made_runs.folder(tmp_path / "run")
    with refused(("trackers", "missing-value")):
        track.execute(TrackRequest(folder))
    with refused(("run", "not-a-run")):
        track.execute(TrackRequest(tmp_path))


def test_keys_of_the_command(tmp_path):
    parsed = parse(TrackRequest, [f"run={tmp_path}", "trackers=wandb,mlflow", "logger.wandb.mode=offline"])
    assert parsed.trackers == ["wandb", "mlflow"] and parsed.overrides == ["logger.wandb.mode=offline"]
    for argument, problem in (
        ("trackers=wandb,comet", ("trackers", "wrong-type")),
        ("policy.x=1", ("policy.x", "unknown-key")),
    ):
        with pytest.raises(RecipeError) as error:
            parse(TrackRequest, [f"run={tmp_path}", argument])
        assert named(error.value.problems) == {problem}


def test_one_process_at_a_time(tmp_path):
    folder = made_runs.folder(tmp_path / "run", "tiny_grpo", "logger.trackio_enabled=true")
    with alone(folder / FOLDER) as first, refused(("run", "in-use")):
        assert first
        track.execute(TrackRequest(folder))


def test_a_missing_package_is_named(tmp_path):
    if importlib.util.find_spec("trackio"):
        pytest.skip("trackio is installed")
    folder = made_runs.folder(tmp_path / "run")
    made_runs.steps(folder, 1, 2, made_runs.Texts("a", "b", "c", "d"))
    with refused(("trackers", "not-installed")):
        track.execute(TrackRequest(folder, ["trackio"]))
    assert Position.read(folder / "tracking/trackio.json") == Position(place=[None, "hetstep"])
