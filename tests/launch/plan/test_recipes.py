"""Every recipe plans with only the repository present; those with GPUs fit them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import config

# The large ones take seconds each; of their kinds one is planned by default.
LARGE = ("dapo_qwen2p5_32b", "deepscaler_1p5b_24k", "deepseek_v3_grpo", "llama70b_grpo_sync", "llama8b_dr_grpo")
LARGE += ("qwen3_235b_grpo", "qwen3_30ba3b_cispo", "qwen3_30ba3b_gspo")
NAMES = sorted(path.stem for path in config.RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in LARGE)) for name in NAMES])
def test_plans_and_fits(name: str, tmp_path: Path, printed: Callable[..., str]):
    text = printed(f"recipe={name}")
    assert ("verdict       no GPUs" if name.startswith(("tiny_", "smollm2_")) else "verdict       fits") in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipes"]
