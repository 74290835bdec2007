import pytest

from tests.world.worlds import World


@pytest.fixture
def start(tmp_path):
    """Start the ranks of a scenario; they are ended with the test."""
    worlds = []

    def begin(scenario: str, per_node: int = 1) -> World:
        worlds.append(World(tmp_path / f"{scenario} {len(worlds)}", scenario, per_node))
        return worlds[-1]

    yield begin
    for world in worlds:
        world.end()
