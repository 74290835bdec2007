"""Fixtures with hosts for hostile programs: this process; in long runs also each of PLACES."""

import functools
from collections.abc import Iterator

import pytest

from pipeline.sandbox import sandbox
from pipeline.sandbox.limits import SandboxError
from tests.sandbox.hosts import PLACES, Host, can_be_elsewhere


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


@pytest.fixture(params=["here", pytest.param("as a user", marks=pytest.mark.full)], scope="session")
def free(request: pytest.FixtureRequest) -> Iterator[Host]:
    """Return a host where only limits restrict a program."""
    if request.param != "here" and not can_be_elsewhere():
        pytest.skip("no Python here that another user may run")
    made = Host(request.param, "none")
    yield made
    made.close()
