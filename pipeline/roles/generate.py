"""The role of a generate rank: the verbs that it serves."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path

from pipeline import config, generate
from pipeline.boxes import Region
from pipeline.checkpoints import verification
from pipeline.checkpoints.checkpoint import read_record
from pipeline.config import PolicyConfig, Recipe
from pipeline.generate.generate_backend import GenerateBackend, MemoryPart
from pipeline.job.world import World
from pipeline.refit.protocol import Commit, PreparedRefit, Refit, RefitReport
from pipeline.refit.tables import LayoutTable, RankPlan, layout_table
from pipeline.roles.environment_ranks import judge_pool
from pipeline.roles.reward import Scorer
from pipeline.roles.served_judge import served_judge
from pipeline.rollout.driver import EpisodeDriver
from pipeline.rollout.judges.environment_steps import EnvironmentSettings
from pipeline.rollout.judges.pool import LOAD_SHARE, JudgePool
from pipeline.rollout.judges.pools import JudgePools
from pipeline.rollout.lockstep import VERB, Lockstep, engine_readings
from pipeline.rollout.rollout_messages import FinishedGroup, RolloutWork, ScoreWork, UnfinishedGroup
from pipeline.rpc import StreamingReply, verb
from pipeline.train.adapters.served_adapters import served_adapters
from pipeline.train.adapters.spec import refits_adapters
from pipeline.train.saved_weights import checkpoint_weights, model_weights
from pipeline.types import Likelihood, LikelihoodRequest


class GenerateRole:
    """Holds the policy's engine and the environments.

    The first rank of an engine leads it: it runs the episodes and replies for them. Its peers follow the engine's steps.
    """

    def __init__(self, recipe: Recipe, seed: int, world: World, refit: Refit | None):
        self._recipe = recipe
        self._seed = seed
        self._world = world
        self._refit = refit
        self._engine = world.workers.engine(world.rank)
        self._leads = world.rank == self._engine[0]
        self._lockstep = Lockstep(world.own if len(self._engine) > 1 else None)
        self._driver: EpisodeDriver | None = None  # on the leader
        self._environments: JudgePool | JudgePools | None = None  # on the leader
        self._built: GenerateBackend | None = None  # by `setup`
        self.wakeup = threading.Event()

    @verb("setup")
    def setup(self) -> None:
        """Build the engine and, on its leader, the environments. An evaluation's engine may serve another model."""
        if self._serves == "reward_model":
            with self._world.phase("load reward model"):
                model = config.evaluated_reward_model(self._recipe)
                self._scorer = Scorer(model, self._world, self._seed, offload=False)
            return
        policy = self._policy
        judges = self._start_judges() if self._leads else None  # load alongside the engine
        with self._world.phase("load engine"):
            adapters = served_adapters(policy) if refits_adapters(self._recipe) else None
            place = len(self._engine), self._engine.index(self._world.rank)
            self._built = generate.build(policy, *place, self._seed, adapters)
            if self._world.workers.colocated and policy.generation.refit_transport != "broadcast":
                self._backend.layout()  # vLLM computes it by running loaders, which need the weights' memory
        if judges:
            with self._world.phase("load environments"):
                self._lead(self._backend, judges)

    @property
    def _serves(self) -> str:
        """The model of this engine: `policy`, or in an evaluation also `judge` or `reward_model`."""
        engines = self._world.workers.engines
        return config.engine_models(self._recipe, len(engines))[engines.index(self._engine)]

    @property
    def _policy(self) -> PolicyConfig:
        """The model that this engine generates with."""
        return config.judge_policy(self._recipe) if self._serves == "judge" else self._recipe.policy

    @property
    def _backend(self) -> GenerateBackend:
        assert self._built, "verb 'setup' comes first"
        return self._built

    def _start_judges(self) -> JudgePool | JudgePools:
        settings = EnvironmentSettings.of(self._recipe, served_judge(self._recipe, self._world))
        if self._serves == "judge":  # rank 0 reads its verdicts
            settings = dataclasses.replace(settings, env={}, function="")
        return judge_pool(self._world, settings, self.wakeup, self._recipe.cluster.timeouts.join)

    def _lead(self, backend: GenerateBackend, judges: JudgePool | JudgePools) -> None:
        judges.wait_until_loaded(LOAD_SHARE * self._recipe.cluster.timeouts.setup)
        self._environments = judges
        most, longest = backend.max_num_seqs, self._policy.generation.vllm_cfg.max_model_len
        broken = {name: environment.broken_reward for name, environment in self._recipe.env.items()}
        parts = backend, judges, self._lockstep, self._world, self.wakeup
        players = config.rollout_function(self._recipe), config.agents(self._recipe.env)
        self._driver = EpisodeDriver(*parts, most, longest, broken, *players)

    # ---- weights ------------------------------------------------------------------------------------------------------------

    @verb("setup")
    def layout(self) -> LayoutTable:
        """Return the regions of the weights that this rank receives."""
        with self._world.phase("layout"):
            regions, units = self._regions()
            return layout_table(regions, self._backend.shapes, units)

    @verb("setup")
    def prepare_refit(self, plan: RankPlan) -> None:
        """Receive by this plan from now on."""
        with self._world.phase("plan"):
            assert isinstance(self._refit, PreparedRefit)
            self._refit.prepare(*self._regions(), plan)

    def _regions(self) -> tuple[list[Region], list[str]]:
        pairs = [(region, unit.name) for unit in self._backend.layout() for region in unit.regions]
        return [region for region, _ in pairs], [unit for _, unit in pairs]

    @verb("refit")
    def receive(self) -> RefitReport:
        """Receive all new weights; `commit` makes them the served ones. Episodes pause until then."""
        with self._world.phase("receive"):
            if self._driver:
                self._driver.paused = True
            self._update = self._backend.update()
            assert self._refit
            return self._refit.receive(self._update)

    @verb("refit")
    def commit(self, commit: Commit) -> None:
        """Serve the received weights and resume episodes."""
        with self._world.phase("commit"):
            self._update.commit(commit.version, commit.recompute_kv_cache)
            if self._driver:
                self._driver.resume()

    @verb("refit")
    def sleep(self, keep_weights: bool) -> None:
        """Release the GPU for the train rank that shares it."""
        with self._world.phase("sleep"):
            self._backend.sleep(keep_weights)

    @verb("refit")
    def wake(self, part: MemoryPart) -> None:
        """Take back the GPU memory of weights or cache."""
        with self._world.phase(f"wake {part}"):
            self._backend.wake(part)

    # ---- episodes -----------------------------------------------------------------------------------------------------------

    @verb("rollout")
    def rollout(self, work: RolloutWork) -> StreamingReply[FinishedGroup]:
        """Begin these groups; each is sent as soon as its episodes have ended."""
        return self._driver.rollout(work) if self._driver else _nothing()

    @verb("rollout")
    def drain(self) -> StreamingReply[None]:
        """Begin no more episodes until the next commit. Ends when no episode has a request in the engine."""
        return self._driver.drain() if self._driver else _nothing()

    @verb("rollout")
    def snapshot(self) -> list[UnfinishedGroup]:
        """Return the state of each group that has not been sent."""
        return self._driver.snapshot() if self._driver else []

    @verb("rollout")
    def cut(self, works: list[int]) -> None:
        """End the open episodes of these works at once."""
        if self._driver:
            self._driver.cut(works)

    # ---- evaluation ---------------------------------------------------------------------------------------------------------

    @verb("setup")
    def load(self) -> int:
        """Verify and load the weights of `evaluate.checkpoint`, or those of the model's own files, and serve them.

        Return how many sequences the engine decodes at once; 0 for an engine that scores.
        """
        policy, checkpoint = self._policy, self._recipe.evaluate.checkpoint if self._serves == "policy" else None
        share, settings = (self._world.own.rank(), self._world.own.size()), self._recipe.checkpointing
        with self._world.phase("verify weights"):
            if folder := self._recipe.evaluate.checkpoint:
                verification.check_share(read_record(Path(folder)), settings.verify, share)
            if not self._recipe.policy.random_init:
                verification.check_export("policy.model_name", Path(self._recipe.policy.model_name), settings.verify, share)
        if self._serves == "reward_model":
            return 0  # loaded where it was built
        with self._world.phase("load weights"):
            update = self._backend.update()
            if checkpoint:
                update.load(checkpoint_weights(Path(checkpoint), policy, key=verification.obtain_key(settings)))
            else:
                update.load(model_weights(policy, self._seed))
            update.commit(0)
        return self._backend.max_num_seqs

    @verb("rollout")
    def likelihoods(self, unit: list[LikelihoodRequest]) -> list[Likelihood]:
        """Return the log-probs of the texts of `unit` on the engine's leader, [] on its peers. No episode may be open."""
        with self._world.phase("likelihoods"):
            results = self._backend.likelihoods(unit)
        return results if self._leads else []

    @verb("rollout")
    def score(self, work: ScoreWork) -> list[float]:
        """Return the score of each sequence by the reward model that this engine serves, in the order of the microbatches."""
        return self._scorer.score(work)

    # ---- between verbs ------------------------------------------------------------------------------------------------------

    def work(self, verb_waits: Callable[[], bool]) -> None:
        """Advance the episodes, or follow the engine's leader, until the next verb."""
        if self._leads:
            if self._driver:
                self._driver.work(verb_waits)
            self.release()
        else:
            self._lockstep.follow(self._built, self._world)

    def advance(self, stop: Callable[[], bool], look_s: float) -> None:
        """Advance the episodes of the engine that this rank leads, until `stop` returns True or there is nothing to do."""
        if self._driver:
            self._driver.work(stop, look_s)

    def release(self) -> None:
        """Let the engine's other ranks take their next verb."""
        self._lockstep.announce(VERB)

    def readings(self) -> dict[str, float]:
        """Return the engine's load by names of `pipeline.monitor.readings`; {} before it is built. Any thread may call this."""
        return engine_readings(self._built, self._lockstep.clock)

    def close(self) -> None:
        """Close the environments."""
        if self._environments:
            self._environments.close()


def _nothing() -> StreamingReply:
    """Return the reply of a rank that does not lead."""
    reply: StreamingReply = StreamingReply()
    reply.end()
    return reply
