"""Many episodes on one engine: their content, their order, and their ends."""

import threading

import numpy as np
import pytest

from pipeline.environments.environment import Environment, Outcome
from pipeline.rollout.seeds import sampling_seed
from pipeline.types import NOTHING_SAID, VersionSpan
from tests.generate.tiny import MAX_MODEL_LEN, VOCAB, load
from tests.rollout.engine import Bench, FixedTurns, by_place, prompts, work

ANY = tuple(range(VOCAB))  # as stop tokens: every turn is one word and ends with "stop"


class Once(Environment):
    """Rewards the number of words. Waits for `go` first."""

    workers = 2

    def __init__(self):
        self.go = threading.Event()
        self.go.set()

    def step(self, prompt, text):
        assert self.go.wait(60)
        return Outcome(float(len(text.split())))


def test_several_turns_are_one_sequence(checkpoint):
    """Each token's author is recorded, and log-probs equal one forward pass of the whole sequence."""
    bench = Bench(checkpoint, {"told": FixedTurns(3)})
    later, _ = bench.run(0, prompts(3), samples=2, max_turns=5)
    assert later.ended and len(later.unsent) == 3
    for part in later.unsent:
        assert part.group.prompt.index == part.group_index
        for rollout in part.group.rollouts:
            told = [turn.observation.tolist() for turn in rollout.turns]
            assert told == [[21], [22], []]
            assert (rollout.reward, rollout.metrics, rollout.failure) == (2.0, {"turns": 3.0}, "")
            assert [turn.reward for turn in rollout.turns] == [1.0, 1.0, 0.0]
            assert rollout.tokens[~rollout.drawn].tolist() == [21, 22]
            expected = checkpoint.logprobs(part.group.prompt.tokens, rollout.tokens, temperature=1.0)
            np.testing.assert_allclose(rollout.logprobs[rollout.drawn], expected[rollout.drawn], atol=1e-4)
            assert sum(span.tokens for span in rollout.spans) == rollout.drawn.sum()
    first, second = later.unsent[0].group.rollouts
    assert first.tokens.tolist() != second.tokens.tolist()


def test_each_turn_has_its_own_seed():
    seeds = {
        sampling_seed(42, "train", prompt, sample, turn) for prompt in range(9) for sample in range(9) for turn in range(9)
    }
    assert len(seeds) == 9**3 and all(0 <= seed < 2**63 for seed in seeds)
    assert np.std([seed / 2**63 for seed in seeds]) == pytest.approx(12**-0.5, rel=0.1)
    assert sampling_seed(42, "train", 1, 2) == sampling_seed(42, "train", 1, 2, turn=0)


def test_an_episode_ends_at_its_limit_of_turns_or_tokens(checkpoint):
    bench = Bench(checkpoint, {"told": FixedTurns(100)})
    _, (rollout,) = bench.run(0, prompts(1), samples=1, max_turns=2)
    assert len(rollout.turns) == 2 and len(rollout.turns[-1].observation) == 0 and rollout.reward == 2.0
    _, (rollout,) = bench.run(1, prompts(1), samples=1, max_turns=100, stop=ANY)
    assert rollout.finish == "length" and len(rollout.turns) > 2 and len(rollout.turns[-1].observation) == 0
    assert MAX_MODEL_LEN - 2 <= len(prompts(1)[0].tokens) + len(rollout.tokens) <= MAX_MODEL_LEN


def test_a_slow_tool_does_not_stall_other_episodes(checkpoint):
    """Group 0 is answered only after all other groups."""

    class Slow(FixedTurns):
        go = threading.Event()

        def reset(self, prompt):
            return {"turn": 0, "slow": prompt.index == 0}

        def step(self, episode, text):
            assert not episode["slow"] or self.go.wait(60)
            return super().step(episode, text)

    bench = Bench(checkpoint, {"told": Slow(3)})
    later = bench.driver.rollout(work(0, prompts(4), samples=2, max_turns=3))

    def look() -> bool:
        if len(later.unsent) == 3:
            Slow.go.set()
        return False

    bench.work(look)
    assert [part.group_index for part in later.unsent][-1] == 0
    assert not any(rollout.failure for rollouts in by_place(later.unsent).values() for rollout in rollouts)
    assert "environment" in bench.world.phases  # the engine was idle in the end, and waited


