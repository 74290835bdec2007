"""Scenarios of an engine's rank whose environments have agents. Each scenario is a program."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline import generate
from pipeline.algorithms.advantages import make_sample
from pipeline.config import RECIPES, EnvironmentConfig, PolicyConfig
from pipeline.data.batches import split_batch
from pipeline.data.chat import load_tokenizer
from pipeline.data.rendering import ChatTemplate
from pipeline.environments.episode_folder import PREFIX
from pipeline.rollout.driver import EpisodeDriver
from pipeline.rollout.judges.environment_steps import EnvironmentSettings
from pipeline.rollout.judges.parent_process import fork_early
from pipeline.rollout.judges.pool import JudgePool
from pipeline.rollout.lockstep import Lockstep
from pipeline.rollout.rollout_messages import RolloutWork
from pipeline.sandbox import processes
from pipeline.types import NOTHING_SAID, DataParallelRank, Prompt, Rollout, Sample, Sampling
from tests.end_to_end import agents
from tests.end_to_end.test_agents import TEMPLATE
from tests.generate import tiny
from tests.rollout import agent_programs
from tests.rollout.engine import NoWorld, by_place
from tests.sandbox import images

LENGTH = 120
AGENT = ("-m", agent_programs.__name__)


class Recorded:
    """A backend that keeps the tokens before each draw, and what was drawn."""

    def __init__(self, engine: Any):
        self._engine = engine
        self.before: dict[str, tuple[int, ...]] = {}
        self.steps = 0
        self.draws: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.most = 0

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def add(self, requests):
        self.before |= {request.id: tuple(request.tokens.tolist()) for request in requests}
        self._engine.add(requests)

    def step(self):
        self.most, self.steps = max(self.most, self._engine.pending), self.steps + 1
        completions = self._engine.step()
        self.draws += [(self.before[done.id], tuple(done.tokens.tolist())) for done in completions]
        return completions


class AgentBench:
    """One engine of a tiny model with letters as tokens, and its driver."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        limit_s: float = 60.0,
        turns: int = 8,
        at_once: int = 64,
        policy: PolicyConfig | None = None,
        workers: int | None = None,
        **kwargs: Any,
    ) -> None:
        fork_early()
        self.policy = policy or policy_of(folder)
        self.engine = Recorded(generate.build(self.policy, 1, 0, 0))
        tiny.load(self.engine, AutoModelForCausalLM.from_pretrained(folder).state_dict().items(), version=7)
        environment = EnvironmentConfig(kind=kind, kwargs=kwargs, timeout_s=limit_s, precision="float32", workers=workers)
        settings = EnvironmentSettings({"told": environment}, self.policy.tokenizer, True, turns, sys.path, policy=self.policy)
        self.wakeup, self.turns = threading.Event(), turns
        self.pool = JudgePool(settings, self.wakeup)
        self.pool.wait_until_loaded(300)
        parts = (
            self.engine,
            self.pool,
            Lockstep(None),
            NoWorld(),
            self.wakeup,
            at_once,
            self.policy.generation.vllm_cfg.max_model_len,
        )
        self.driver = EpisodeDriver(*parts, agents={"told"})
        template = ChatTemplate(load_tokenizer(self.policy.tokenizer), None)
        self._encode = lambda text: template.apply(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )

    def play(
        self, numbers: Sequence[int] = (0, 1), samples: int = 2, most: int = 8, temperature: float = 1.0
    ) -> list[tuple[Prompt, Rollout]]:
        """Return the prompts and rollouts of a work."""
        later, prompts = self.begin(numbers, samples, most, temperature)
        self.driver.work(lambda: False)
        assert later.ended and not self.engine.pending and not self.driver._active
        return [(prompts[i], rollout) for i, group in sorted(by_place(later.unsent).items()) for rollout in group]

    def begin(self, numbers: Sequence[int], samples: int, most: int = 8, temperature: float = 1.0) -> tuple[Any, list[Prompt]]:
        """Begin a work, and return its reply and its prompts."""
        texts = [f"{number}+{number + 1}" for number in numbers]
        prompts = [
            Prompt(
                i,
                np.array(self._encode(text), np.int32),
                "told",
                {"messages": [{"role": "user", "content": text}], "record": {"place": "root"}},
            )
            for i, text in enumerate(texts)
        ]
        sampling = Sampling(temperature=temperature, max_new_tokens=most)
        work = RolloutWork(0, prompts, samples, "train", 42, sampling, max_turns=self.turns)
        return self.driver.rollout(work), prompts


