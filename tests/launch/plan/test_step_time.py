"""The step time once its phases are known: by hand, and for asynchronous sampling against the loop's own buffer."""

import math
import random
from types import SimpleNamespace

import pytest

from launch.plan import generate_time, step_time
from launch.plan.generate_time import EngineLoad
from launch.plan.lengths import Lengths
from pipeline import config
from pipeline.config import AsyncConfig
from pipeline.coordination.buffer import Buffer
from tests.launch.plan.test_time import engine

SECONDS = {"rollout": 50.0, "train": 30.0, "refit": 1.0}
SPREAD = Lengths(100, 300, 1500, "")


def load(count: float = 48, slots: int = 64, lengths: Lengths = SPREAD) -> EngineLoad:
    return EngineLoad(engine(), count, slots, lengths, count)


def alone(load: EngineLoad) -> float:
    return sum(generate_time.decoding(load.engine, load.count, load.slots, load.lengths, load.answers).values())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["grpo.async_grpo.enabled=false"], (81, 50, 30)),
        (["grpo.async_grpo.in_flight_weight_updates=false"], (51, 20, 0)),
        (["grpo.async_grpo.enabled=false", "policy.generation.colocated.enabled=true"], (81, 0, 0)),
    ],
)
def test_step_times_by_hand(overrides, expected):
    found = step_time.estimate(config.load("llama8b_grpo", overrides), SECONDS, 50.0, load())
    assert (found.step, found.train, found.generate) == expected


def test_the_train_ranks_wait_for_scores():
    """An engine samples for 20 of 50 seconds, and a reward model scores for 30."""
    found = step_time.estimate(config.load("llama8b_grpo"), SECONDS, 20.0, load())
    assert found.step == pytest.approx(30 + 30 + 1) and found.train == pytest.approx(30)


def test_sampling_in_flight_is_bound_by_training_by_latency_or_by_the_engine():
    one = load()
    sampling = alone(one)
    assert step_time.in_flight(one, sampling, 3 * sampling, 1.0, age=1) == 3 * sampling + 1
    ahead = [step_time.in_flight(one, sampling, 0.0, 0.0, age) for age in (1, 2, 100)]
    full = one.count * SPREAD.answer / one.slots * sum(one.engine.parts(one.slots, 300).values())
    assert sampling > ahead[0] > ahead[1] > ahead[2] > 0.9 * full
    assert ahead[0] >= sampling / 2


@pytest.mark.parametrize(
    ("count", "slots", "age", "training"),
    [
        pytest.param(48, 64, 1, 0.1, marks=pytest.mark.full),
        pytest.param(48, 64, 1, 0.6, marks=pytest.mark.full),
        (48, 24, 1, 0.3),
        (48, 64, 2, 0.3),
    ],
)
def test_against_the_loop_token_by_token(count, slots, age, training):
    """Compare with sampled lengths, the loop's own buffer, and one token for each running sequence at a time."""
    one = load(count, slots)
    train, refit = training * alone(one), 0.02 * alone(one)
    expected = [_loop(one, train, refit, age, seed) for seed in range(3)]
    assert step_time.in_flight(one, alone(one), train, refit, age) == pytest.approx(sum(expected) / 3, rel=0.1)


def _loop(load: EngineLoad, train: float, refit: float, age: int, seed: int, steps: int = 12, warm: int = 4) -> float:
    draw, scale, wanted = random.Random(seed), load.lengths.scale, int(load.count)
    buffer = Buffer(AsyncConfig(enabled=True, max_trajectory_age_steps=age, in_flight_weight_updates=True), wanted)
    waiting: list[list[int]] = []  # [prompt, tokens left, tokens had]
    running: list[list[int]] = []
    begun, time, since = 0, 0.0, 0.0

    def send(step: int) -> None:
        nonlocal begun
        room = buffer.num_groups_to_begin(1000)
        buffer.begin([SimpleNamespace(index=begun + i) for i in range(room)], step)
        for i in range(room):
            waiting.append([begun + i, math.ceil(min(load.lengths.limit, draw.expovariate(1 / scale))), 0])
        begun += room

    def token() -> None:
        nonlocal time, running
        while waiting and len(running) < load.slots:
            running.append(waiting.pop(0))
        context = load.lengths.prompt + sum(had for *_, had in running) / len(running)
        time += sum(load.engine.parts(len(running), context).values())
        running = [[prompt, left - 1, had + 1] for prompt, left, had in running]
        for prompt, left, _ in running:
            if left == 0:
                buffer.complete(SimpleNamespace(prompt=SimpleNamespace(index=prompt)))
        running = [sequence for sequence in running if sequence[1]]

    for step in range(steps):
        if step == warm:
            since = time
        send(step)
        while buffer.take(step, wanted) is None:
            token()
        end = time + train
        while time < end and (waiting or running):
            token()
        time = max(time, end) + refit
    return (time - since) / (steps - warm)