def test_all_first_turns_start_before_the_first_step_and_judging_takes_no_slot(checkpoint):
    """The batch does not depend on time if episodes have one turn."""
    once = Once()
    once.go.clear()
    bench = Bench(checkpoint, {"told": once}, max_num_seqs=3)
    later = bench.driver.rollout(work(0, prompts(4), samples=2))
    bench.work(lambda: len([id for ids in bench.engine.added for id in ids]) == 8)  # no judge has answered
    assert bench.engine.calls[0] == ("add", ["0/0/0/0", "0/0/1/0", "0/1/0/0"])
    assert [id for ids in bench.engine.added for id in ids] == [f"0/{i}/{k}/0" for i in range(4) for k in range(2)]
    assert max(pending for name, pending in bench.engine.calls if name == "step") == 3
    once.go.set()
    bench.work()
    assert later.ended and len(later.unsent) == 4


def test_open_episodes_are_bounded_whatever_their_turns(checkpoint):
    bench = Bench(checkpoint, {"told": FixedTurns(3)}, max_num_seqs=3)
    begun, most = set(), []

    def look(steps):
        open_ = {f"{p}/{s}" for p, s in bench.driver._works[0].episodes} if 0 in bench.driver._works else set()
        begun.update(id.split("/", 1)[1].rsplit("/", 1)[0] for ids in bench.engine.added for id in ids)
        most.append(len(open_ & begun))

    bench.engine.before_step = look
    later, _ = bench.run(0, prompts(4), samples=2, max_turns=3)
    assert later.ended and max(most) <= 3 + FixedTurns.workers  # those past their last turn are only being judged
    assert max(pending for name, pending in bench.engine.calls if name == "step") <= 3


def test_urgent_work_starts_before_other_work(checkpoint):
    bench = Bench(checkpoint, {"told": Once()}, max_num_seqs=2)
    bench.driver.rollout(work(0, prompts(3), samples=2))
    bench.after(steps=1)
    bench.driver.rollout(work(1, prompts(1, first=50), samples=2, urgent=True))
    bench.driver.rollout(work(2, prompts(1, first=60), samples=1))
    bench.work()
    order = [id.split("/")[0] for ids in bench.engine.added for id in ids]
    assert order == ["0", "0", "1", "1", "0", "0", "0", "0", "2"]


def test_only_the_unfinished_rollouts_of_a_work_are_sampled(checkpoint):
    bench = Bench(checkpoint, {"told": Once()})
    whole, _ = bench.run(0, prompts(2), samples=3)
    groups = by_place(whole.unsent)
    finished = {0: {1: groups[0][1]}, 1: dict(enumerate(groups[1]))}
    rest = bench.driver.rollout(work(1, prompts(2), samples=3, finished=finished))
    assert [part.group_index for part in rest.unsent] == [1] and not rest.ended  # it has nothing left to do
    bench.work()
    assert bench.engine.added[1:] == [["1/0/0/0", "1/0/2/0"]]
    for place, rollouts in by_place(rest.unsent).items():
        assert [r.tokens.tolist() for r in rollouts] == [r.tokens.tolist() for r in groups[place]]
    assert rest.ended
    empty = bench.driver.rollout(work(2, []))
    assert empty.ended and not empty.unsent


def test_a_snapshot_contains_finished_rollouts_and_drawn_tokens(checkpoint):
    bench = Bench(checkpoint, {"told": FixedTurns(2)}, max_num_seqs=3)
    later = bench.driver.rollout(work(4, prompts(3), samples=2, max_turns=2))
    bench.after(steps=9)
    progress = bench.engine.progress()
    stands = bench.driver.snapshot()
    answered = {part.group_index for part in later.unsent}
    assert {unfinished.group_index for unfinished in stands} == {0, 1, 2} - answered
    seen = 0
    for unfinished in stands:
        assert unfinished.number == 4 and sorted([*unfinished.finished, *unfinished.open]) == [0, 1]
        for sample, spans in unfinished.open.items():
            running = [id for id in progress if id.startswith(f"4/{unfinished.group_index}/{sample}/")]
            if running:
                seen += 1
                tail = list(progress[running[0]])
                assert spans[len(spans) - len(tail) :] == tail
                assert len(spans) == int(running[0][-1]) + bool(tail)  # one of each earlier turn
            assert all(span.version == 7 for span in spans)
    assert seen and {0, 1, 2} - answered
    assert stands[-1].open[1] == []  # the last one has not started
    bench.work()
    assert later.ended and bench.driver.snapshot() == []


