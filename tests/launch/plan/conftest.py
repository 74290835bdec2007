"""The plan command as a user calls it in a folder with only the repository's recipes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from launch import submit
from launch.executors.executor import ROOT


@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function from a command line to the plan that it prints; it asserts that there is one. Caches are empty."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))

    def run(*arguments: str) -> str:
        assert submit.main([*arguments, "plan=true", "cluster.executor=local"]) == 0
        return capsys.readouterr().out

    return run
