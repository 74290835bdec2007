"""Groups go to the engine with the least work, and are returned whole."""

from dataclasses import replace

import pytest

from pipeline.coordination.dispatch import Dispatcher, RolloutSpec
from pipeline.rollout.failures import FIRST_GROUPS, FailureMonitor
from pipeline.types import NOTHING_SAID, RolloutGroup, Sampling
from tests.rollout.fleet import Fleet, prompts, rollout

TRAIN = RolloutSpec("train", 2, Sampling())


def dispatch(engines=3, pick=min):
    fleet = Fleet(engines, pick)
    return Dispatcher(fleet.engines, 42, 5, FailureMonitor(10, "key")), fleet


def given(engine):
    return [[prompt.index for prompt in work.prompts] for work in engine.works]


def test_idle_engines_get_groups_round_robin_in_one_message_each():
    of, fleet = dispatch()
    of.send(prompts(0, 7), TRAIN)
    assert [given(engine) for engine in fleet.engines] == [[[0, 3, 6]], [[1, 4]], [[2, 5]]]
    assert of.outstanding == [6, 4, 4]
    assert (fleet.works[0].seed, fleet.works[0].max_turns, fleet.works[0].samples) == (42, 5, 2)
    assert len({work.number for work in fleet.works}) == 3


def test_the_engine_with_the_least_work_gets_the_next_group():
    of, fleet = dispatch()
    of.send(prompts(0, 6), TRAIN)
    for index in (1, 4, 2):  # engine 1 is idle, engine 2 has one group
        fleet.finish(index)
    of.receive(block=False)
    assert of.outstanding == [4, 0, 2]
    of.send(prompts(6, 4), TRAIN)
    assert [given(engine)[1:] for engine in fleet.engines] == [[[9]], [[6, 7]], [[8]]]


def test_a_long_group_counts_for_all_its_episodes():
    of, fleet = dispatch(2)
    of.send(prompts(100, 1), RolloutSpec("val", 8, Sampling()))
    of.send(prompts(0, 5), TRAIN)
    assert [given(engine)[-1:] for engine in fleet.engines] == [[[4]], [[0, 1, 2, 3]]]


def test_groups_are_returned_once_and_by_purpose():
    of, fleet = dispatch()
    of.send(prompts(0, 3), TRAIN)
    of.send(prompts(10, 2), RolloutSpec("val", 1, Sampling(), urgent=True))
    fleet.finish(2)
    assert [group.prompt.index for group in of.wait_for(prompts(10, 2), "val")] == [10, 11]
    assert {group.prompt.index for group in of.take("train")} >= {2}
    assert of.take("val") == []
    while fleet.open:
        of.receive()
    assert of.outstanding == [0, 0, 0]


def test_finished_rollouts_are_sent_with_their_group():
    of, fleet = dispatch(2)
    kept = rollout(reward=0.75)
    of.send(prompts(0, 3), TRAIN, {2: {1: kept}})
    assert [work.finished for work in fleet.works] == [{1: {1: kept}}, {}]
    group = of.wait_for(prompts(0, 3), "train")[2]
    assert group.rollouts[1] is kept


def test_a_cut_names_only_the_works_of_these_groups():
    of, fleet = dispatch(2)
    of.send(prompts(0, 4), RolloutSpec("train", 2, Sampling(), apart=True))
    assert [given(engine) for engine in fleet.engines] == [[[0], [2]], [[1], [3]]]
    of.cut(prompts(2, 1))
    assert fleet.cut == [next(work.number for work in fleet.works if work.prompts[0].index == 2)]


def test_a_snapshot_omits_returned_groups():
    of, fleet = dispatch(2)
    of.send(prompts(0, 4), TRAIN)
    of.send(prompts(50, 1), RolloutSpec("val", 2, Sampling()))
    fleet.finish(1)
    stands = of.snapshot("train")
    assert sorted(stands) == [0, 2, 3] and stands[3].group_index == 1
    assert [group.prompt.index for group in of.take("train")] == [1]


def test_a_series_of_wholly_failed_groups_ends_the_run_and_one_judged_episode_resets_it(caplog):
    failures = FailureMonitor(2, "some.max_generation_failures")
    prompt = prompts(5, 1)[0]
    bad, good, cut = rollout(failure="TimeoutError: 10 s"), rollout(), rollout(failure=NOTHING_SAID)
    for rollouts in ((bad, bad, bad), (bad, cut), (bad, bad, good), (cut, cut, cut), (bad, bad), (good,), (bad,), (bad,)):
        failures.record(RolloutGroup(prompt, rollouts))
    out = caplog.text
    assert "env.addition, prompt 5: 2 of 3 episodes failed and are not trained on; episode 0: TimeoutError: 10 s" in out
    assert len(caplog.messages) == 6
    failures.record(RolloutGroup(prompt, (cut, cut)))
    with pytest.raises(
        RuntimeError, match=r"prompt 5: .* all episodes of 3 consecutive groups failed; at most 2 may .*generation_failures"
    ):
        failures.record(RolloutGroup(prompt, (bad, cut)))


def test_answers_that_break_their_judge_end_no_run_but_a_judge_that_never_judges_does():
    """Failures that are not an answer's fault are counted separately."""
    failures = FailureMonitor(0, "key")
    prompt = prompts(5, 1)[0]
    other = replace(prompt, environment="other")
    broke, good = rollout(broke="step raised KeyError: 'x' at mine.py:3"), rollout()
    for rollouts in [(broke, good), *[(broke, broke)] * 50]:
        failures.record(RolloutGroup(prompt, rollouts))
    for _ in range(FIRST_GROUPS):
        failures.record(RolloutGroup(other, (broke, broke)))
    with pytest.raises(RuntimeError, match=r"env\.other, prompt 5: .*mine\.py:3; it could judge no answer of its first 11"):
        failures.record(RolloutGroup(other, (broke, rollout(failure=NOTHING_SAID))))
    with pytest.raises(RuntimeError, match=r"all episodes of 1 consecutive groups failed; at most 0 may"):
        failures.record(RolloutGroup(prompt, (rollout(failure="no connection"),) * 2))
