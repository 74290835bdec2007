"""Thinking budgets: what the policy thinks, the inserted end, and its answer, on a real engine."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.environments.environment import Environment, Outcome
from pipeline.generate import build
from pipeline.rollout.seeds import sampling_seed
from pipeline.types import Request, Thinking
from tests.generate.tiny import EOS, MAX_MODEL_LEN, drain, policy
from tests.rollout import engine as bench_module
from tests.rollout.engine import Bench, by_place, prompts, work

THINKING = Thinking(tokens=7, end="w5", end_tokens=(5, 9))
BUDGET = 6  # of an answer


class Listens(Environment):
    """Answers once, then ends the episode. Notes each text."""

    def __init__(self, turns: int = 1):
        self.turns, self.seen = turns, []

    def reset(self, prompt):
        return {"turn": 0, "prompt": prompt.index}

    def step(self, episode, text):
        self.seen.append((episode["prompt"], text))
        episode["turn"] += 1
        told = {"role": "user", "content": "w20"} if episode["turn"] < self.turns else None
        return Outcome(1.0, {"turn": float(episode["turn"])}, told)


def thinking_work(asked, turns=1, thinking=THINKING, **rest):
    plain = work(0, asked, samples=1, max_new_tokens=BUDGET, max_turns=turns, **rest)
    return replace(plain, sampling=replace(plain.sampling, thinking=thinking, stop=("w3",)))


def run(bench, asked_work):
    later = bench.driver.rollout(asked_work)
    bench.work()
    return {place: rollouts[0] for place, rollouts in by_place(later.unsent).items()}


@pytest.mark.parametrize(
    "backend, turns", [("transformers", 1), ("transformers", 2), pytest.param("vllm", 2, marks=pytest.mark.full)]
)
def test_the_policy_thinks_then_answers(checkpoint, backend, turns, monkeypatch):
    if backend == "vllm":
        monkeypatch.setattr(bench_module, "_engine", lambda folder: build(policy(folder, backend), 1, 0, 0))
    environment, asked = Listens(turns), prompts(24)
    bench = Bench(checkpoint, {"told": environment})
    rollouts = run(bench, thinking_work(asked, turns))
    engine, text = bench.engine._engine, lambda tokens: " ".join(f"w{token}" for token in tokens)
    ends, seen = set(), []
    for place, prompt in enumerate(asked):
        rollout, tokens = rollouts[place], prompt.tokens
        assert rollout.reward == rollout.answers == turns or rollout.finish == "length"
        for number, turn in enumerate(rollout.turns):
            before = number and rollout.turns[number - 1].thinking
            settings = {"max_new_tokens": BUDGET, "stop": ("w3",)} if before else {"max_new_tokens": 7, "stop": ("w5",)}
            sampling = replace(thinking_work(asked).sampling, thinking=None, **settings)
            seed = sampling_seed(42, "train", prompt.index, 0, number)
            expected = drain(engine, [Request("x", tokens, seed, sampling)])["x"]
            assert turn.completion.tokens.tolist() == expected.tokens.tolist()
            np.testing.assert_allclose(turn.completion.logprobs, expected.logprobs, atol=1e-4)
            drawn = turn.completion.tokens.tolist()
            ended = "end of turn" if drawn[-1] == EOS else "string" if expected.stop else "budget"
            ends.add(("answer" if before else "thinking", ended))
            assert turn.thinking == (not before and ended != "end of turn")
            if turn.thinking:
                assert turn.observation.tolist() == ([5, 9] if ended == "budget" else [])
            else:
                said = drawn[:-1] if ended == "end of turn" else drawn
                seen.append((prompt.index, text(said).partition("w3" if before else "never")[0]))
            tokens = np.concatenate([tokens, turn.completion.tokens, turn.observation]).astype(np.int32)
        assert not rollout.drawn[len(rollout.turns[0].completion.tokens) :][: len(rollout.turns[0].observation)].any()
    assert {("thinking", "string"), ("thinking", "budget"), ("answer", "string"), ("answer", "budget")} <= ends
    assert sorted(environment.seen) == sorted(seen)


def test_without_room_for_an_answer_it_is_empty(checkpoint):
    environment = Listens(2)
    bench = Bench(checkpoint, {"told": environment})
    long = [replace(prompt, tokens=np.resize(prompt.tokens, MAX_MODEL_LEN - 8)) for prompt in prompts(8)]
    bench.engine._engine._eos = ()
    try:
        rollouts = run(bench, thinking_work(long, 2, thinking=replace(THINKING, tokens=50, end="never")))
    finally:
        bench.engine._engine._eos = (EOS,)
    for rollout in rollouts.values():
        assert [turn.thinking for turn in rollout.turns] == [True] and rollout.finish == "length"
        assert rollout.turns[0].completion.tokens.shape == (8,) and rollout.reward == 1.0
    assert [text for _, text in environment.seen] == [""] * 8


@pytest.mark.parametrize("steps", [3, 7, 8, 9])
def test_a_cut_leaves_an_empty_answer_or_its_beginning(checkpoint, steps):
    environment = Listens()
    bench = Bench(checkpoint, {"told": environment})
    bench.engine._engine._eos = ()
    try:
        later = bench.driver.rollout(thinking_work(prompts(4), thinking=replace(THINKING, end="never")))
        bench.after(steps)
        bench.driver.cut([0])
        bench.work()
    finally:
        bench.engine._engine._eos = (EOS,)
    rollouts = [each[0] for each in by_place(later.unsent).values()]
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout.finish == "length" or rollout.stop == "w3"
        assert rollout.drawn_tokens <= steps and rollout.reward == 1.0 and rollout.answers == 1
        assert [turn.thinking for turn in rollout.turns] == ([True, False] if steps > 7 else [True])
    assert [bool(text) for _, text in environment.seen] == [steps > 7] * 4 or steps > 7
