"""Asynchronous sampling: whole runs of the loop's calls against engines that finish in any order."""

import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest

from pipeline.config import AsyncConfig, GenerationConfig, GRPOConfig
from pipeline.coordination.buffer import SavedGroup, decode_groups, encode_groups, staleness
from pipeline.coordination.collectors import build
from pipeline.types import Rollout, RolloutGroup
from tests.problems import refused
from tests.rollout.fleet import Fleet, Stream, group, prompts, rollout


def collector(pick=min, engines=2, steps=6, changes=None, **ahead):
    section = GRPOConfig(
        max_num_steps=steps,
        async_grpo=AsyncConfig(**{"enabled": True, "max_trajectory_age_steps": 2, **ahead}),
        **{"num_prompts_per_step": 4, "num_generations_per_prompt": 2, **(changes or {})},
    )
    fleet = Fleet(engines, pick)
    return build("grpo", section, GenerationConfig(val_temperature=0.0, val_top_p=0.5, val_top_k=3), fleet.engines, None), fleet


def run(of, fleet, stream, first=0, last=6, select=list):
    """Run the loop's calls. Return (prompt, step) of trained groups, and each step's metrics."""
    trained, metrics = [], []
    for step in range(first, last):
        of.send(stream.take(of.num_prompts_to_send(step)), step)
        groups, values = of.collect(stream, select, step)
        trained += [(group.prompt.index, step) for group in groups]
        metrics.append(values)
        of.before_refit()
        fleet.version = step + 1
    return trained, metrics


@pytest.mark.parametrize("stragglers", ["wait", "keep", "cut"])
def test_a_run_trains_once_on_each_sampled_group(stragglers):
    draw = random.Random(3)
    of, fleet = collector(lambda open_: draw.choice(list(open_)), stragglers=stragglers, straggler_share=0.25)
    stream = Stream(100)
    trained, metrics = run(of, fleet, stream)
    assert sorted(index for index, _ in trained) == list(range(24))
    assert Counter(step for _, step in trained) == dict.fromkeys(range(6), 4)
    assert of.pending == 0 and stream.take(1)[0].index == 24
    assert max(values["async/age_max"] for values in metrics) <= 2
    assert {"async/tokens_age_0", "async/tokens_age_1", "async/tokens_age_2"} <= set(metrics[0])
    assert bool(fleet.cut) == (stragglers == "cut") and len(fleet.cut) == len(set(fleet.cut))


def test_age_0_sends_the_engines_the_requests_of_the_synchronous_run():
    asked = []
    for enabled in (True, False):
        of, fleet = collector(max_trajectory_age_steps=0, enabled=enabled)
        trained, _ = run(of, fleet, Stream(100))
        asked.append((trained, [engine.works for engine in fleet.engines]))
    (ahead, works), (synchronous, expected) = asked
    assert ahead == synchronous
    shown = [
        [[(w.number, [p.index for p in w.prompts], w.samples, w.purpose) for w in e] for e in those]
        for those in (works, expected)
    ]
    assert shown[0] == shown[1]


def test_engines_are_drained_before_a_refit_unless_it_may_be_in_flight():
    for in_flight, drained in ((True, 0), (False, 5 * 2)):  # nothing is open after the last step
        of, fleet = collector(min, in_flight_weight_updates=in_flight)
        run(of, fleet, Stream(100))
        assert fleet.drained == drained


def test_a_discarded_group_is_replaced_by_one_of_the_newest_weights():
    of, fleet = collector(changes={"use_dynamic_sampling": True})
    stream = Stream(100)

    def select(groups):
        return [group for group in groups if group.prompt.index % 4]

    trained, metrics = run(of, fleet, stream, select=select)
    indexes = [index for index, _ in trained]
    assert len(set(indexes)) == 24 and all(index % 4 for index in indexes)
    assert Counter(step for _, step in trained) == dict.fromkeys(range(6), 4)
    assert stream.take(1)[0].index == 32 and of.pending == 0  # 24, and one for each of the 8 that were discarded
    assert metrics[0]["train/dynamic_sampling_batches"] > 1