def policy_of(folder: Path, backend: str = "transformers", length: int = LENGTH, template: str = TEMPLATE) -> PolicyConfig:
    policy = tiny.policy(folder, backend, max_model_len=length)
    policy.tokenizer.chat_template = template
    generation = policy.generation
    generation.val_temperature, generation.val_top_p, generation.val_top_k = 1.0, 1.0, None
    policy.logprob_batch_size = 1
    return policy


def save(folder: Path) -> Path:
    """Write the tiny model with random weights, and its tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(RECIPES / "tiny")
    config.initializer_range = 0.15
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in (RECIPES / "tiny").glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def forks(folder: Path) -> None:
    """Every sampled token is learned once, after the tokens that came before it, whatever the agent does to its history."""
    expected = {"compacts": (2, 0), "edits": (2, 1 / 3), "delegates": (3, 0), "retries": (2, 0)}
    for function, (conversations, unmatched) in expected.items():
        bench = AgentBench(folder, "python_agent", function=f"{agents.__name__}.{function}")
        played = bench.play()
        samples = [make_sample(prompt, rollout, 0.5 + i, 1.0) for i, (prompt, rollout) in enumerate(played)]
        drawn = Counter(draw for prompt, rollout in played for draw in draws_of(prompt, rollout))
        assert drawn == Counter(bench.engine.draws) and max(drawn.values()) == 1, function
        for (_, rollout), sample in zip(played, samples, strict=True):
            assert not rollout.failure and not rollout.broke, rollout
            assert rollout.metrics["conversations"] == conversations, function
            assert rollout.metrics["unmatched_answers"] == unmatched, function
            assert sum(int(part.loss_mask.sum()) for part in (sample, *sample.branches)) == rollout.drawn_tokens
        check_gradients(folder, bench.policy, played, samples)
        bench.pool.close()


def draws_of(prompt: Prompt, rollout: Rollout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (tokens before, tokens drawn) of each turn of a rollout."""
    draws = []
    for conversation in rollout.conversations(prompt):
        before = conversation.context.tolist()
        for turn in conversation.turns:
            drawn = turn.completion.tokens.tolist()
            draws.append((tuple(before), tuple(drawn)))
            before += drawn + turn.observation.tolist()
    return draws


def check_gradients(folder: Path, policy: PolicyConfig, played: list, samples: list[Sample]) -> None:
    """The gradient of the samples in a step's updates is that of each draw on its own."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")

    def gradient(parts) -> torch.Tensor:
        """parts: (tokens, weight of each token's log-prob)."""
        model.zero_grad()
        for tokens, weights in parts:
            logprobs = model(torch.tensor(tokens)[None].long()).logits[0, :-1].log_softmax(-1)
            (logprobs.gather(1, torch.tensor(tokens)[1:, None].long())[:, 0] * torch.tensor(weights)[1:]).sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    policy.sequence_packing.enabled, policy.train_micro_batch_size, policy.logprob_batch_size = False, 2, 2
    ((update,),) = split_batch(samples, policy, [DataParallelRank(0, 1)], len(samples))
    trained = [i for microbatch in update.train for i in microbatch]
    assert sorted(trained) == list(range(len(update.samples))) and not any(sample.branches for sample in update.samples)
    assert update.counts.tokens == sum(rollout.drawn_tokens for _, rollout in played)
    ours = gradient((sample.tokens, sample.advantages.astype(np.float64)) for sample in update.samples)
    alone = [
        ([*before, *drawn], [0.0] * len(before) + [0.5 + i] * len(drawn))
        for i, (prompt, rollout) in enumerate(played)
        for before, drawn in draws_of(prompt, rollout)
    ]
    theirs = gradient(alone)  # its norms are computed in float32, whatever the model's precision
    print("gradients differ by", (worst := ((ours - theirs).abs().max() / theirs.abs().max()).item()))
    assert worst < 1e-5


PARTS = TEMPLATE.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}",
)


def bounded(folder: Path) -> None:
    """Agents wait for a judge of their own, also with a template that takes contents as parts."""
    policy = policy_of(folder, template=PARTS)
    bench = AgentBench(folder, "python_agent", policy=policy, workers=2, function=f"{agents.__name__}.compacts")
    played = bench.play(samples=8)
    assert len(played) == 16 and bench.engine.most <= 2
    for _, rollout in played:
        assert not rollout.failure and not rollout.broke and rollout.metrics["unmatched_answers"] == 0, rollout
    bench.pool.close()


