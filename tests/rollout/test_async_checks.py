"""Problems of async_grpo, before anything is loaded."""

import pytest

from pipeline import config
from tests.problems import named

AHEAD = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
KEY = "grpo.async_grpo"


def problems(*overrides: str) -> list[config.Problem]:
    return config.inspect("tiny_grpo", overrides).problems


def test_a_recipe_may_sample_ahead():
    assert problems(*AHEAD) == []
    assert problems(f"{KEY}.enabled=true", f"{KEY}.max_trajectory_age_steps=0") == []  # the synchronous run


@pytest.mark.parametrize(
    ("overrides", "key", "code"),
    [
        ((f"{KEY}.enabled=true",), "loss_fn.use_importance_sampling_correction", "contradiction"),
        ((*AHEAD, "policy.generation.colocated.enabled=true"), f"{KEY}.max_trajectory_age_steps", "contradiction"),
        (
            (*AHEAD, f"{KEY}.max_trajectory_age_steps=0", "grpo.use_dynamic_sampling=true"),
            f"{KEY}.max_trajectory_age_steps",
            "too-small",
        ),
        ((*AHEAD, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5"), "grpo.batch_multiplier", "has-no-effect"),
        (
            (*AHEAD, f"{KEY}.recompute_kv_cache_after_weight_updates=true"),
            f"{KEY}.recompute_kv_cache_after_weight_updates",
            "has-no-effect",
        ),
        ((*AHEAD, f"{KEY}.stragglers=cut"), f"{KEY}.straggler_share", "too-small"),
        (
            (*AHEAD, f"{KEY}.stragglers=cut", f"{KEY}.straggler_share=0.5", f"{KEY}.max_trajectory_age_steps=0"),
            f"{KEY}.stragglers",
            "has-no-effect",
        ),
        ((*AHEAD, f"{KEY}.stragglers=drop"), f"{KEY}.stragglers", "not-a-choice"),
        ((*AHEAD, f"{KEY}.max_trajectory_age_steps=-1"), f"{KEY}.max_trajectory_age_steps", "too-small"),
        ((*AHEAD, f"{KEY}.straggler_share=1.5"), f"{KEY}.straggler_share", "too-large"),
    ],
)
def test_errors_are_reported(overrides: tuple[str, ...], key: str, code: str):
    assert named(problems(*overrides)) == {(key, code)}


def test_nothing_is_checked_while_it_is_off():
    assert problems(f"{KEY}.stragglers=cut", f"{KEY}.recompute_kv_cache_after_weight_updates=true") == []
