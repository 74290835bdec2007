import os

import pytest

from tests.fork_server import Program
from tests.generate import tiny
from tests.generate.conftest import default_group  # noqa: F401 - a fixture for all tests here


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("model"), "llama", seed=0)


@pytest.fixture
def play_in(tmp_path):
    """Return a function that runs a program to its end and returns (exit status, output)."""
    programs = []

    def run(program, *arguments, timeout_s=400):
        output = tmp_path / "printed"
        env = os.environ | {"OMP_NUM_THREADS": "1", "SOME_API_KEY": "not for a log"}
        programs.append(Program(program, arguments, env, output))
        return programs[-1].wait(timeout_s), output.read_text()

    yield run
    for program in programs:
        program.kill()
