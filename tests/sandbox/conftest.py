"""Fixtures with hosts for hostile programs: this process; in long runs also each of PLACES."""

import functools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.sandbox import image_cache, sandbox
from pipeline.sandbox.limits import SandboxError
from tests.sandbox.hosts import PLACES, Host, can_be_elsewhere
from tests.sandbox.images import make_root


@functools.cache
def unusable() -> str:
    """Return why the sandbox does not work here, else nothing."""
    try:
        sandbox.choose("auto")
    except SandboxError as error:
        return str(error)
    return ""


@pytest.fixture(params=["here", *(pytest.param(place, marks=pytest.mark.long) for place in PLACES)], scope="session")
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    if request.param != "here" and not can_be_elsewhere():
        pytest.skip("no Python here that another user may run")
    if request.param == "here" and (reason := unusable()):
        pytest.skip(reason)
    made = Host(request.param)
    if request.param != "here" and not made.works():
        made.close()
        pytest.skip(f"the sandbox does not work here {request.param}")
    yield made
    made.close()


@pytest.fixture(scope="session")
def image_folder() -> Iterator[Path]:
    """Return a folder for images and `cache`, of what is unpacked. Other users may read it: root's containers are nobody's."""
    folder = Path(tempfile.mkdtemp(prefix="images-"))
    folder.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(image_cache.VARIABLE, str(folder / "cache"))
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def image_root(image_folder: Path) -> Path:
    """Return a root file system."""
    if reason := unusable() or ("" if can_be_elsewhere() else "no Python here to put into an image"):
        pytest.skip(reason)
    return make_root(image_folder / "root")


@pytest.fixture(params=["here", pytest.param("as a user", marks=pytest.mark.full)], scope="session")
def free(request: pytest.FixtureRequest) -> Iterator[Host]:
    """Return a host where only limits restrict a program."""
    if request.param != "here" and not can_be_elsewhere():
        pytest.skip("no Python here that another user may run")
    made = Host(request.param, "none")
    yield made
    made.close()
