"""`python -m tests.nemo_rl PATH_TO_NEMO_RL`: how many of its own recipes resolve, translate and plan, and why the rest do not.

The text recipes: examples/configs/*.yaml and examples/configs/recipes/llm, without those for pictures and sound. One resolves
if its chain of defaults and its `${...}` do, translates if nothing that it asks for is missing and its keys agree, and plans if
`submit.py plan=true` would print a plan. Exits with 1 if one plans although it has a feature that we do not, or that its
translation neither keeps nor notes (`census.py`).

Models that their recipes leave to the user ("Follow instructions in ...") are given: see PLACEHOLDERS.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.plan import backend_choice
from launch.plan.estimate import plan
from launch.preflight import architecture
from launch.recipes import reading as launched
from pipeline.config import Problem, RecipeError, config_tree, interpolation
from pipeline.recipe.problems import refuse
from tests.nemo_rl.census import dropped, features

PLACEHOLDERS = {"docs/guides/deepseek.md": "unsloth/DeepSeek-V3-bf16"}  # part of the instruction -> the model it ends in
NOT_TEXT = ("vlm", "audio", "avlm")


@dataclass(frozen=True)
class Outcome:
    name: str
    features: frozenset[str]  # that the census finds
    problems: tuple[Problem, ...]  # of reading; none: it translates
    unplanned: tuple[Problem, ...]  # of planning
    resolves: bool
    fits: bool = False  # into the memory of the GPUs, as planned
    dropped: frozenset[str] = frozenset()  # features that the translation neither keeps nor notes

    @property
    def translates(self) -> bool:
        return self.resolves and not self.problems

    @property
    def plans(self) -> bool:
        return self.translates and not self.unplanned


def main(root: Path) -> int:
    if not (root / "examples/configs").is_dir():
        print(f"{root} is no copy of NeMo-RL's repository: it has no examples/configs")
        return 2
    with tempfile.TemporaryDirectory() as home:
        os.environ.setdefault("HF_HOME", home)  # some recipes have a path below it
        outcomes = [outcome(path) for path in recipes(root)]
    print(report(outcomes))
    wrong = [o for o in outcomes if o.plans and o.features | o.dropped]
    for o in wrong:
        print(f"plans, but has or drops {', '.join(sorted(o.features | o.dropped))}: {o.name}")
    return 1 if wrong else 0


def recipes(root: Path) -> list[Path]:
    folder = root / "examples/configs"
    found = (*sorted(folder.glob("recipes/llm/**/*.yaml")), *sorted(folder.glob("*.yaml")))
    return [path for path in found if not any(word in path.name for word in NOT_TEXT)]


def outcome(path: Path) -> Outcome:
    try:
        tree = resolved(path)
    except RecipeError as error:
        return Outcome(path.name, frozenset(), error.problems, (), False)
    loaded = launched.inspect(str(path), [*given(path)])
    unplanned: tuple[Problem, ...] = ()
    fits = False
    if not loaded.problems:
        try:
            chosen, choice = backend_choice.choose(loaded.recipe)
            refuse(architecture.against_layout(chosen))
            fits = plan(chosen, choice).fits
        except RecipeError as error:
            unplanned = error.problems
    lost = dropped(tree, dataclasses.asdict(loaded.recipe), loaded.notes)
    return Outcome(path.name, frozenset(features(tree)), tuple(loaded.problems), unplanned, True, fits, frozenset(lost))


def given(path: Path) -> tuple[str, ...]:
    """Return the override of the model that a recipe leaves to its user; none if it does not resolve."""
    try:
        name = str(resolved(path).get("policy", {}).get("model_name"))
    except RecipeError:
        return ()
    return tuple(f"policy.model_name={model}" for words, model in PLACEHOLDERS.items() if words in name)


def resolved(path: Path) -> dict[str, Any]:
    """Return the recipe as NeMo-RL reads it. Raises RecipeError."""
    tree = config_tree.load_with_parents(path)
    refuse(interpolation.resolve(tree).values())
    return tree.plain()


def report(outcomes: list[Outcome]) -> str:
    counts = [sum(getattr(o, what) for o in outcomes) for what in ("resolves", "translates", "plans")]
    fit = sum(o.plans and o.fits for o in outcomes)
    lines = [
        "{} text recipes: {} resolve, {} translate, {} plan".format(len(outcomes), *counts) + f" ({fit} fit 80 GB GPUs)",
        "",
    ]
    lines += _table("does not translate", [(o.name, [reason(p) for p in o.problems]) for o in outcomes if o.problems])
    lines += _table("does not plan", [(o.name, [reason(p) for p in o.unplanned]) for o in outcomes if o.unplanned])
    return "\n".join(lines)


def reason(problem: Problem) -> str:
    """Return the feature that a problem names, or else the problem without its numbers."""
    feature = re.search(r"; Hetstep does not support (.*?)(?:\. Try |$)", problem.message)
    return feature.group(1) if feature else re.sub(r"\d[\d.]*", "N", f"{problem.key}: {problem.message}")


def _table(title: str, rows: list[tuple[str, list[str]]]) -> Iterator[str]:
    all_of, alone, example = collections.Counter(), collections.Counter(), {}
    for name, reasons in rows:
        for each in set(reasons):
            all_of[each] += 1
            alone[each] += len(set(reasons)) == 1
            example.setdefault(each, name)
    yield f"{title}: {len(rows)}"
    yield "recipes  alone  reason"
    for each, count in all_of.most_common():
        yield f"{count:7d}  {alone[each]:5d}  {each[:150]}  ({example[each]})"
    yield ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
