"""The table of TRL's fields and defaults equals TRL's dataclasses, where TRL is installed."""

from __future__ import annotations

import dataclasses

import pytest

from launch.recipes.trl import trl_defaults, trl_translation

trl = pytest.importorskip("trl")
VERSION = "1.16"
OF_SCRIPTS = {"reward_funcs", "reward_model_name_or_path"}  # of trl.scripts.grpo
OF_PROJECTS = {"output_dir"}


def defaults(*classes: type) -> dict[str, object]:
    found = {}
    for cls in classes:
        for field in dataclasses.fields(cls):
            made = field.default_factory
            found[field.name] = made() if made is not dataclasses.MISSING else field.default
    return found


@pytest.mark.parametrize(
    ("trainer", "name"),
    {
        "grpo": "GRPOConfig",
        "rloo": "RLOOConfig",
        "sft": "SFTConfig",
        "dpo": "DPOConfig",
        "kto": "KTOConfig",
        "reward": "RewardConfig",
    }.items(),
)
def test_defaults_and_names(trainer: str, name: str) -> None:
    if not trl.__version__.startswith(VERSION):
        pytest.skip(f"the table has the defaults of TRL {VERSION}")
    classes = [getattr(trl, name), trl.ModelConfig, trl.ScriptArguments, trl.DatasetMixtureConfig]
    theirs, ours = defaults(*classes), trl_defaults.of(trainer)
    ours = {field: value for field, value in ours.items() if field not in OF_SCRIPTS and field not in OF_PROJECTS}
    assert len(ours) > 50 and ours == {field: theirs.get(field, "no field") for field in ours}
    assert {field for field in theirs if not trl_translation.knows(field, trainer)} == set()