def cuts(folder: Path) -> None:
    """An agent that is cut has said nothing, or keeps what it said, without a failure of its own."""
    for steps in (0, 2, 12):
        bench = AgentBench(folder, "agent", command=[sys.executable, *AGENT], variables={"ALL_SLEEP": "/nowhere"})
        later, _ = bench.begin([agent_programs.BEHAVIOURS.index("sleeps")], samples=3)
        bench.driver.work(lambda bench=bench, steps=steps: bench.engine.steps >= steps and bool(bench.driver._in_environment))
        bench.driver.cut([0])
        bench.driver.work(lambda: False)
        assert later.ended and not bench.engine.pending and not bench.driver._active
        rollouts = [rollout for group in by_place(later.unsent).values() for rollout in group]
        assert len(rollouts) == 3
        for rollout in rollouts:
            assert not rollout.broke, rollout
            assert rollout.failure == NOTHING_SAID if not rollout.turns else rollout.finish == "length", rollout
        bench.pool.close()


EXPECTED = {
    "hangs": "the agent took more than 6 s",
    "endless": "the command took more than 12 s|exited with status 1: .*410",
    "crashes": "^the command exited with status -6: it printed no error$",
    "floods": "^the command printed more than 1048576 bytes .output_bytes.$",
    "silent": "^the last line of the command: got",
    "raises": "^the command exited with status 1: KeyError: 'nothere'$",
}
"""Behaviour -> how it breaks its episode. The others break none."""


def misbehave(folder: Path) -> None:
    """An agent that hangs, crashes, floods, never ends, attacks other endpoints or leaves processes costs its own episode."""
    command = [sys.executable, *AGENT]
    endless, others = ("hangs", "endless"), ("good", "crashes", "floods", "guesses", "leaves", "silent", "raises", "early")
    cases: Any = (endless, {"limit_s": 6.0, "episode_s": 12.0}), (others, {"limit_s": 200.0})
    for behaviours, limits in cases:
        bench = AgentBench(folder, "agent", command=command, **limits)
        played = bench.play(numbers=[agent_programs.BEHAVIOURS.index(name) for name in behaviours], samples=2)
        assert len(played) == 2 * len(behaviours)
        for prompt, rollout in played:
            name = behaviours[prompt.index]
            assert rollout.notes.get("stderr", "").endswith("KeyError: 'nothere'\n") == (name in ("raises", "early"))
            if name == "early":
                assert rollout.failure == "the command exited with status 1: KeyError: 'nothere' (before its first request)"
                continue
            assert not rollout.failure and rollout.drawn_tokens, (name, rollout)
            if name in EXPECTED:
                assert re.search(EXPECTED[name], rollout.broke) and rollout.reward == 0, (name, rollout.broke)
            else:
                assert rollout.reward == 1 and not rollout.broke, (name, rollout.broke)
        bench.pool.close()
    running = os.popen("ps -eo args").read().splitlines()
    assert not [line for line in running if line == "sleep 98765" or AGENT[1] in line]


def contained(folder: Path) -> None:
    """Agents in containers of one image reach their own endpoint alone, and see nothing of each other and of this machine."""
    image, files = images.make_root(folder / "root"), folder / "files"
    files.mkdir()
    (files / "agent.py").write_text(CONTAINED)
    command = ["python3", "/agent.py"]
    left = tempfile.mkdtemp(prefix=PREFIX)  # of a run that was killed
    bench = AgentBench(
        folder, "agent", command=command, files=str(files), sandbox={"image": f"{folder}/{{place}}"}, limit_s=200.0
    )
    with socket.create_server(("127.0.0.1", 0)) as service:
        (files / "port").write_text(str(service.getsockname()[1]))
        played = bench.play(samples=3)
    assert len(played) == 6 and all(rollout.reward == 1 and not rollout.broke for _, rollout in played), played
    assert all(len(rollout.turns) == 2 for _, rollout in played)
    assert not (image / "mine").exists() and not os.path.exists(left)
    bench.pool.close()


