"""Scenarios of an engine's rank with a user's rollout function in judges. Each scenario is a program."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.rollout.judges.parent_process import fork_early
from pipeline.rollout.judges.pool import JudgePool
from pipeline.types import NOTHING_SAID, Rollout
from tests.generate.tiny import MAX_MODEL_LEN, VOCAB, Checkpoint, load
from tests.rollout import rollout_functions
from tests.rollout.engine import Bench, FixedTurns, by_place, prompts, work
from tests.rollout.judge_scenarios import bits, settings

ANY = tuple(range(VOCAB))


def bench_of(folder: Path, function: str, limit_s: float = 60.0, turns: int = 3, **options) -> Bench:
    fork_early()
    path = f"{rollout_functions.__name__}.{function}"
    chosen = replace(settings(folder, "tests.rollout.engine.FixedTurns", limit_s=limit_s, turns=turns), function=path)
    return Bench(Checkpoint(folder, None), functools.partial(JudgePool, chosen), function=path, **options)


def played(bench: Bench, count: int = 6, **options) -> list[Rollout]:
    later = bench.driver.rollout(work(0, prompts(count), **options))
    bench.work()
    assert later.ended and not bench.engine.pending and not bench.driver._active
    return [rollout for _, rollouts in sorted(by_place(later.unsent).items()) for rollout in rollouts]


def same(folder: Path) -> None:
    """The built-in rollout written as a function draws the same tokens with the same log-probs, to the bit."""
    cases = ("answer", 1, 1, 32), ("answer", 1, 1, 3), ("converse", 3, 5, 1), ("converse", 100, 3, 1)
    for function, turns, most, at_once in cases:
        built_in = played(Bench(Checkpoint(folder, None), {"told": FixedTurns(turns)}, at_once), max_turns=most)
        bench = bench_of(folder, function, turns=turns, max_num_seqs=at_once)
        found = played(bench, max_turns=most)
        assert len(found) == 12 and [bits(rollout) for rollout in found] == [bits(rollout) for rollout in built_in]
        assert all(rollout.spans == other.spans for rollout, other in zip(found, built_in, strict=True))
        assert not any(rollout.failure or rollout.broke for rollout in found)


def branches(folder: Path) -> None:
    """Parallel draws depend on neither time nor batches; the loss counts the tokens of the returned conversation alone."""
    found = []
    for most in (32, 1):
        bench = bench_of(folder, "best_of_branches", max_num_seqs=most)
        found.append(played(bench, max_turns=3))
    for rollout, other in zip(*found, strict=True):
        np.testing.assert_array_equal(rollout.tokens, other.tokens)
        np.testing.assert_allclose(rollout.logprobs, other.logprobs, atol=1e-5)
    tokens = {tuple(turn.completion.tokens) for rollout in found[0] for turn in rollout.turns}
    assert len(tokens) > 30
    for rollout in found[0]:
        assert len(rollout.turns) == 3 and rollout.metrics == {"draws": 4.0} and not rollout.failure and not rollout.broke
        told = rollout.tokens[~rollout.drawn].tolist()
        assert told == [30, 31, 32] and len(rollout.turns[1].completion.tokens) <= 4


def limits(folder: Path) -> None:
    """An episode ends with its rewards when it has too many turns or no room."""
    for most, options in ((4, {}), (100, {"stop": ANY})):
        for rollout in played(bench_of(folder, "endless"), 3, max_turns=most, **options):
            assert rollout.reward == len(rollout.turns) and rollout.finish == "length" and not rollout.failure
            assert all((turn.reward, turn.malformed) == (1.0, turn is rollout.turns[-1]) for turn in rollout.turns)
            assert most != 4 or len(rollout.turns) == 4
            assert len(rollout.tokens) <= MAX_MODEL_LEN


def refits(folder: Path) -> None:
    """Weights change between and within turns; a drain waits for functions; a snapshot has what was drawn; a cut ends all."""
    checkpoint = Checkpoint(folder, None)
    bench = bench_of(folder, "endless", max_num_seqs=4)
    later = bench.driver.rollout(work(0, prompts(3), max_turns=3))
    bench.work(lambda: max(drawn(bench)) > 8)
    load(bench.engine, checkpoint.weights().items(), version=8)
    drain = bench.driver.drain()
    bench.work(lambda: drain.ended)
    assert drain.ended and not bench.engine.pending and not later.ended
    bench.driver.resume()
    bench.work()
    rollouts = [rollout for group in by_place(later.unsent).values() for rollout in group]
    assert len(rollouts) == 6 and any(len({span.version for span in rollout.spans}) == 2 for rollout in rollouts)
    assert all(sum(span.tokens for span in rollout.spans) == rollout.drawn_tokens for rollout in rollouts)

    later = bench.driver.rollout(work(1, prompts(3), max_turns=3, finished={0: {1: rollouts[1]}}))
    bench.work(lambda: max(drawn(bench)) > 8)
    bench.driver.cut([1])
    bench.work()
    groups = by_place(later.unsent)
    assert later.ended and not bench.engine.pending and groups[0][1] is rollouts[1]
    for rollout in (rollout for group in groups.values() for rollout in group):
        assert rollout.failure == NOTHING_SAID if not rollout.turns else rollout.reward and rollout.finish == "length"


def cuts(folder: Path) -> None:
    """A cut ends the draws of a function at any step; the function may go on, but draws no more."""
    for steps in (0, 1, 3, 9, 25):
        bench = bench_of(folder, "stubborn", max_num_seqs=4)
        later = bench.driver.rollout(work(0, prompts(3)))
        bench.after(steps)
        bench.driver.cut([0])
        bench.work()
        assert later.ended and not bench.engine.pending and not bench.driver._active
        for rollout in (rollout for group in by_place(later.unsent).values() for rollout in group):
            assert rollout.failure == NOTHING_SAID or 0 < rollout.reward == len(rollout.tokens) <= 40, rollout


def drawn(bench: Bench) -> list[int]:
    """Return the number of tokens drawn so far in each open episode, by a snapshot."""
    groups = bench.driver.snapshot()
    return [sum(span.tokens for span in spans) for group in groups for spans in group.open.values()]


EXPECTED = {  # prompt -> (whether the episode is dropped, the cause)
    0: (True, r"the function before its first turn raised OSError: no board at .*rollout_functions.py:\d+"),
    1: (True, "it returned no turns; expected at least one"),
    2: (True, "it returned a str; expected a list of turns that engine.generate returned"),
    3: (True, "it returned None; expected a list of turns that engine.generate returned"),
    4: (True, r"the function before its first turn took more than 2 s \(env.told.timeout_s\)"),
    5: (False, "turn 0 was drawn with temperature 0.5, .* recipe: 1, 1 and 0. .*"),
    6: (False, "it returned no reward. Try `await engine.judge.turn.` or turn.reward=NUMBER"),
    7: (False, "turn 0 has the reward nan; expected a number from -1e.15 to 1e.15"),
    8: (False, r"the function raised KeyError: 'answer' at .*rollout_functions.py:\d+"),
    9: (False, r"the function took more than 2 s \(env.told.timeout_s\)"),
    10: (False, "turn 1 begins a conversation of its own; expected one conversation. Return the best one"),
    11: (False, "turn 0 continues a turn that it did not return; expected all turns of the conversation, in order"),
    12: (False, "its first turn was not drawn after the prompt. Try engine.generate.prompt."),
    13: (False, "it returned a list with a ndarray in it; expected a list of turns that engine.generate returned"),
    14: (False, ".* ValueError: max_new_tokens: got 0; expected 1 to 1.07374e.09 at .*"),
    15: (False, ".* TypeError: got a float; expected the prompt, a drawn turn, messages, a text or tokens at .*"),
    16: (False, "the function raised RuntimeError: SystemExit at .*"),
    17: (False, "turn 0 has the reward 'high'; expected a number from .*"),
    20: (False, ".* ValueError: got the token 96; expected 0 to 95, of the tokenizer at .*"),
    21: (False, ".* ValueError: stop: got .'x', ''.; expected texts that are not empty at .*"),
    22: (False, ".* ValueError: top_p: got 0.0; expected 1e-06 to 1 at .*"),
    18: (False, "turns 1 and 2 both continue turn 0; expected one conversation. Return the best one"),
}


def mistakes(folder: Path) -> None:
    """Each mistake of a function costs its own episode, and its cause names the function."""
    bench = bench_of(folder, "mistaken", limit_s=2.0, broken_rewards={"told": -1.0})
    found = played(bench, 23, samples=1, max_turns=3)
    for index, rollout in enumerate(found):
        dropped, cause = EXPECTED.get(index, (False, ""))
        said = rollout.failure if dropped else rollout.broke
        prefix = r"tests\.rollout\.rollout_functions\.mistaken: "
        assert re.fullmatch(f"{prefix}{cause}" if cause else "", said), (index, rollout)
        assert not (rollout.broke if dropped else rollout.failure), (index, rollout)
        assert rollout.reward == (0.0 if dropped else -1.0 if cause else 1.0)
        assert (rollout.drawn_tokens > 0) != dropped or index in (5, 12)
    forged = played(Bench(Checkpoint(folder, None), {"told": FixedTurns(1)}), 23, samples=1)[19]
    np.testing.assert_array_equal(found[19].tokens, forged.tokens)
