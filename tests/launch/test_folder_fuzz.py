"""Every command over folders with a mutated file, by `tests/launch/folder_fuzz.py`; and what a run does about damaged files."""

import pytest

from tests.launch import folder_fuzz


def check(kind: str, seeds: range, torch: bool = False) -> None:
    bad = [
        f"{done}\n{each.case}\nstatus {each.status}\n{each.raised}{each.wrote}"
        for done, each in folder_fuzz.fuzz_folders(kind, seeds, torch)
        if each.bad
    ]
    assert not bad, "\n\n".join(bad)


@pytest.mark.parametrize("kind", folder_fuzz.KINDS)
def test_a_few_folders(kind):
    check(kind, range(1))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", folder_fuzz.KINDS)
def test_many_folders(kind):
    check(kind, range(1, 60), torch=True)
