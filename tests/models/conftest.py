import pytest

from tests.models.cases import write_models


@pytest.fixture(scope="session")
def families_folder(tmp_path_factory):
    """Write a checkpoint of every family, by its name in `cases.configs()`."""
    folder = tmp_path_factory.mktemp("families")
    write_models(folder)
    return folder
