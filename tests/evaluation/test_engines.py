"""Rank 0 asks two engines, one of which it leads itself: ranks are threads, over the real store."""

import os
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from pipeline import config
from pipeline.coordination.dispatch import RolloutSpec
from pipeline.evaluation.engines import AHEAD, Engines
from pipeline.job.world import RankInfo, WorkerGroups, World
from pipeline.roles import GenerateRole
from pipeline.rollout.rollout_messages import FinishedGroup, RolloutWork
from pipeline.rpc import RpcClient, RpcError, RpcGroup, StreamingReply, serve, stop, verb
from pipeline.store.child_process import start
from pipeline.store.client import RunStore
from pipeline.types import Likelihood, LikelihoodRequest, Prompt, Rollout, RolloutGroup, Sampling
from tests.evaluation.evaluations import RECIPE

MAX_NUM_SEQS, SAMPLES = 2, 2
SPEC = RolloutSpec("task", SAMPLES, Sampling())


@dataclass
class Timeouts:
    rollout: float = 60.0


class Engine(GenerateRole):
    """Answers one group of a work after another; the reward is the prompt's index, times ten, plus the sample."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.wakeup = threading.Event()
        self.step_s = step_s
        self.open: list[tuple[RolloutWork, int, StreamingReply]] = []
        self.most = 0  # groups at the same time
        self.drawn: list[tuple[int, int]] = []
        self.units: list[str] = []
        self.released = 0

    @verb("rollout")
    def rollout(self, work: RolloutWork) -> StreamingReply[FinishedGroup]:
        reply: StreamingReply[FinishedGroup] = StreamingReply()
        self.open += [(work, place, reply) for place in range(len(work.prompts))]
        self.most = max(self.most, len(self.open))
        return reply

    @verb("rollout")
    def likelihoods(self, unit: list[LikelihoodRequest]) -> list[Likelihood]:
        assert not self.open
        time.sleep(self.step_s)
        self.units.append(unit[0].id)
        if unit[0].id == "broken":
            raise ValueError("it cannot score this")
        return [Likelihood(each.id, each.tokens[each.first :].astype(np.float32), np.ones(1, bool)) for each in unit]

    def advance(self, stop, look_s):
        assert 0 < look_s < 1
        self.work(stop)

    def work(self, verb_waits):
        while self.open and not verb_waits():
            time.sleep(self.step_s)
            work, place, reply = self.open.pop(0)
            prompt, kept = work.prompts[place], work.finished.get(place, {})
            new = [sample for sample in range(work.samples) if sample not in kept]
            self.drawn += [(prompt.index, sample) for sample in new]
            rollouts = tuple(kept.get(i) or Rollout((), 10.0 * prompt.index + i) for i in range(work.samples))
            reply.put(FinishedGroup(place, RolloutGroup(prompt, rollouts)))
            if work is not (self.open[0][0] if self.open else None):
                reply.end()

    def release(self):
        self.released += 1

    def close(self):
        pass


class Job:
    """Ranks 0 and 1, each an engine."""

    def __init__(self, tmp_path) -> None:
        key = os.urandom(32)
        self.process, address = start("127.0.0.1", key)
        workers = WorkerGroups(train=(), generate=(0, 1), engines=((0,), (1,)))
        self.worlds = [
            World(RankInfo(rank, 2, rank, "here", "127.0.0.1", tmp_path), workers, RunStore(address, key, 60))
            for rank in (0, 1)
        ]
        self.roles = [Engine(), Engine()]
        self.raised: list[Exception] = []
        self.client = RpcClient(self.worlds[0])
        self.client.leading_role = self.roles[0]
        self.checks = 0
        groups = [
            RpcGroup(self.client, self.worlds[0], ranks, Engine, Timeouts(), self.roles[0] if 0 in ranks else None)
            for ranks in workers.engines
        ]
        self.groups = groups
        self.engines = Engines(groups, MAX_NUM_SEQS, self.check)
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def check(self) -> None:
        self.checks += 1

    def serve(self) -> None:
        try:
            serve(self.worlds[1], self.roles[1])
        except Exception as error:
            self.raised.append(error)

    def end(self) -> None:
        stop(self.worlds[0], self.client.leading_role)
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def shared_job(tmp_path_factory):
    job = Job(tmp_path_factory.mktemp("job"))
    yield job
    job.end()


@pytest.fixture
def job(shared_job):
    """Return a job whose ranks have done nothing."""
    for role in shared_job.roles:
        role.__init__()
    shared_job.checks = 0
    return shared_job


@pytest.fixture
def own_job(tmp_path):
    """Yield a job that the test may leave with open work."""
    job = Job(tmp_path)
    yield job
    job.end()


def prompts(count: int) -> list[Prompt]:
    return [Prompt(i, np.zeros(1, np.int32), "", {}) for i in range(count)]


def unit(name: str) -> list[LikelihoodRequest]:
    return [LikelihoodRequest(name, np.array([1, 2, i], np.int32), 2) for i in range(2)]


def test_each_group_comes_once_and_both_engines_work(job):
    for role in job.roles:
        role.step_s = 0.002
    groups = list(job.engines.generate(prompts(30), SPEC, 0))
    assert sorted(group.prompt.index for group in groups) == list(range(30))
    assert {(group.prompt.index, i): rollout.reward for group in groups for i, rollout in enumerate(group.rollouts)} == {
        (i, sample): 10.0 * i + sample for i in range(30) for sample in range(SAMPLES)
    }
    drawn = [role.drawn for role in job.roles]
    assert all(drawn) and sorted(drawn[0] + drawn[1]) == [(i, sample) for i in range(30) for sample in range(SAMPLES)]
    assert all(role.most <= AHEAD * MAX_NUM_SEQS / SAMPLES for role in job.roles)
    assert job.roles[0].released and not job.client._futures and job.checks


def test_kept_samples_are_not_drawn_again(job):
    kept = {0: {0}, 2: {1}, 3: set()}
    groups = {group.prompt.index: group for group in job.engines.generate(prompts(4), SPEC, 0, 1, kept)}
    assert sorted(job.roles[0].drawn + job.roles[1].drawn) == [(0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert groups[0].rollouts[1].reward == 1.0 and not groups[0].rollouts[0].turns


def test_a_fast_engine_answers_more(job):
    job.roles[1].step_s = 0.03
    list(job.engines.generate(prompts(40), SPEC, 0))
    assert len(job.roles[0].drawn) > 2 * len(job.roles[1].drawn) > 0


def test_each_unit_is_computed_once_by_one_engine(job):
    for role in job.roles:
        role.step_s = 0.002
    units = [unit(f"{i}") for i in range(8)]
    found = dict(job.engines.likelihoods(units))
    assert sorted(found) == list(range(8))
    units_of = [role.units for role in job.roles]
    assert all(units_of) and sorted(units_of[0] + units_of[1]) == sorted(map(str, range(8)))
    for place, likelihoods in found.items():
        assert [float(each.logprobs[0]) for each in likelihoods] == [0.0, 1.0]
        assert {each.id for each in likelihoods} == {str(place)}


def test_nothing_to_ask_is_no_work(job):
    assert list(job.engines.generate([], SPEC, 0)) == [] and list(job.engines.likelihoods([])) == []


def test_an_error_of_another_engine_reaches_rank_0(own_job):
    job = own_job
    with pytest.raises(RpcError, match=r"(?s)failed on rank 1 .*it cannot score this"):
        list(job.engines.likelihoods([unit("broken"), *[unit("x")] * 3]))
    job.thread.join(60)  # rank 1 answers before it raises
    assert isinstance(job.raised[0], ValueError)


def test_rank_0_looks_around_while_the_engines_work_and_may_leave(own_job):
    """With open work on both engines."""
    job = own_job
    looks = []

    def check():
        looks.append(time.monotonic())
        if len(looks) > 2:
            raise TimeoutError("time is up")

    engines = Engines(job.groups, MAX_NUM_SEQS, check)
    for role in job.roles:
        role.step_s = 0.02
    with pytest.raises(TimeoutError):
        list(engines.generate(prompts(100), SPEC, 0))
    assert sum(len(role.drawn) for role in job.roles) < 100 * SAMPLES


def test_rank_0_returns_although_nothing_arrives(job, monkeypatch):
    monkeypatch.setattr("pipeline.rpc.calls.RETURN_S", 0.05)
    job.roles[1].step_s = 1.0
    begun, returns = time.monotonic(), 0
    future = job.groups[1].call(Engine.likelihoods, unit("slow"))
    while not future.done:
        assert job.groups[0].receive_replies(block=True)
        returns += 1
    assert returns > 3 and time.monotonic() - begun > 0.9


def test_a_step_of_rank_0s_own_engine_that_hangs_is_overdue(job, monkeypatch):
    monkeypatch.setattr(Timeouts, "rollout", 0.1)
    groups = [RpcGroup(job.client, job.worlds[0], (0,), Engine, Timeouts(0.1), job.roles[0])]
    engines, late = Engines(groups, MAX_NUM_SEQS), []

    def hang(stop, look_s):
        assert not stop()
        assert job.client.overdue() is None
        time.sleep(0.2)
        late.append(job.client.overdue())
        Engine.work(job.roles[0], stop)

    monkeypatch.setattr(job.roles[0], "advance", hang)
    list(engines.generate(prompts(1), SPEC, 0))
    assert (late[0].verb, late[0].missing) == ("rollout", [0])
    assert job.client.overdue() is None


@pytest.mark.parametrize(
    ("ranks", "size", "engines"),
    [(1, 1, ((0,),)), (3, 1, ((0,), (1,), (2,))), (4, 2, ((0, 1), (2, 3)))],
)
def test_an_evaluation_has_only_generate_ranks(tmp_path, ranks, size, engines):
    recipe = config.load(
        str(RECIPE),
        [
            f"run_dir={tmp_path}",
            "policy.generation.backend=vllm",
            f"cluster.generate.ranks_per_node={ranks}",
            f"policy.generation.vllm_cfg.tensor_parallel_size={size}",
        ],
    )
    workers = WorkerGroups.of(recipe)
    assert workers == WorkerGroups((), tuple(range(ranks)), engines)
    assert {workers.name(rank) for rank in range(ranks)} == {"generate"} and workers.engine(0) == engines[0]
