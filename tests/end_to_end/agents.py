"""The same conversation as an environment in process and as agents through the endpoint, and agents that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request

from pipeline.environments.environment import Environment, Outcome
from pipeline.types import Prompt

TURNS = 3


def digits(text: str) -> float:
    """Return the share of a text's characters that are digits."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def reply(turn: int) -> str:
    return f"{turn + 4}+{turn}"


class Talk(Environment):
    """Answers the policy twice, and rewards each of its turns by its digits."""

    def reset(self, prompt: Prompt) -> list[int]:
        return [0]

    def step(self, episode: list[int], text: str) -> Outcome:
        turn, episode[0] = episode[0], episode[0] + 1
        observation = {"role": "user", "content": reply(turn)} if turn + 1 < TURNS else None
        return Outcome(digits(text), {"accuracy": 0.0}, observation)


async def talk(client, task):
    """Have the conversation of `Talk`."""
    messages, total = list(task["messages"]), 0.0
    for turn in range(TURNS):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        total += digits(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply(turn)}]
    return {"reward": total, "metrics": {"accuracy": 0.0}}


async def say(client, messages, **more) -> str:
    """Let the policy answer messages, and append its answer to them."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **more)
    text = answer.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text


def told(messages, text: str) -> list:
    messages.append({"role": "user", "content": text})
    return messages


async def compacts(client, task):
    """Go on, after two turns, from a summary of them."""
    messages = list(task["messages"])
    for turn in range(2):
        await say(client, messages)
        told(messages, reply(turn))
    short = [{"role": "user", "content": "7,7"}]
    await say(client, short)
    return digits(await say(client, told(short, "8")))


async def edits(client, task):
    """Shorten what the policy was told after its first turn, before its third."""
    messages = list(task["messages"])
    await say(client, messages)
    await say(client, told(messages, "1,2,3,4"))
    messages[-2] = {"role": "user", "content": "1,2"}
    return digits(await say(client, told(messages, "5")))


async def delegates(client, task):
    """Ask two sub-agents at the same time, then go on."""
    messages = list(task["messages"])
    await say(client, messages)

    async def ask_other(name: str) -> str:
        own = [{"role": "user", "content": name}]
        await say(client, own)
        return await say(client, told(own, "2"))

    first, second = await asyncio.gather(ask_other("a"), ask_other("b"))
    return digits(await say(client, told(messages, f"{len(first)},{len(second)}")))


async def retries(client, task):
    """Send the first request twice, and go on from the second answer."""
    await say(client, list(task["messages"]))
    messages = list(task["messages"])
    await say(client, messages)
    return digits(await say(client, told(messages, "3")))


def ask(messages, timeout=60, **more):
    """Return the policy's answer, over plain HTTP."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": "policy", "messages": messages, **more}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def main() -> None:
    """Have the conversation of `Talk` as a program of its own."""
    messages, total = json.load(sys.stdin)["messages"], 0.0
    for turn in range(TURNS):
        text = ask(messages)
        total += digits(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": reply(turn)}]
    print(json.dumps({"reward": total, "metrics": {"accuracy": 0.0}}))


if __name__ == "__main__":
    main()
