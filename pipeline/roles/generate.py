"""What a generate rank serves."""

from __future__ import annotations

from pipeline import generate
from pipeline.boxes import Region
from pipeline.config import Recipe
from pipeline.data.chat import load_tokenizer
from pipeline.environments import registry as environments
from pipeline.refit.base import Refit, Report
from pipeline.refit.tables import RankPlan, Table, table
from pipeline.remote import verb
from pipeline.rollout.driver import rollout
from pipeline.rollout.work import RolloutWork
from pipeline.types import RolloutGroup
from pipeline.world import World


class GenerateRole:
    """Holds the policy that samples, and the environments that judge."""

    def __init__(self, recipe: Recipe, seed: int, world: World, refit: Refit):
        self._recipe = recipe
        self._seed = seed
        self._world = world
        self._refit = refit
        self._engine = world.realms.engine(world.rank)
        self._leader = world.rank == self._engine[0]

    @verb("setup")
    def setup(self) -> None:
        policy = self._recipe.policy
        with self._world.phase("load engine"):
            self._backend = generate.build(policy, len(self._engine), self._engine.index(self._world.rank), self._seed)
            self._tokenizer = load_tokenizer(policy.tokenizer)
            self._environments = environments.build(self._recipe.env) if self._leader else {}

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
        """Take all new weights; they are served only from `commit` on."""
        with self._world.phase("receive"):
            self._update = self._backend.update()
            return self._refit.receive(self._update)

    @verb("refit")
    def commit(self, version: int) -> None:
        with self._world.phase("commit"):
            self._update.commit(version)

    @verb("rollout")
    def rollout(self, work: RolloutWork) -> list[RolloutGroup]:
        return rollout(work, self._backend, self._environments, self._tokenizer, self._world, self._leader)
