"""Groups that a step may and must take: no age above k, no group twice or never, no advantage for short answers."""

import itertools
import random
from collections import Counter

import pytest

from pipeline.config import AsyncConfig
from pipeline.coordination.buffer import Buffer
from tests.problems import refused
from tests.rollout.fleet import group, prompts

STRAGGLERS = ("wait", "keep", "cut")


def buffer(stragglers="wait", age=2, size=4, share=0.25) -> Buffer:
    config = AsyncConfig(enabled=True, max_trajectory_age_steps=age, stragglers=stragglers, straggler_share=share)
    return Buffer(config, size)


class Schedule:
    """Runs a buffer to the end of `steps` steps; `finishes(prompt, draw)` is how long a group takes, in units of groups."""

    def __init__(self, of: Buffer, size: int, steps: int, draw: random.Random, duration, rejected: float = 0.0):
        self.of, self.size, self.steps, self.draw, self.duration, self.rejected = of, size, steps, draw, duration, rejected
        self.now, self.next, self.ends, self.begun = 0.0, 0, {}, {}
        self.trained: list[tuple[int, int]] = []  # (prompt, step)
        self.thrown: list[int] = []
        self.waits = 0

    def begin(self, count: int, step: int) -> None:
        new = prompts(self.next, count)
        self.next += count
        self.of.begin(new, step)
        for prompt in new:
            self.begun[prompt.index] = step
            self.ends[prompt.index] = self.now + self.duration(prompt.index)

    def complete_one(self) -> None:
        index = min(self.ends, key=self.ends.get)
        self.now = max(self.now, self.ends.pop(index))
        self.of.complete(group(prompts(index, 1)[0]))

    def run(self) -> "Schedule":
        for step in range(self.steps):
            self.begin(self.of.num_groups_to_begin(self.steps - step), step)
            while self.ends and self.draw.random() < 0.5:  # some finish while the train ranks work
                self.complete_one()
            wanted = self.size
            while wanted:
                while (taken := self.of.take(step, wanted)) is None:
                    self.waits += 1
                    assert self.ends, "it waits, and nothing is under way"
                    self.complete_one()
                thrown = [one.prompt.index for one in taken if self.draw.random() < self.rejected]
                kept = [one.prompt.index for one in taken if one.prompt.index not in thrown]
                self.trained += [(index, step) for index in kept]
                self.thrown += thrown
                wanted -= len(kept)
                self.begin(len(thrown), step)
        return self

    def check(self) -> None:
        assert Counter(Counter(step for _, step in self.trained).values()) == {self.size: self.steps}  # every step was full
        ages = [step - self.begun[index] for index, step in self.trained]
        assert min(ages) >= 0 and max(ages) <= self.of.max_age
        every = sorted([index for index, _ in self.trained] + self.thrown)
        assert every == list(range(self.next))  # each group that was started once, and none is left


def durations(draw: random.Random):
    """Return a duration: mostly short, sometimes very long."""
    kind = draw.choice(["same", "uniform", "heavy", "adversarial"])
    return {
        "same": lambda index: 1.0,
        "uniform": lambda index: draw.random() * 4,
        "heavy": lambda index: draw.paretovariate(0.8),
        "adversarial": lambda index: 1e6 if index % 7 == 0 else 1e-3,
    }[kind]


@pytest.mark.parametrize("stragglers", STRAGGLERS)
def test_any_run_fills_all_steps_and_trains_once_on_each_group_before_it_is_too_old(stragglers):
    seen = set()
    for seed in range(300):
        draw = random.Random(seed)
        age, size, steps = draw.randint(0, 8), draw.randint(1, 9), draw.randint(1, 12)
        rejected = draw.choice([0.0, 0.0, 0.4])
        run = Schedule(buffer(stragglers, age, size), size, steps, draw, durations(draw), rejected).run()
        run.check()
        seen |= {step - run.begun[index] for index, step in run.trained}
    assert seen == set(range(9))  # every age occurs


