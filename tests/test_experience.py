"""Which rollouts a step is made of: sampled until enough groups are selected, with a bound."""

from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.config import DistillationConfig, GRPOConfig
from pipeline.experience import Experience
from pipeline.types import Completion, Prompt, Rollout, RolloutGroup, Sampling, Span, Turn
from pipeline.world import Realms


class Engines:
    """Answers every verb `rollout` at once; the reward of a prompt's samples varies if its index is even."""

    def __init__(self):
        self.purposes = []

    def rollout(self, parts):
        self.purposes.append(parts[0].purpose)
        return SimpleNamespace(result=lambda: [[_group(prompt, part.samples) for prompt in part.prompts] for part in parts])


class Prompts:
    def __init__(self, size):
        self._left = [Prompt(i, np.array([1, 2], np.int32), "addition", {}) for i in range(size)]

    def take(self, n):
        taken, self._left = self._left[:n], self._left[n:]
        return taken


def _group(prompt, samples):
    completion = Completion("", np.array([3], np.int32), np.array([-0.5], np.float32), (Span(0, 1),), "stop")
    return RolloutGroup(
        prompt, tuple(Rollout((Turn(completion),), float(i % 2 == 0 and prompt.index % 2 == 0)) for i in range(samples))
    )


def varied(groups):
    return [group for group in groups if len({rollout.reward for rollout in group.rollouts}) > 1]


def experience(section, judge=None):
    realms = Realms(train=(0,), generate=(1, 2), engines=((1,), (2,)), reward=())
    return Experience("grpo", section, Engines(), realms, judge)


def grpo(**changes):
    return GRPOConfig(**{"num_prompts_per_step": 4, "num_generations_per_prompt": 2, **changes})


def collect(of, prompts, select):
    return of.collect(prompts.take(of.prompts_per_batch), prompts, select, 7, Sampling())


def test_all_groups_of_one_batch_where_nothing_is_passed_over():
    of, prompts = experience(grpo()), Prompts(10)
    groups, values = collect(of, prompts, list)
    assert [group.prompt.index for group in groups] == [0, 1, 2, 3]
    assert of.generate.purposes == ["train/7"]
    assert values["train/reward"] == values["train/selected_reward"] == 0.25
    assert "train/dynamic_sampling_batches" not in values


def test_more_batches_until_the_step_is_full():
    of, prompts = experience(grpo(use_dynamic_sampling=True, batch_multiplier=1.5)), Prompts(100)
    assert of.prompts_per_batch == 6
    groups, values = collect(of, prompts, varied)
    assert [group.prompt.index for group in groups] == [0, 2, 4, 6]  # three of the first batch, three of the second
    assert values["train/dynamic_sampling_batches"] == 2
    assert values["train/dynamic_sampling_discarded"] == 2
    assert values["train/reward"] == 0.25 and values["train/selected_reward"] == 0.5
    assert prompts.take(1)[0].index == 12


def test_a_bound_on_batches_names_the_key_and_what_was_found():
    of = experience(grpo(use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2))
    with pytest.raises(
        RuntimeError, match=r"grpo\.dynamic_sampling_max_gen_batches: after 2 batches of 4 .* only 0 of 4 groups"
    ):
        collect(of, Prompts(100), lambda groups: [])


def test_fewer_groups_where_the_data_end():
    of = experience(grpo(use_dynamic_sampling=True))
    groups, _ = collect(of, Prompts(6), varied)
    assert [group.prompt.index for group in groups] == [0, 2, 4]


def test_prompts_keep_their_order_over_engines():
    of = experience(DistillationConfig(num_prompts_per_step=5, num_generations_per_prompt=1))
    groups = of.rollout(Prompts(5).take(5), 1, "val", Sampling())
    assert [group.prompt.index for group in groups] == [0, 1, 2, 3, 4]


def test_a_reward_model_judges_before_groups_are_selected():
    def judge(groups):
        return [_group(Prompt(0, group.prompt.tokens, "", {}), len(group.rollouts)) for group in groups]

    of = experience(grpo(use_dynamic_sampling=True), judge)
    groups, _ = collect(of, Prompts(4), varied)
    assert len(groups) == 4
