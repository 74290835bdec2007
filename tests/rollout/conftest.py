import pytest

from tests.generate import tiny


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), "llama", seed=0)
