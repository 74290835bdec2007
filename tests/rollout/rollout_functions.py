"""Rollout functions as users write them, good and bad."""

import asyncio
import time

import numpy as np


async def answer(engine, prompt, seed):
    """Play the built-in rollout of one turn."""
    turn = await engine.generate(prompt)
    await engine.judge(turn)
    return [turn]


async def converse(engine, prompt, seed):
    """Play the built-in rollout of several turns."""
    turns = [await engine.generate(prompt)]
    while (outcome := await engine.judge(turns[-1])).observation and len(turns) < engine.settings.max_turns:
        turns.append(await engine.generate(turns[-1], outcome.observation))
    return turns


async def best_of_branches(engine, prompt, seed):
    """Draw two turns, continue each twice in parallel with time between them, and return the longest conversation."""

    async def branch(first, delay_s):
        await asyncio.sleep(delay_s * (prompt.index % 3))
        turns = await engine.generate(first, "w30", n=2, max_new_tokens=4)
        await asyncio.sleep(delay_s)
        return [await engine.generate(turn, np.array([31, 32])) for turn in turns]

    firsts = await engine.generate(prompt, n=2)
    aside = asyncio.ensure_future(engine.generate("w7 w8", temperature=0.0, max_new_tokens=40))  # nobody waits for it
    found = [turn for turns in await asyncio.gather(*map(branch, firsts, (0.03, 0.0))) for turn in turns]
    best = max(found, key=lambda turn: (len(turn.before), turn.tokens.tolist()))
    best.reward, best.metrics = float(seed % 7), {"draws": float(len(found))}
    assert not aside.cancelled()
    return best.conversation


async def endless(engine, prompt, seed):
    """Continue until no more turns can be drawn."""
    turn = await engine.generate(prompt)
    while True:
        turn.reward, turn.malformed = 1.0, True
        following = await engine.generate(turn, "w20")
        turn.malformed, turn = False, following


async def mistaken(engine, prompt, seed):
    """Make one mistake for each prompt."""
    if prompt.index == 0:
        raise OSError("no board")
    if prompt.index == 1:
        return []
    if prompt.index == 2:
        return "w5"
    if prompt.index == 3:
        return None
    if prompt.index == 4:
        await asyncio.sleep(3600)
    turn = await engine.generate(prompt, temperature=0.5 if prompt.index == 5 else None)
    if prompt.index == 6:
        return [turn]
    turn.reward = float("nan") if prompt.index == 7 else 1.0
    if prompt.index == 8:
        raise KeyError("answer")
    if prompt.index == 9:
        time.sleep(3600)
    if prompt.index == 10:
        return [turn, await engine.generate(prompt)]
    if prompt.index == 11:
        return [await engine.generate(turn, "w20")]
    if prompt.index == 12:
        other = await engine.generate([5, 6, 7])
        other.reward = 1.0
        return [other]
    if prompt.index == 13:
        return [turn, np.array([5, 6])]
    if prompt.index == 14:
        await engine.generate(prompt, max_new_tokens=0)
    if prompt.index == 20:
        await engine.generate([5, 96])
    if prompt.index == 21:
        await engine.generate(prompt, stop=["x", ""])
    if prompt.index == 22:
        await engine.generate(prompt, top_p=0.0)
    if prompt.index == 15:
        await engine.generate(3.5)
    if prompt.index == 16:
        raise SystemExit(0)
    if prompt.index == 17:
        turn.reward = "high"
    if prompt.index == 18:
        branches = await asyncio.gather(engine.generate(turn, "w20"), engine.generate(turn, "w21"))
        return [turn, *branches]
    if prompt.index == 19:
        turn.tokens = np.array([5, 6])  # has no effect: the engine's rank has the tokens
    return [turn]


def not_async(engine, prompt, seed):
    return []


async def two_parameters(engine, prompt):
    return []


async def twice(engine, prompt, seed):
    """Draw two turns, and judge both."""
    first = await engine.generate(prompt)
    await engine.judge(first)
    second = await engine.generate(first, "7", max_new_tokens=6)
    await engine.judge(second)
    return [first, second]


async def stubborn(engine, prompt, seed):
    """Draw in parallel, go on after a cut, and return the longest turn."""

    async def draw(tokens):
        turn = await engine.generate(prompt, max_new_tokens=tokens)
        turn.reward = float(len(turn.tokens))
        return turn

    found = await asyncio.gather(*map(draw, (2, 30, 40)), return_exceptions=True)
    found += await asyncio.gather(draw(5), return_exceptions=True)
    return [max((turn for turn in found if not isinstance(turn, Exception)), key=lambda turn: turn.reward)]
