"""Every recipe plans with only the repository present; those with GPUs fit them."""

from pathlib import Path

import pytest

from launch import submit
from launch.executors.base import ROOT
from pipeline import config


@pytest.mark.parametrize("name", sorted(path.stem for path in config.RECIPES.glob("*.yaml")))
def test_plans_and_fits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for variable in ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    assert submit.main([f"recipe={name}", "plan=true", "cluster.executor=local"]) == 0
    printed = capsys.readouterr().out
    assert ("verdict       no GPUs" if name.startswith("tiny_") else "verdict       fits") in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipes"]
