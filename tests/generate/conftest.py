from collections.abc import Callable, Iterator

import pytest

from pipeline.generate import build
from pipeline.generate.generate_backend import GenerateBackend
from tests.generate.tiny import Checkpoint, destroy_groups, load, policy, save


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Checkpoint]:
    """Return a function (family, seed) -> a saved model, made once."""
    made: dict[tuple[str, int], Checkpoint] = {}

    def make(family: str, seed: int) -> Checkpoint:
        if (family, seed) not in made:
            made[family, seed] = save(tmp_path_factory.mktemp(f"{family}-{seed}"), family, seed)
        return made[family, seed]

    return make


@pytest.fixture(scope="session")
def new_engine(checkpoint) -> Callable[..., GenerateBackend]:
    """Return a function (backend, family) -> a new engine that holds checkpoint 0 of the family as version 0."""

    def make(backend: str, family: str, **settings) -> GenerateBackend:
        source = checkpoint(family, 0)
        engine = build(policy(source.folder, backend, **settings), engine_ranks=1, rank_in_engine=0, seed=0)
        load(engine, source.weights().items(), version=0)
        return engine

    return make


@pytest.fixture(scope="package", autouse=True)
def default_group() -> Iterator[None]:
    """Destroy torch's default group after a module's tests: vLLM makes it, and tests of other packages make their own."""
    yield
    destroy_groups()