def test_a_cut_ends_open_episodes_and_they_are_judged(checkpoint):
    bench = Bench(checkpoint, {"told": Once()}, max_num_seqs=3)
    cut = bench.driver.rollout(work(0, prompts(2), samples=2, max_new_tokens=20))
    other = bench.driver.rollout(work(1, prompts(1), samples=1, max_new_tokens=20))
    bench.after(steps=4)
    running = bench.engine.progress()
    bench.driver.cut([0, 99])
    bench.work()
    rollouts = [rollout for place in range(2) for rollout in by_place(cut.unsent)[place]]
    assert rollouts[-1].failure == NOTHING_SAID and rollouts[-1].turns == ()
    still = [rollout for i, rollout in enumerate(rollouts) if f"0/{i // 2}/{i % 2}/0" in running]
    assert still and all(r.finish == "length" and r.drawn_tokens == 4 and not r.failure for r in still)
    assert all(rollout.reward == len(rollout.tokens) for rollout in still)  # judged nevertheless
    ((whole,),) = by_place(other.unsent).values()
    assert whole.drawn_tokens > 4 and not whole.failure
    (ids,) = [ids for name, ids in bench.engine.calls if name == "cut"]
    assert all(id.startswith("0/") for id in ids)


def test_a_cut_between_two_turns_keeps_the_turns_so_far(checkpoint):
    """One whose environment is working, and one whose outcome has come but is not added yet."""
    told = FixedTurns(9)
    bench = Bench(checkpoint, {"told": told})
    later = bench.driver.rollout(work(0, prompts(1), samples=1, max_turns=9, max_new_tokens=2))
    bench.work(lambda: bool(bench.driver._to_draw))
    (episode,) = bench.driver._to_draw
    said = [turn.completion.tokens.tolist() for turn in episode.turns]
    bench.driver.cut([0])
    ((rollout,),) = by_place(later.unsent).values()
    assert [turn.completion.tokens.tolist() for turn in rollout.turns] == said
    assert rollout.finish == "length" and len(rollout.turns[-1].observation) == 0 and rollout.reward == 1.0

    later = bench.driver.rollout(work(1, prompts(1), samples=1, max_turns=9, stop=ANY))
    bench.work(lambda: bool(bench.driver._in_environment))
    bench.driver.cut([1])
    bench.work()
    ((rollout,),) = by_place(later.unsent).values()
    assert len(rollout.turns) == 1 and rollout.finish == "length" and rollout.reward == 1.0 and not rollout.failure


def test_a_drain_finishes_started_work_and_starts_none_until_new_weights(checkpoint):
    bench = Bench(checkpoint, {"told": FixedTurns(2)}, max_num_seqs=3)
    later = bench.driver.rollout(work(0, prompts(4), samples=2, max_turns=2))
    bench.after(steps=2)
    drain = bench.driver.drain()
    assert not drain.ended
    bench.work()
    assert drain.ended and bench.engine.pending == 0 and not later.ended
    begun = {id.rsplit("/", 1)[0] for ids in bench.engine.added for id in ids}
    assert begun == {"0/0/0", "0/0/1", "0/1/0"}
    assert bench.driver.drain().ended  # nothing is open
    bench.driver.paused = True
    load(bench.engine, checkpoint.weights().items(), version=8)
    bench.work()
    assert bench.engine.pending == 0  # paused
    bench.driver.resume()
    bench.work()
    assert later.ended
    rollouts = by_place(later.unsent)
    versions = [{span.version for span in rollout.spans} for place in range(4) for rollout in rollouts[place]]
    assert versions == [{7}] * 3 + [{8}] * 5


def test_new_weights_between_two_steps_make_spans_of_two_versions(checkpoint):
    bench = Bench(checkpoint, {"told": FixedTurns(3)})
    later = bench.driver.rollout(work(0, prompts(2), samples=1, max_turns=3, max_new_tokens=12))
    bench.after(steps=3)
    bench.driver.paused = True
    update = bench.engine.update()
    bench.work()  # does not affect the engine
    assert bench.engine.steps == 3
    update.load(checkpoint.weights().items())
    update.commit(8)
    bench.driver.resume()
    bench.work()
    for (rollout,) in by_place(later.unsent).values():
        assert rollout.spans[:2] == (VersionSpan(7, 3), VersionSpan(8, rollout.spans[1].tokens))
        assert all(span.version == 8 for span in rollout.spans[1:])


def test_a_work_number_is_used_once(checkpoint):
    bench = Bench(checkpoint, {"told": Once()})
    bench.driver.rollout(work(0, prompts(1)))
    with pytest.raises(ValueError, match="work 0 is in progress already"):
        bench.driver.rollout(work(0, prompts(1)))
