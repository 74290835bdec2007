"""What is said against async_grpo before anything is loaded."""

import pytest

from pipeline import config

AHEAD = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")
KEY = "grpo.async_grpo"


def problems(*overrides: str) -> list[config.Problem]:
    return config.inspect("tiny_grpo", overrides).problems


def test_a_recipe_may_sample_ahead():
    assert problems(*AHEAD) == []
    assert problems(f"{KEY}.enabled=true", f"{KEY}.max_trajectory_age_steps=0") == []  # that is the synchronous run


@pytest.mark.parametrize(
    ("overrides", "begins", "right"),
    [
        (
            (f"{KEY}.enabled=true",),
            "loss_fn.use_importance_sampling_correction: false, but with",
            f"true, or {KEY}.enabled=false",
        ),
        (
            (*AHEAD, "policy.generation.colocated.enabled=true"),
            f"{KEY}.max_trajectory_age_steps: 1 lets engines sample",
            f"try {KEY}.enabled=false (recipes whose names end in _sync have it), or",
        ),
        (
            (*AHEAD, f"{KEY}.max_trajectory_age_steps=0", "grpo.use_dynamic_sampling=true"),
            f"{KEY}.max_trajectory_age_steps: 0 is the synchronous algorithm",
            f"at least 1, or {KEY}.enabled=false",
        ),
        (
            (*AHEAD, "grpo.use_dynamic_sampling=true", "grpo.batch_multiplier=1.5"),
            "grpo.batch_multiplier: 1.5, but with",
            "; 1",
        ),
        (
            (*AHEAD, f"{KEY}.recompute_kv_cache_after_weight_updates=true"),
            f"{KEY}.recompute_kv_cache_after_weight_updates: true, but without",
            "that too, or false",
        ),
        (
            (*AHEAD, f"{KEY}.stragglers=cut"),
            f"{KEY}.straggler_share: 0.05 of grpo.num_prompts_per_step=16 is less than one group",
            f"at least 0.0625, or {KEY}.stragglers=wait",
        ),
        ((*AHEAD, f"{KEY}.stragglers=drop"), f"{KEY}.stragglers: got 'drop'; expected one of", "wait, keep, cut"),
        ((*AHEAD, f"{KEY}.max_trajectory_age_steps=-1"), f"{KEY}.max_trajectory_age_steps: got -1", "at least 0"),
        ((*AHEAD, f"{KEY}.straggler_share=1.5"), f"{KEY}.straggler_share: got 1.5", "at most 1"),
    ],
)
def test_what_is_wrong_and_what_would_be_right(overrides: tuple[str, ...], begins: str, right: str):
    found = [text for text in map(str, problems(*overrides)) if text.startswith(begins)]
    assert len(found) == 1 and right in found[0], problems(*overrides)


def test_while_it_is_off_nothing_of_it_is_looked_at():
    assert problems(f"{KEY}.stragglers=cut", f"{KEY}.recompute_kv_cache_after_weight_updates=true") == []
