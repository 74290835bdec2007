"""Compare the endpoints of agents with vLLM's own server: answers and tokens per second, from the same concurrent clients.

    python -m tests.benchmarks.endpoint_throughput [model=letters|FOLDER] [clients=64] [requests=3] [tokens=48] [rounds=2]

In each round the endpoints and the server run one after the other, on the same model in float32; the next round has the other
order. Each client asks `requests` times, greedily; each question begins a conversation, so answers do not differ because
earlier ones do. Behind the endpoints is one engine with an episode, and thus an endpoint and a judge's process, for each
client. Times are those of the clients, after a request of each that is not measured. The default model is
SmolLM2-135M-Instruct. `letters` is a tiny model of random weights, whose speed is that of the servers around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.rollout.vllm_service import served

DEFAULTS = {"model": "smollm2", "clients": "64", "requests": "3", "tokens": "48", "rounds": "2"}
START_S, LENGTH = 300.0, 2048
END = "end"
Targets = list[tuple[str, str]]


@dataclass(frozen=True)
class Model:
    """A model that both serve."""

    folder: Path
    template: Path  # of chats
    length: int  # tokens of a sequence
    text: str  # of a question, with {} for a number


@dataclass(frozen=True)
class Measured:
    """The answers that the clients got, and their time."""

    answers: list[list[str]]  # of each client
    tokens: int
    seconds: float


async def ask(targets: Targets, requests: int, tokens: int, text: str) -> Measured:
    """Ask each target, an address and a key, `requests` times. text: with {} for a number."""
    answers: list[list[str]] = [[] for _ in targets]
    drawn = 0

    async def client(number: int, session: aiohttp.ClientSession, asks: int) -> None:
        nonlocal drawn
        url, key = targets[number]
        for turn in range(asks):
            messages = [{"role": "user", "content": text.format(number * requests + turn)}]
            body = {"model": "policy", "messages": messages, "max_tokens": tokens, "temperature": 0}
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
                reply.raise_for_status()
                said = await reply.json()
            answers[number].append(said["choices"][0]["message"]["content"] or "")
            drawn += said["usage"]["completion_tokens"]

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(client(number, session, 1) for number in range(len(targets))))
        warm, started = drawn, time.monotonic()
        await asyncio.gather(*(client(number, session, requests) for number in range(len(targets))))
        return Measured(answers, drawn - warm, time.monotonic() - started)


# ---- the endpoints -----------------------------------------------------------------------------------------------------------


async def hold(client: Any, task: Any, folder: str) -> float:
    """Lend the episode's endpoint to the benchmark's clients until `folder` has a file END."""
    place = Path(folder, client.api_key)
    place.with_suffix(".new").write_text(str(client.base_url).rstrip("/"))
    place.with_suffix(".new").rename(place.with_suffix(".url"))
    while not Path(folder, END).exists():
        await asyncio.sleep(0.2)
    return 1.0


def serve_episodes(model: str, template: str, length: str, folder: str, clients: str, tokens: str) -> None:
    """Play an episode for each client on one engine, until all end."""
    from tests.rollout.agent_scenarios import AgentBench, policy_of

    policy = policy_of(Path(model), "vllm", int(length), Path(template).read_text())
    policy.generation.vllm_kwargs = {"kv_cache_memory_bytes": 1 << 30}
    policy.generation.max_num_seqs = int(clients)
    function, limits = f"{__name__ if __name__ != '__main__' else __spec__.name}.hold", {"limit_s": 3600.0, "turns": 4096}
    bench = AgentBench(Path(model), "python_agent", policy=policy, function=function, kwargs={"folder": folder}, **limits)
    played = bench.play(range(int(clients)), samples=1, most=int(tokens), temperature=0.0)
    for _, rollout in played:
        assert not rollout.failure and not rollout.broke, rollout
    bench.pool.close()


@contextlib.contextmanager
def episodes(model: Model, folder: Path, clients: int, tokens: int) -> Iterator[Targets]:
    """Start the engine and its episodes, and yield their endpoints."""
    folder.mkdir()
    options = map(str, (model.folder, model.template, model.length, folder, clients, tokens))
    command = [sys.executable, "-c", f"from {__spec__.name} import serve_episodes as s; import sys; s(*sys.argv[1:])", *options]
    with open(folder / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as engine:
        deadline = time.monotonic() + START_S
        try:
            while len(ready := sorted(folder.glob("*.url"))) < clients:
                assert engine.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
                time.sleep(0.5)
            yield [(path.read_text(), path.stem) for path in ready]
            (folder / END).touch()
            assert engine.wait(60) == 0, (folder / "log").read_text()[-3000:]
        finally:
            engine.kill()


# ---- both --------------------------------------------------------------------------------------------------------------------


def measure(name: str, place: Path, model: Model, asked: dict[str, int]) -> Measured:
    """Start the endpoints or the server, and return what the clients get. place: a folder that does not exist yet."""
    clients, sizes = asked["clients"], (asked["requests"], asked["tokens"])
    if name == "endpoints":
        with episodes(model, place, clients, asked["tokens"]) as targets:
            return asyncio.run(ask(targets, *sizes, model.text))
    options = ("--max-num-seqs", str(clients), "--max-model-len", str(model.length), "--disable-log-stats")
    place.mkdir()
    with served(model.folder, model.template, place / "log", *options) as url:
        return asyncio.run(ask([(f"{url}/v1", "x")] * clients, *sizes, model.text))


def main() -> None:
    """Print both speeds of each round, how many answers are equal, and the ratio of all tokens per second."""
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    if unknown := set(given) - set(DEFAULTS):
        sys.exit(f"got {', '.join(sorted(unknown))}; expected {', '.join(DEFAULTS)}")
    options = DEFAULTS | given
    chosen = options.pop("model")
    asked = {name: int(value) for name, value in options.items()}
    with tempfile.TemporaryDirectory(prefix="endpoint-throughput-") as name:
        folder = Path(name)
        model = _model(folder, chosen)
        rates: dict[str, list[float]] = {"endpoints": [], "vllm serve": []}
        for number in range(asked["rounds"]):
            order = list(rates) if number % 2 == 0 else list(rates)[::-1]
            results = {name: measure(name, folder / f"{number}-{name}", model, asked) for name in order}
            for name, result in results.items():
                rates[name].append(result.tokens / result.seconds)
                print(f"round {number + 1}, {name}: {result.tokens} tokens, {rates[name][-1]:.1f} tokens/s", flush=True)
            clients = zip(*(results[name].answers for name in rates), strict=True)
            equal = [ours == theirs for pair in clients for ours, theirs in zip(*pair, strict=True)]
            print(f"round {number + 1}: {sum(equal)} of {len(equal)} answers are equal", flush=True)
        means = {name: len(values) / sum(1 / value for value in values) for name, values in rates.items()}
        print(f"endpoints/vllm serve: {means['endpoints'] / means['vllm serve']:.2f}")


def _model(folder: Path, given: str) -> Model:
    """Return the model that `given` names. folder: for what this writes."""
    from transformers import AutoConfig, AutoTokenizer

    from tests import real_model
    from tests.rollout import agent_scenarios

    template = folder / "template.jinja"
    if given == "letters":
        template.write_text(agent_scenarios.TEMPLATE)
        return Model(agent_scenarios.save(folder / "letters"), template, agent_scenarios.LENGTH, "{}+1")
    given = str(real_model.smollm2()) if given == DEFAULTS["model"] else given
    template.write_text(str(AutoTokenizer.from_pretrained(given).chat_template))
    length = min(LENGTH, AutoConfig.from_pretrained(given).max_position_embeddings)
    return Model(Path(given), template, length, "Write a short story about the number {}.")


if __name__ == "__main__":
    main()
