"""Asynchronous GRPO: their section means the same here, but for what they do not say."""

from __future__ import annotations

import pytest

from tests.nemo_rl.test_translation import inspect, problem, read

ON = (
    "grpo.async_grpo.enabled=true",
    "loss_fn.use_importance_sampling_correction=true",
    "policy.generation.colocated.enabled=false",
    "policy.generation.colocated.resources={num_nodes: 1, gpus_per_node: 8}",
)


def test_their_section_is_ours() -> None:
    given = {
        "max_trajectory_age_steps": 3,
        "in_flight_weight_updates": True,
        "recompute_kv_cache_after_weight_updates": True,
        "max_generation_failures": 7,
    }
    ours = read("grpo", *ON, *(f"grpo.async_grpo.{key}={value}" for key, value in given.items())).grpo.async_grpo
    assert ours.enabled and {key: getattr(ours, key) for key in given} == given
    assert ours.stragglers == "wait"


def test_what_they_do_not_say_is_their_default() -> None:
    ours = read("grpo", *ON).grpo.async_grpo
    assert (ours.max_trajectory_age_steps, ours.in_flight_weight_updates, ours.max_generation_failures) == (1, False, 0)


@pytest.mark.parametrize(
    "off",
    [
        ("grpo.async_grpo=null",),
        ("grpo.async_grpo.enabled=false", "grpo.async_grpo.max_trajectory_age_steps=4"),
    ],
)
def test_a_section_that_is_off_says_nothing(off: tuple[str, ...]) -> None:
    ours = read("grpo", *off).grpo.async_grpo
    assert not ours.enabled and (ours.max_trajectory_age_steps, ours.max_generation_failures) == (1, 10)


@pytest.mark.parametrize("section", [ON, ()])
def test_failures_are_counted_otherwise(section: tuple[str, ...]) -> None:
    notes = inspect("grpo", *section).notes
    assert any(note.startswith("grpo.async_grpo.max_generation_failures: counts groups") for note in notes) is bool(section)


def test_a_key_of_it_that_we_do_not_know_is_told() -> None:
    assert problem("grpo", *ON, "grpo.async_grpo.colour=red") == ("grpo.async_grpo.colour", "unknown-key")


def test_several_turns_and_several_answers() -> None:
    grpo = read("grpo", "grpo.max_rollout_turns=5", "grpo.val_num_generations_per_prompt=4").grpo
    assert (grpo.max_rollout_turns, grpo.val_num_generations_per_prompt) == (5, 4)
