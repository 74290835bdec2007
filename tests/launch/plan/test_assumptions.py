"""Each number that a plan assumes names its source, or says that it is assumed."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from launch import plan
from pipeline.config import hardware
from pipeline.config.hardware import HARDWARE

SHEET = re.compile(r'data sheets? "')
SOURCE = re.compile(
    r"[Aa]ssumed|[Mm]easured|\b(?:h100|gb200)\.yaml|https?://|\b(?:github|www|developer)\.\w+|arXiv|config\.json|tests\.benchmarks"
    r"|\b(?:vllm|pipeline|docs|src)[/.]\w+|\bissues? \d|\bpull request \d|`\w+\.\w+`|performance summary"
)
OF_THE_PROGRAM = {  # units, widths of tables, numbers of samples and of points, formats
    *("GB", "GIB", "GIGA", "EULER", "LABEL", "WIDTH", "COLUMNS", "MOST", "FORMAT", "RECEIVERS"),
    *("BUNDLES", "OLDEST", "POINTS", "ROUNDS", "SAMPLED", "WARM_UP", "MOST_RECORDS", "MOST_TOKENS", "_STACKED"),
    *("CACHE_BYTES", "STATE_BYTES"),  # of types that have this size
}
FILES = sorted(Path(plan.__file__).parent.glob("*.py"))


def commented(text: str) -> dict[str, str]:
    """Return the comments of each key of a description: on its line, and on the lines above it."""
    found, above = {}, ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            above += f"{line.strip('# ')} "
        elif key := re.match(r" *(\w+):", line):
            found[key.group(1)] = above + line.partition("#")[2]
            above = ""
    return found


@pytest.mark.parametrize("path", sorted(HARDWARE.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_value_of_a_description_has_a_source(path):
    text = path.read_text()
    described, comments = yaml.safe_load(text), commented(text)
    assumed = described.pop("assumed")
    assert {*hardware.assumptions()} <= assumed.keys() and described.keys() | assumed.keys() <= comments.keys()
    assert SHEET.search(text.partition("\ncompute_capability")[0])  # of all values outside of `assumed`
    comments["longest_step"] += comments["shortest_step"]
    assert [name for name in assumed if not SOURCE.search(comments[name])] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_constant_of_the_plan_has_a_source(path):
    text = path.read_text()
    body, lines = ast.parse(text).body, text.splitlines()
    missing = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name | ast.Tuple)):
            continue
        names = [name.id] if isinstance(name, ast.Name) else [each.id for each in name.elts if isinstance(each, ast.Name)]
        numbers = (each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant))
        if not any(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
            continue
        said = "".join(line.partition("#")[2] for line in lines[node.lineno - 1 : node.end_lineno])
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said += str(after.value.value)
        missing += [each for each in names if each not in OF_THE_PROGRAM and not SOURCE.search(said)]
    assert missing == []
