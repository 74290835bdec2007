"""What a generate rank serves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pipeline import config, generate
from pipeline.boxes import Region
from pipeline.config import Recipe
from pipeline.data.chat import load_tokenizer
from pipeline.data.observations import Observations
from pipeline.environments import registry as environments
from pipeline.generate.base import GenerateBackend, Part
from pipeline.refit.base import Commit, Refit, Report
from pipeline.refit.tables import RankPlan, Table, table
from pipeline.remote import Later, verb
from pipeline.rollout.driver import Driver
from pipeline.rollout.environment_pool import EnvironmentPool
from pipeline.rollout.hearing import Hearing
from pipeline.rollout.lockstep import VERB, Lockstep
from pipeline.rollout.work import Finished, RolloutWork, Unfinished
from pipeline.sandbox import kernel
from pipeline.world import World


class GenerateRole:
    """Holds the policy that samples, and the environments that judge.

    The first rank of an engine leads it: it alone has episodes, and answers for them. Its peers only follow the engine's moves.
    """

    def __init__(self, recipe: Recipe, seed: int, world: World, refit: Refit):
        self._recipe = recipe
        self._seed = seed
        self._world = world
        self._refit = refit
        self._engine = world.realms.engine(world.rank)
        self._lockstep = Lockstep(world.own if len(self._engine) > 1 else None)
        self._leads = world.rank == self._engine[0]
        self._driver: Driver | None = None  # where it leads
        self._pool: EnvironmentPool | None = None  # likewise
        self._backend: GenerateBackend | None = None
        self.news = threading.Event()

    @verb("setup")
    def setup(self) -> None:
        policy = self._recipe.policy
        with self._world.phase("load engine"):
            self._backend = generate.build(policy, len(self._engine), self._engine.index(self._world.rank), self._seed)
            if self._world.realms.colocated and policy.generation.refit_transport != "broadcast":
                self._backend.layout()  # vLLM finds it by running loaders, which need the weights' memory; soon they sleep
        if self._leads:
            with self._world.phase("load environments"):
                self._driver = self._lead(self._backend)

    def _lead(self, backend: GenerateBackend) -> Driver:
        recipe = self._recipe
        policy = recipe.policy
        tokenizer = load_tokenizer(policy.tokenizer)
        observations = None
        if config.section(recipe).max_rollout_turns > 1:
            observations = Observations(tokenizer, policy.tokenizer, recipe.data.apply_chat_template)
        kernel.raise_open_files()  # an open session of an interpreter has four
        judged_by = environments.build(recipe.env)
        self._pool = EnvironmentPool(judged_by, {name: env.timeout_s for name, env in recipe.env.items()}, self.news)
        hearing = Hearing(judged_by, tokenizer, observations, policy.generation.vllm_cfg.max_model_len)
        most = policy.generation.max_num_seqs
        return Driver(backend, hearing, self._pool, self._lockstep, self._world, self.news, most)

    # ---- weights ------------------------------------------------------------------------------------------------------------

    @verb("setup")
    def layout(self) -> Table:
        """What this rank must be given."""
        with self._world.phase("layout"):
            regions, units = self._regions()
            return table(regions, self._backend.shapes, units)

    @verb("setup")
    def follow(self, plan: RankPlan) -> None:
        """Receive by this plan from now on."""
        with self._world.phase("plan"):
            self._refit.prepare(*self._regions(), plan)

    def _regions(self) -> tuple[list[Region], list[str]]:
        pairs = [(region, unit.name) for unit in self._backend.layout() for region in unit.regions]
        return [region for region, _ in pairs], [unit for _, unit in pairs]

    @verb("refit")
    def receive(self) -> Report:
        """Take all new weights; they are served only from `commit` on. Episodes under way stand still until then."""
        with self._world.phase("receive"):
            if self._driver:
                self._driver.paused = True
            self._update = self._backend.update()
            return self._refit.receive(self._update)

    @verb("refit")
    def commit(self, commit: Commit) -> None:
        with self._world.phase("commit"):
            self._update.commit(commit.version, commit.recompute_kv_cache)
            if self._driver:
                self._driver.resume()

    @verb("refit")
    def sleep(self, keep_weights: bool) -> None:
        """Give the GPU to the train rank that shares it."""
        with self._world.phase("sleep"):
            self._backend.sleep(keep_weights)

    @verb("refit")
    def wake(self, part: Part) -> None:
        with self._world.phase(f"wake {part}"):
            self._backend.wake(part)

    # ---- episodes -----------------------------------------------------------------------------------------------------------

    @verb("rollout")
    def rollout(self, work: RolloutWork) -> Later[Finished]:
        """Begin these groups; each is answered as soon as its episodes have ended."""
        return self._driver.rollout(work) if self._driver else _nothing()

    @verb("rollout")
    def drain(self) -> Later[None]:
        """Begin no more episodes until the next commit. Ends when none asks the engine any more."""
        return self._driver.drain() if self._driver else _nothing()

    @verb("rollout")
    def snapshot(self) -> list[Unfinished]:
        """Where each group stands that has not been answered."""
        return self._driver.snapshot() if self._driver else []

    @verb("rollout")
    def cut(self, works: list[int]) -> None:
        """End the open episodes of the works with these numbers where they are."""
        if self._driver:
            self._driver.cut(works)

    # ---- between verbs ------------------------------------------------------------------------------------------------------

    def work(self, verb_waits: Callable[[], bool]) -> None:
        if self._leads:
            if self._driver:
                self._driver.work(verb_waits)
            self._lockstep.announce(VERB)
        else:
            self._lockstep.follow(self._backend, self._world)

    def close(self) -> None:
        if self._pool:
            self._pool.close()


def _nothing() -> Later:
    """The answer of a rank that does not lead."""
    later: Later = Later()
    later.end()
    return later
