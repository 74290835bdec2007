"""Rollouts of a step when sampling and training alternate.

Batches are sampled until enough groups are selected, with a bound.
"""

import pytest

from pipeline.config import DistillationConfig, GenerationConfig, GRPOConfig
from pipeline.coordination.collectors import build, sampling
from tests.problems import refused
from tests.rollout.fleet import Fleet, Stream, group, prompts


def varied(groups):
    return [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1]


def collector(section, judge=None, pick=min):
    fleet = Fleet(2, pick)
    generation = GenerationConfig(val_temperature=0.0, val_top_p=0.5, val_top_k=3)
    return build("grpo", section, generation, fleet.engines, judge), fleet


def grpo(**changes):
    return GRPOConfig(**{"num_prompts_per_step": 4, "num_generations_per_prompt": 2, **changes})


def collect(of, stream, select):
    of.send(stream.take(of.num_prompts_to_send(7)), 7)
    return of.collect(stream, select, 7)


def test_all_groups_of_one_batch_if_none_is_discarded():
    of, fleet = collector(grpo())
    groups, values = collect(of, Stream(10), list)
    assert [group.prompt.index for group in groups] == [0, 1, 2, 3]
    assert {work.purpose for work in fleet.works} == {"train"}
    assert values["train/reward"] == values["train/selected_reward"] == 0.25
    assert "train/dynamic_sampling_batches" not in values
    assert of.pending == 0


def test_more_batches_until_the_step_is_full():
    of, _ = collector(grpo(use_dynamic_sampling=True, batch_multiplier=1.5))
    stream = Stream(100)
    assert of.num_prompts_to_send(0) == 6
    groups, values = collect(of, stream, varied)
    assert [group.prompt.index for group in groups] == [0, 2, 4, 6]  # three of the first batch, three of the second
    assert values["train/dynamic_sampling_batches"] == 2
    assert values["train/dynamic_sampling_discarded"] == 2
    assert values["train/reward"] == 0.25 and values["train/selected_reward"] == 0.5
    assert stream.take(1)[0].index == 12


def test_exceeding_the_bound_on_batches_names_the_key_and_the_groups_found():
    of, _ = collector(grpo(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2))
    with pytest.raises(RuntimeError, match=r"grpo\.dynamic_sampling_max_gen_batches: after 2 batches of 4 .* only 0 groups"):
        collect(of, Stream(100), lambda groups: [])


def test_fewer_groups_when_the_data_ends():
    of, _ = collector(grpo(use_dynamic_sampling=True))
    groups, _ = collect(of, Stream(6), varied)
    assert [group.prompt.index for group in groups] == [0, 2, 4]
    assert not of.can_fill_step(prompts(0, 3)) and of.can_fill_step(prompts(0, 4))


@pytest.mark.parametrize("pick", [min, max])
def test_prompts_keep_their_order_whichever_ends_first(pick):
    of, fleet = collector(DistillationConfig(num_prompts_per_step=5, num_generations_per_prompt=1), pick=pick)
    groups = of.validate(prompts(0, 5))
    assert [group.prompt.index for group in groups] == [0, 1, 2, 3, 4]
    assert all(work.urgent and work.purpose == "val" and work.sampling.temperature == 0 for work in fleet.works)


def test_validation_samples_the_recipes_number_of_answers():
    of, _ = collector(grpo(val_num_generations_per_prompt=3))
    assert [len(group.rollouts) for group in of.validate(prompts(0, 2))] == [3, 3]


def test_a_reward_model_scores_before_groups_are_selected():
    def judge(groups):
        return [group(prompts(0, 1)[0], len(each.rollouts)) for each in groups]

    of, _ = collector(grpo(use_dynamic_sampling=True), judge)
    groups, _ = collect(of, Stream(4), varied)
    assert len(groups) == 4


def test_groups_sampled_ahead_are_kept_when_async_is_switched_off():
    of, _ = collector(grpo())
    assert of.load_state_dict(b"", 3) == {} and of.state_dict() == b""
    with refused(("grpo.async_grpo.enabled", "run-exists")):
        of.load_state_dict(b"x", 3)


def test_validation_samples_with_its_own_keys():
    generation = GenerationConfig(top_k=7, top_p=0.9, val_temperature=0.6, val_top_p=0.7, val_top_k=None)
    train, validation = sampling(generation), sampling(generation, "val_")
    assert (train.temperature, train.top_p, train.top_k) == (1.0, 0.9, 7)
    assert (validation.temperature, validation.top_p, validation.top_k) == (0.6, 0.7, 0)