@pytest.mark.parametrize(("stragglers", "age"), [("wait", 1), ("keep", 1), ("wait", 2), ("keep", 2), ("keep", 3)])
def test_every_order_of_completion(stragglers, age):
    """Enumerate all behaviours of a few groups: size 2, four steps, each choice of which open group ends next."""
    size, steps, runs = 2, 4, 0

    def explore(choices: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Run with these choices and then the first one. Return the choices that it did not take."""
        of, ends, begun, trained, made, branches = buffer(stragglers, age, size), set(), {}, [], [], []
        for step in range(steps):
            new = prompts(len(begun), of.num_groups_to_begin(steps - step))
            of.begin(new, step)
            ends |= {prompt.index for prompt in new}
            begun |= {prompt.index: step for prompt in new}
            while (taken := of.take(step, size)) is None:
                options = sorted(ends)
                choice = choices[len(made)] if len(made) < len(choices) else 0
                if len(made) >= len(choices):
                    branches.extend((*made, other) for other in range(1, len(options)))
                made.append(choice)
                ends.remove(options[choice])
                of.complete(group(prompts(options[choice], 1)[0]))
            trained += [(one.prompt.index, step) for one in taken]
        assert sorted(index for index, _ in trained) == list(range(len(begun))) == list(range(size * steps))
        assert all(0 <= step - begun[index] <= age for index, step in trained)
        return branches

    todo = [()]
    while todo and runs < 2000:
        todo += explore(todo.pop())
        runs += 1
    assert runs > 100


def test_age_0_takes_the_prompts_of_the_step_in_order():
    of = buffer(age=0, size=3)
    assert of.num_groups_to_begin(steps_left=9) == 3
    of.begin(prompts(0, 3), 0)
    for index in (2, 0, 1):
        assert of.take(0, 3) is None
        of.complete(group(prompts(index, 1)[0]))
    assert [one.prompt.index for one in of.take(0, 3)] == [0, 1, 2]
    assert of.live == []


def test_wait_takes_the_oldest_whatever_is_complete():
    of = buffer("wait", age=1, size=2)
    of.begin(prompts(0, of.num_groups_to_begin(9)), 0)
    for index in (3, 2, 1):
        of.complete(group(prompts(index, 1)[0]))
        assert of.take(0, 2) is None
    of.complete(group(prompts(0, 1)[0]))
    assert [one.prompt.index for one in of.take(0, 2)] == [0, 1]


def test_keep_defers_a_straggler_until_it_is_due():
    of = buffer("keep", age=2, size=2)
    of.begin(prompts(0, of.num_groups_to_begin(9)), 0)
    assert len(of.live) == 4
    for step, ready in enumerate([(1, 2), (3, 4)]):
        for index in ready:
            of.complete(group(prompts(index, 1)[0]))
        assert [one.prompt.index for one in of.take(step, 2)] == list(ready)  # without 0
        of.begin(prompts(4 + 2 * step, 2), step + 1)
    for index in (5, 6, 7):
        of.complete(group(prompts(index, 1)[0]))
    assert of.take(2, 2) is None  # 0 is 2 steps old: this step must take it
    of.complete(group(prompts(0, 1)[0]))
    assert [one.prompt.index for one in of.take(2, 2)] == [0, 5]


def test_keep_waits_if_later_steps_could_not_take_all_due_groups():
    """Four stragglers with one deadline, two to a step: two of them must be taken one step earlier."""
    of = buffer("keep", age=1, size=2)
    of.begin(prompts(0, 3), 0)
    of.complete(group(prompts(2, 1)[0]))
    assert of.take(0, 2) is None  # fewer than two are complete
    of.complete(group(prompts(1, 1)[0]))
    assert [one.prompt.index for one in of.take(0, 2)] == [1, 2]
    over = buffer("keep", age=3, size=1)
    over.begin(prompts(0, 2), 0)
    over.begin(prompts(2, 1), 2)
    over.complete(group(prompts(2, 1)[0]))
    assert over.take(2, 1) is None  # 0 and 1 are due by step 3, so one of them must be taken now
    over.complete(group(prompts(1, 1)[0]))
    assert [one.prompt.index for one in over.take(2, 1)] == [1]


def test_cut_ends_only_the_last_few_of_the_step():
    of = buffer("cut", age=1, size=4, share=0.25)
    of.begin(prompts(0, 8), 0)
    for index in (1, 2):
        of.complete(group(prompts(index, 1)[0]))
    assert of.stragglers(4) == []  # 0 and 3: half of the answers
    of.complete(group(prompts(3, 1)[0]))
    assert [prompt.index for prompt in of.stragglers(4)] == [0]
    assert of.stragglers(4) == []  # once
    assert buffer("wait").stragglers(4) == []


def test_cut_does_not_end_replacements_of_discarded_groups():
    of = buffer("cut", age=1, size=4, share=0.25)
    of.begin(prompts(0, 3), 0)
    for wanted in (1, 2, 3):
        assert of.stragglers(wanted) == []


def test_no_more_groups_start_than_the_remaining_steps_take():
    of = buffer("wait", age=8, size=4)
    assert of.num_groups_to_begin(steps_left=2) == 8
    of.begin(prompts(0, 8), 0)
    assert of.num_groups_to_begin(steps_left=2) == 0 and of.num_groups_to_begin(steps_left=100) == 28


@pytest.mark.parametrize("stragglers", STRAGGLERS)
def test_open_groups_can_always_be_trained_on_in_time(stragglers):
    for age, size in itertools.product(range(9), range(1, 9)):
        of = buffer(stragglers, age, size)
        of.begin(prompts(0, of.num_groups_to_begin(100)), 5)
        of.check(5)
        of.begin(prompts(1000, size * (age + 1) - of.capacity + 1), 5)
        with refused(("grpo.async_grpo.max_trajectory_age_steps", "run-exists")):
            of.check(5)


def test_a_group_starts_and_completes_once():
    of = buffer()
    of.begin(prompts(0, 1), 0)
    with pytest.raises(ValueError, match="prompt 0 is in progress already"):
        of.begin(prompts(0, 1), 0)
    of.complete(group(prompts(0, 1)[0]))
    with pytest.raises(ValueError, match="prompt 0 was complete already"):
        of.complete(group(prompts(0, 1)[0]))


# ---- length bias ----------------------------------------------------------------------------------------------------------


class FirstComeFirstServed(Buffer):
    """A wrong buffer: a step takes the groups that complete first, and the open ones are discarded."""

    def take(self, step, wanted):
        done = [live for live in self.live if live.group is not None]
        if len(done) < wanted:
            return None
        for live in self.live:
            del self._live[live.prompt.index]
        return [live.group for live in done[:wanted]]


def lengths_trained(kind: type[Buffer], stragglers: str) -> tuple[list[int], list[int]]:
    """Return (lengths that a run sampled, lengths that it trained on), if a group takes as long as its answers are."""
    draw = random.Random(7)
    lengths = [round(1 + 100 * draw.paretovariate(1.2)) for _ in range(8 * 60 * 6)]
    size, steps = 8, 60
    config = AsyncConfig(enabled=True, max_trajectory_age_steps=4, stragglers=stragglers)
    of, now, ends, sampled, trained = kind(config, size), 0.0, {}, [], []
    for step in range(steps):
        new = prompts(len(sampled), of.num_groups_to_begin(steps - step))
        of.begin(new, step)
        for prompt in new:
            sampled.append(lengths[prompt.index])
            ends[prompt.index] = now + lengths[prompt.index]
        while (taken := of.take(step, size)) is None:
            index = min(ends, key=ends.get)
            now = max(now, ends.pop(index))
            of.complete(group(prompts(index, 1)[0]))
        trained += [lengths[one.prompt.index] for one in taken]
        alive = {live.prompt.index for live in of.live}
        ends = {index: end for index, end in ends.items() if index in alive}
    return sampled, trained


@pytest.mark.parametrize("stragglers", ["wait", "keep"])
def test_trained_lengths_equal_sampled_lengths(stragglers):
    sampled, trained = lengths_trained(Buffer, stragglers)
    assert Counter(trained) == Counter(sampled)
    assert len(trained) == 8 * 60


def test_the_same_check_detects_a_rule_that_prefers_short_answers():
    sampled, trained = lengths_trained(FirstComeFirstServed, "wait")
    assert Counter(trained) != Counter(sampled)
    assert sum(trained) / len(trained) < 0.8 * sum(sampled) / len(sampled)