def test_discarded_groups_have_a_bound():
    of, fleet = collector(changes={"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 2})
    with pytest.raises(RuntimeError, match=r"dynamic_sampling_max_gen_batches: after 8 prompts, only 0 groups"):
        run(of, fleet, Stream(100), select=lambda groups: [])


def test_the_data_ends():
    of, fleet = collector()
    stream = Stream(10)
    trained, _ = run(of, fleet, stream, last=2)
    assert len(trained) == 8
    assert not of.can_fill_step(stream.take(of.num_prompts_to_send(2))) and of.pending == 2


def test_the_data_ends_while_a_step_is_filled():
    """Its groups are as before it, for a checkpoint that more data can follow."""
    of, fleet = collector(changes={"use_dynamic_sampling": True})
    stream = Stream(14)
    run(of, fleet, stream, last=1)
    of.send(stream.take(of.num_prompts_to_send(1)), 1)
    before = {live.prompt.index: live.begun for live in of._buffer.live}
    assert Counter(before.values()) == {0: 8, 1: 2}
    groups, _ = of.collect(stream, lambda groups: [one for one in groups if one.prompt.index % 4 == 0], 1)
    assert len(groups) == 3 and of.pending == 8
    entries = decode_groups(of.state_dict())
    assert {entry.prompt.index: entry.begun for entry in entries} == {i: 0 for i, begun in before.items() if begun == 0}
    assert all(entry.group for entry in entries)


def test_a_replacement_group_is_not_cut():
    """The last of four is cut where it is; the replacement of the first gets the time it needs."""
    of, fleet = collector(changes={"use_dynamic_sampling": True}, stragglers="cut", straggler_share=0.25)
    trained, _ = run(of, fleet, Stream(100), last=1, select=lambda groups: [one for one in groups if one.prompt.index])
    assert [index for index, _ in trained] == [1, 2, 3, 4]
    assert [fleet.works[number].prompts[0].index for number in fleet.cut] == [3]


def test_validation_goes_first_and_does_not_affect_training_rollouts():
    of, fleet = collector(max)  # validation prompts have the highest indexes: they are finished first
    of.send(prompts(0, of.num_prompts_to_send(0)), 0)
    fleet.finish(3)
    validated = of.validate(prompts(1000, 3))
    assert [group.prompt.index for group in validated] == [1000, 1001, 1002]
    assert of.pending == 12
    groups, _ = of.collect(Stream(0), list, 0)
    assert [group.prompt.index for group in groups] == [0, 1, 2, 3]


# ---- checkpoints ----------------------------------------------------------------------------------------------------------


def test_a_buffer_keeps_rewards_of_turns_and_reads_one_without_them():
    turn = replace(rollout().turns[0], reward=2.0, malformed=True)
    saved = encode_groups([SavedGroup(*prompts(0, 1), 0, {0: Rollout((turn,), 2.0)}, {})])
    content = msgspec.msgpack.decode(saved)
    of_turn = content[0]["rollouts"][0]["turns"][0]
    assert (of_turn.pop("reward"), of_turn.pop("malformed")) == (2.0, True)
    for stored, expected in ((saved, (2.0, True)), (msgspec.msgpack.encode(content), (0.0, False))):
        (read,) = decode_groups(stored)[0].rollouts[0].turns
        assert (read.reward, read.malformed) == expected


def test_a_restart_keeps_finished_groups_and_trains_once_on_each(caplog):
    caplog.set_level("INFO")
    draw = random.Random(5)

    def pick(open_):
        return draw.choice(list(open_))

    of, fleet = collector(pick, stragglers="keep")
    stream = Stream(100)
    before, _ = run(of, fleet, stream, last=3)
    fleet.finish(max(fleet.open))
    kept, position = of.state_dict(), stream.take(1)[0].index
    entries = decode_groups(kept)
    # these names are a file format: later versions read earlier checkpoints
    assert {name for saved in msgspec.msgpack.decode(kept) for name in saved} == {"prompt", "begun", "rollouts", "open"}
    complete = [entry.prompt.index for entry in entries if entry.group]
    assert len(entries) == 4 and 1 <= len(complete) < 4

    again, fresh = collector(pick, stragglers="keep")
    fresh.version = 3
    values = again.load_state_dict(kept, 3)
    whole, half = len(complete), 4 - len(complete)
    assert caplog.messages[-1] == (
        f"resumed: {2 * whole + half} finished rollouts kept, {half} sampled again (their {7 * half} tokens are lost), 0 not"
        " begun yet"
    )
    assert list(values.values()) == [2 * whole + half, half, 7 * half, 0]
    rest = Stream(100)
    rest.take(position)
    after, metrics = run(again, fresh, rest, first=3)
    indexes = [index for index, _ in before + after]
    assert sorted(indexes) == list(range(24))
    assert max(values["async/age_max"] for values in metrics) <= 2
    assert not set(complete) & {prompt.index for work in fresh.works for prompt in work.prompts}  # not sampled again
    steps = {prompt.index: work.step for work in fresh.works for prompt in work.prompts}
    assert {entry.prompt.index: entry.begun for entry in entries if not entry.group}.items() <= steps.items()


def test_a_checkpoint_between_steps_of_age_0_is_empty():
    of, fleet = collector(max_trajectory_age_steps=0)
    run(of, fleet, Stream(100), last=2)
    assert of.state_dict() == b"" and of.load_state_dict(b"", 2) == {}


def test_a_smaller_age_refuses_older_groups():
    of, fleet = collector()
    run(of, fleet, Stream(100), last=3)
    other, _ = collector(max_trajectory_age_steps=0)
    with refused(("grpo.async_grpo.max_trajectory_age_steps", "run-exists")) as error:
        other.load_state_dict(of.state_dict(), 3)
    assert "the checkpoint of step 3 has 8 groups, begun up to 2 steps ago" in str(error.value)


def test_groups_of_another_size_are_refused():
    of, fleet = collector()
    run(of, fleet, Stream(100), last=3)
    other, _ = collector(changes={"num_generations_per_prompt": 3})
    with refused(("grpo.num_generations_per_prompt", "run-exists")):
        other.load_state_dict(of.state_dict(), 3)


# ---- staleness ------------------------------------------------------------------------------------------------------------


def test_ages_are_per_token():
    """Tokens that a rollout has before a refit are older."""
    first, second = rollout(tokens=3, version=5), rollout(tokens=1, version=7)
    groups = [RolloutGroup(prompts(0, 1)[0], (first, second))]
    assert staleness(groups, 7, 3) == {
        "async/age_mean": 1.5,
        "async/age_max": 2.0,
        "async/tokens_age_0": 1.0,
        "async/tokens_age_1": 0.0,
        "async/tokens_age_2": 3.0,
        "async/tokens_age_3": 0.0,
    }
    with pytest.raises(RuntimeError, match="prompt 0: got tokens of age 4 in step 9"):
        staleness(groups, 9, 3)
    assert staleness([group(prompts(0, 1)[0], version=7)], 7, 0) == {
        "async/age_mean": 0.0,
        "async/age_max": 0.0,
        "async/tokens_age_0": 2.0,
    }
