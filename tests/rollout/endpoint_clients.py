"""Ask an episode's endpoint and vLLM's own server the same, with OpenAI's and Anthropic's clients, and compare the answers."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import openai

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "Tell the weather in a city.", "parameters": SCHEMA}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def _call(number: int, city: str) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}]},
    ]


CALLS = [*_call(0, "Rome"), *_call(1, "Oslo"), *_call(2, "Lima"), {"role": "user", "content": "What is the weather in Paris?"}]
"""A conversation in which a small model calls the tool too."""


async def compare(client, task, url: str, asks: int = 1):
    """Compare the answers, and return how many were equal."""
    openais = [client, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", timeout=None)]
    key = {"max_retries": 0, "timeout": None}
    base = str(client.base_url).rstrip("/").removesuffix("/v1")
    anthropics = [anthropic.AsyncAnthropic(base_url=place, api_key=client.api_key, **key) for place in (base, url)]
    answers = []
    for chat, messages in zip(openais, anthropics, strict=True):
        started, found = time.monotonic(), {}
        for _ in range(asks):
            found = await _answers(chat, messages)
        answers.append(found)
        print(f"{chat.base_url}: {time.monotonic() - started:.1f} s")
    ours, theirs = answers
    differ = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
    assert not differ, differ
    assert ours["tools"][1] == [("weather", {"city": "Paris"})] == ours["streamed tools"][1], ours["tools"]
    return float(len(ours))


async def _answers(chat: openai.AsyncOpenAI, messages: anthropic.AsyncAnthropic) -> dict[str, Any]:
    """Return the answer to each kind of request."""
    common: Any = {"model": "policy", "max_tokens": 32, "temperature": 0}
    tools: Any = {"tools": [{"type": "function", "function": TOOL}], "messages": CALLS}
    found: dict[str, Any] = {}
    found["chat"] = (await chat.chat.completions.create(messages=QUESTION, **common)).choices[0].message.content
    found["stop"] = (await chat.chat.completions.create(messages=QUESTION, stop=["Paris"], **common)).choices[0].message.content
    found["streamed"] = await _streamed(await chat.chat.completions.create(messages=QUESTION, stream=True, **common))
    logprobs = (await chat.chat.completions.create(messages=QUESTION, logprobs=True, **common)).choices[0].logprobs
    found["tokens of logprobs"] = [entry.token for entry in logprobs.content]
    said = (await chat.chat.completions.create(**tools, **common)).choices[0].message
    found["tools"] = said.content or "", [_read(call.function) for call in said.tool_calls or ()]
    found["streamed tools"] = await _streamed(await chat.chat.completions.create(**tools, stream=True, **common))
    text = {"model": "policy", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    found["completion"] = (await chat.completions.create(**text)).choices[0].text
    reply = await chat.responses.create(model="policy", input="What is 2+3?", max_output_tokens=32, temperature=0)
    found["response"] = reply.output_text
    async with chat.responses.stream(model="policy", input="What is 2+3?", max_output_tokens=32, temperature=0) as stream:
        found["streamed response"] = (await stream.get_final_response()).output_text
    greedy: Any = {"model": "policy", "max_tokens": 32, "messages": QUESTION, "extra_body": {"temperature": 0}}
    told = await messages.messages.create(**greedy)
    found["message"] = [block.text for block in told.content], told.stop_reason
    async with messages.messages.stream(**greedy) as stream:
        found["streamed message"] = await stream.get_final_text()
    return found


async def _streamed(stream) -> tuple[str, list[Any]]:
    text, calls = "", {}
    async for chunk in stream:
        delta = chunk.choices[0].delta if chunk.choices else None
        text += (delta and delta.content) or ""
        for call in (delta and delta.tool_calls) or ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def _read(function) -> tuple[str, Any]:
    return function.name, json.loads(function.arguments)