CONTAINED = """
import json, os, socket, sys, urllib.request

def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"messages": messages}).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or ""

messages = json.load(sys.stdin)["messages"]
messages += [{"role": "assistant", "content": ask(messages)}, {"role": "user", "content": "1"}]
assert not os.path.exists("/mine"), "another episode's file"
open("/mine", "w").write("x")
for place in (("127.0.0.1", int(open("/port").read())), ("8.8.8.8", 53)):
    try:
        socket.create_connection(place, 2)
    except OSError:
        continue
    sys.exit(f"it reached {place}")
ask(messages)
print(1.0)
"""


def published(folder: Path, python: str) -> None:
    """An agent of the package mini-swe-agent plays whole episodes of several turns, as it is."""
    command = [python, str(Path(__file__).with_name("mini_swe_agent.py"))]
    variables = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_COST_TRACKING": "ignore_errors", "PYTHONPATH": ""}
    bench = AgentBench(folder, "agent", command=command, variables=variables, limit_s=200.0)
    for _, rollout in bench.play():
        assert rollout.reward == 1 and not rollout.broke and not rollout.failure, rollout
        assert rollout.metrics["calls"] == len(rollout.turns) == 3, rollout
        assert rollout.metrics["unmatched_answers"] == 0 and rollout.metrics["conversations"] == 1, rollout
    bench.pool.close()


def beside_vllm(folder: Path, template: Path, url: str) -> None:
    """Answers of an endpoint are those of vLLM's server at `url`. See endpoint_clients.py."""
    policy = policy_of(folder, "vllm", 2048, template.read_text())
    policy.generation.vllm_kwargs = {"kv_cache_memory_bytes": 1 << 28}
    function = "tests.rollout.endpoint_clients.compare"
    bench = AgentBench(folder, "python_agent", policy=policy, limit_s=500.0, function=function, kwargs={"url": url})
    ((_, rollout),) = bench.play(numbers=[1], samples=1, most=32, temperature=0.0)
    assert (rollout.reward, rollout.broke, rollout.failure) == (11.0, "", "")
    bench.pool.close()


def many(folder: Path) -> None:
    """256 agents sleep at the same time; none is lost, and their memory is bounded."""
    bench = AgentBench(
        folder,
        "agent",
        command=[sys.executable, *AGENT],
        at_once=256,
        limit_s=300.0,
        episode_s=600.0,
        variables={"ALL_SLEEP": str(folder / "all")},
    )
    most = {"agents": 0, "memory": 0.0, "of_judges": 0.0}

    def watch() -> None:
        while not done.is_set():
            pids = [os.getpid(), *processes.descendants(os.getpid())]
            names = {pid: _read(f"/proc/{pid}/comm").strip() for pid in pids}
            memory = {pid: _proportional_kib(pid) for pid in pids}
            agents = [pid for pid, name in names.items() if name.startswith("python")]
            most["agents"] = max(most["agents"], len(agents) - 1)
            most["memory"] = max(most["memory"], sum(memory.values()) / 1024)
            if len(agents) > 256:  # and this process
                (folder / "all").touch()
            most["of_judges"] = max(most["of_judges"], sum(memory[pid] for pid in pids if "judge" in names[pid]) / 1024)
            time.sleep(1)

    done, started = threading.Event(), time.monotonic()
    watcher = threading.Thread(target=watch)
    watcher.start()
    played = bench.play([agent_programs.BEHAVIOURS.index("sleeps")], samples=256)
    done.set()
    watcher.join()
    print(f"256 agents in {time.monotonic() - started:.0f} s; at once {most['agents']}; MiB {most}")
    assert len(played) == 256 and all(rollout.reward == 1 and not rollout.failure for _, rollout in played)
    assert most["agents"] >= 256 and most["of_judges"] < 256 * 24
    bench.pool.close()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _proportional_kib(pid: int) -> int:
    line = next((line for line in _read(f"/proc/{pid}/smaps_rollup").splitlines() if line.startswith("Pss:")), "Pss: 0")
    return int(line.split()[1])


def without_gpus(folder: Path) -> None:
    """A build of vLLM for GPUs has no platform on an environment rank, whose node has none; its handlers work all the same."""
    import vllm.platforms
    from vllm.platforms.interface import UnspecifiedPlatform

    from pipeline.rollout.agents.policy_serving import PolicyServing

    vllm.platforms._current_platform = UnspecifiedPlatform()
    assert vllm.platforms.current_platform.device_type == ""
    assert PolicyServing(policy_of(folder), None, None).models.base_model_paths


SCENARIOS = (forks, bounded, misbehave, contained)
LONG = (cuts, many, without_gpus)
