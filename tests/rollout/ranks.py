"""Run one of three ranks: rank 0, and the two of an engine.

The engine's ranks have a whole model each, and an engine that is stepped differently on its ranks would draw differently.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from pathlib import Path

from safetensors.torch import load_file

from pipeline.config import TimeoutsConfig, TokenizerConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.generate.transformers import TransformersBackend
from pipeline.job.watchdog import Watchdog
from pipeline.job.world import RankInfo, WorkerGroups, World, join, leave, open_store, wait_for_all
from pipeline.refit.protocol import Commit, RefitReport
from pipeline.roles.generate import GenerateRole
from pipeline.rollout.driver import EpisodeDriver
from pipeline.rpc import RpcClient, RpcGroup, serve, stop, verb
from tests.generate.tiny import MAX_MODEL_LEN, policy
from tests.rollout.engine import FixedTurns, Noted, ThreadJudges, by_place, prompts, work

WORKERS = WorkerGroups(train=(0,), generate=(1, 2), engines=((1, 2),))
TIMEOUTS = TimeoutsConfig(join=100, silence=20, rollout=3)


class FromDisk:
    """Refit."""

    def __init__(self, folder: Path):
        self.folder = folder

    def receive(self, update) -> RefitReport:
        update.load(load_file(self.folder / "model.safetensors").items())
        return RefitReport()


class Gated(FixedTurns):
    """Gives the first answer to the first prompt once a file exists."""

    def __init__(self, gate: Path):
        super().__init__(turns=2)
        self.gate = gate

    def reset(self, prompt):
        return {"turn": 0, "gated": prompt.index == 0}

    def step(self, episode, text):
        while episode["gated"] and not self.gate.exists():
            time.sleep(0.01)
        return super().step(episode, text)


class Role(GenerateRole):
    def __init__(self, world: World, folder: Path, scenario: str):
        self._world, self._folder, self._scenario = world, folder, scenario
        super().__init__(None, 42, world, FromDisk(folder))

    @verb("setup")
    def setup(self) -> None:
        self._built = Noted(TransformersBackend(policy(self._folder, "transformers")))
        if self._leads:
            config = TokenizerConfig(name=str(self._folder))
            tokenizer = load_tokenizer(config)
            told = {"told": Gated(self._world.info.folder / "gate")}
            self._environments = ThreadJudges(told, tokenizer, Observations(tokenizer, config, chat=False), self.wakeup)
            parts = self._backend, self._environments, self._lockstep, self._world, self.wakeup
            self._driver = EpisodeDriver(*parts, 3, MAX_MODEL_LEN)
            self._backend.before_step = self._before_step

    def _before_step(self, steps: int) -> None:
        if self._scenario == "check":
            time.sleep(0.05)  # parts of an answer come before its end
            hold = self._world.info.folder / "hold"
            while hold.exists():
                hold.with_name("held").touch()
                time.sleep(0.01)
        elif steps == 3:
            if self._scenario == "hang":
                threading.Event().wait(600)
            raise ValueError("the engine is on fire")

    @verb("setup")
    def calls(self) -> list[str]:
        return [str(call) for call in self._backend.calls]


def check(generate: RpcGroup[Role], gate: Path) -> None:
    generate.call(Role.receive).result()
    generate.call(Role.commit, Commit(1)).result()
    future = generate.call(Role.rollout, work(0, prompts(3), samples=2, max_turns=2))
    came = []
    while len(came) < 2:
        generate.receive_replies(block=True)
        came += future.take()
    assert [rank for rank, _ in came] == [1, 1] and not future.done  # the leader's
    assert sorted(finished.group_index for _, part in came for finished in part) == [1, 2]
    stands, of_peer = generate.call(Role.snapshot).result()
    assert of_peer == [] and [(stand.number, stand.group_index) for stand in stands] == [(0, 0)]
    assert {sample: len(spans) for sample, spans in stands[0].open.items()} == {0: 1, 1: 1}

    generate.call(Role.receive).result()  # in flight: between the two turns of group 0
    generate.call(Role.commit, Commit(2, recompute_kv_cache=True)).result()
    gate.touch()
    ours, peers = future.result()
    assert peers == [] and future.done
    for place, rollouts in by_place(ours).items():
        for rollout in rollouts:
            assert not rollout.failure and len(rollout.turns) == 2
            assert [span.version for span in rollout.spans] == ([1, 2] if place == 0 else [1, 1])

    told = by_place(ours)
    rest = generate.call(Role.rollout, work(2, prompts(1), samples=2, max_turns=2, finished={0: {1: told[0][1]}}))
    first, second = by_place(rest.result()[0])[0]
    assert second.tokens.tolist() == told[0][1].tokens.tolist() and second.spans == told[0][1].spans
    assert {span.version for span in first.spans} == {2}

    drained = generate.call(Role.drain)
    waits = generate.call(Role.rollout, work(1, prompts(2, first=1), samples=2, max_turns=2, max_new_tokens=40))
    assert drained.result() == [[], []]
    assert not waits.done and all(not stand.open[0] for stand in generate.call(Role.snapshot).result()[0])
    generate.call(Role.receive).result()
    hold = gate.with_name("hold")
    hold.touch()  # the answers begin before the cut is sent, and do not end before it
    generate.call(Role.commit, Commit(3)).result()
    end = time.monotonic() + TIMEOUTS.join
    while not hold.with_name("held").exists():
        assert time.monotonic() < end, "no answer has begun"
        time.sleep(0.01)
    cut = generate.call(Role.cut, [1])
    hold.unlink()
    cut.result()
    ours, _ = waits.result()
    assert len(ours) == 2

    calls = generate.call(Role.calls).result()
    assert calls[0] == calls[1] and len(calls[0]) > 20
    assert any(call.startswith("('cut'") for call in calls[0])
    print("checked", flush=True)


def main(run_dir: Path, scenario: str, model: Path) -> None:
    info = RankInfo.from_environment(run_dir)
    store = open_store(info, TIMEOUTS.join)
    world = World(info, WORKERS, store)
    client = RpcClient(world) if world.rank == 0 else None
    watchdog = Watchdog(world, TIMEOUTS, *([client.overdue] if client else []))
    try:
        watchdog.start()
        wait_for_all(world, TIMEOUTS.join)
        join(world)
        if client:
            generate = RpcGroup(client, world, WORKERS.generate, Role, TIMEOUTS)
            generate.call(Role.setup).result()
            check(generate, info.folder / "gate")
            stop(world)
        else:
            serve(world, Role(world, model, scenario))
    except Exception as error:
        watchdog.fail(error)
        traceback.print_exc()
        os._exit(1)
    watchdog.stop()
    leave(world, TIMEOUTS.silence)
    os._exit(0)
