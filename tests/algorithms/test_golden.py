"""Our formulas against values from other projects' code: tests/algorithms/golden/README.md."""

import json

import pytest

from tests.algorithms.golden.files import FOLDER, Golden, goldens
from tests.algorithms.golden.ours import OURS, deliberate, difference

# Of the largest entry of a tensor. NeMo-RL and verl add 1e-8 to the counts that they divide by, and take a few factors in
# float32; a factor, a sign or a mask that is wrong is off by far more.
TOLERANCE = {"NeMo-RL": 2e-7, "verl": 2e-7, "TRL": 1e-12, "On-Policy-Distill": 1e-12, "rLLM": 1e-12}


def cases() -> list:
    found = []
    for golden in goldens():
        reason = deliberate(golden)
        marks = [pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)] if reason else []
        found.append(pytest.param(golden, id=f"{golden.kind}-{golden.name}", marks=marks))
    return found


@pytest.mark.parametrize("golden", cases())
def test_equals_the_peers_values(golden: Golden):
    found = difference(golden)
    assert found < TOLERANCE[golden.peer], f"{golden.function} of {golden.peer} {golden.commit} differs by {found:.1e}"


def test_every_file_has_its_provenance():
    paths = list(FOLDER.glob("*.json"))
    assert len(paths) >= 20
    for path in paths:
        content = json.loads(path.read_text())
        assert content["repository"].startswith("https://github.com/") and len(content["commit"]) == 40, path.name
        assert content["file"].endswith(".py") and content["torch"] and content["dtype"] == "float64", path.name
        assert path.stat().st_size < 2**16, path.name
        assert content["cases"] and all(case["function"] and case["formula"] for case in content["cases"]), path.name


def test_every_kind_has_a_golden_value():
    assert {golden.kind for golden in goldens()} == OURS.keys()


def test_no_expected_value_is_empty_or_the_same_everywhere():
    """Golden values of only zeros would accept a formula that computes nothing."""
    by_formula: dict[tuple[str, str], float] = {}
    for golden in goldens():
        largest = max(tensor.abs().max().item() for tensor in golden.expected.values())
        by_formula[golden.peer, golden.formula] = max(by_formula.get((golden.peer, golden.formula), 0.0), largest)
    assert min(by_formula.values()) > 1e-2
