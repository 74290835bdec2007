"""`python -m tests.foreign verl CLONE`: how many published recipes of a project resolve, translate and plan.

It lists why the others do not.

A recipe resolves if its reader reads its file without a problem of values that are missing (a script may need variables),
translates if nothing that it asks for is missing and its keys agree, and plans if `submit.py plan=true` would print a plan.
With a third argument, `table`, each recipe has a line with its first problems; `sample=10` takes ten recipes, evenly spaced in
the order of their names, and prints all that a user of each is told. Recipes whose model is not on this machine and not in
recipes/models cannot plan; `model=FOLDER` replaces every model.

NeMo-RL's whole census, with more checks, is `python -m tests.nemo_rl CLONE`.
"""

from __future__ import annotations

import collections
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.plan import backend_choice
from launch.plan.estimate import plan
from launch.preflight import architecture
from launch.recipes import reading
from pipeline.config import Problem, RecipeError
from pipeline.recipe.problems import refuse
from tests.foreign import prime_rl_files, trl_commands, verl_scripts
from tests.nemo_rl import __main__ as nemo_rl


def nemo_rl_recipes(root: Path) -> list[verl_scripts.Published]:
    """Return NeMo-RL's text recipes, with the models that they leave to the user."""
    return [verl_scripts.Published(path.name, path, nemo_rl.given(path)) for path in nemo_rl.recipes(root)]


PROJECTS: dict[str, Callable[[Path], list[verl_scripts.Published]]] = {
    "nemo_rl": nemo_rl_recipes,
    "prime_rl": prime_rl_files.published,
    "trl": trl_commands.published,
    "verl": verl_scripts.published,
}


@dataclass(frozen=True)
class Outcome:
    """Holds the results of the reader and the plan for a published recipe."""

    name: str
    problems: tuple[Problem, ...]
    resolves: bool = True
    unplanned: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def translates(self) -> bool:
        return self.resolves and not self.problems

    @property
    def plans(self) -> bool:
        return self.translates and not self.unplanned


def outcome(recipe: verl_scripts.Published, arguments: list[str]) -> Outcome:
    try:
        loaded = reading.inspect(str(recipe.path), [*recipe.arguments, *arguments])
    except RecipeError as error:
        missing = any(problem.code == "missing-value" for problem in error.problems)
        return Outcome(recipe.name, tuple(error.problems), resolves=not missing)
    if loaded.problems:
        return Outcome(recipe.name, tuple(loaded.problems), notes=tuple(loaded.notes))
    try:
        chosen, choice = backend_choice.choose(loaded.recipe)
        assert choice is not None, "a trained policy has a backend"
        refuse(architecture.against_layout(chosen))
        plan(chosen, choice)
    except RecipeError as error:
        return Outcome(recipe.name, (), unplanned=tuple(error.problems), notes=tuple(loaded.notes))
    return Outcome(recipe.name, (), notes=tuple(loaded.notes))


def reason(problem: Problem) -> str:
    """Return the feature that a problem names, or else the problem without its numbers."""
    feature = re.search(r"; Hetstep does not support (.*?)(?:\. Try |$)", problem.message)
    return feature[1] if feature else re.sub(r"\d[\d.]*", "N", f"{problem.key}: {problem.message}")[:150]


def report(outcomes: list[Outcome]) -> str:
    counts = {what: sum(getattr(one, what) for one in outcomes) for what in ("resolves", "translates", "plans")}
    lines = [f"{len(outcomes)} recipes: " + ", ".join(f"{count} {what}" for what, count in counts.items()), ""]
    for title, problems_of in (("does not translate", lambda one: one.problems), ("does not plan", lambda one: one.unplanned)):
        count_of: collections.Counter[str] = collections.Counter()
        for one in outcomes:
            count_of.update({reason(problem) for problem in problems_of(one)})
        lines += [f"{title}: recipes, reason", *(f"{count:5d}  {text}" for text, count in count_of.most_common()), ""]
    return "\n".join(lines)


def table(outcomes: list[Outcome]) -> str:
    lines = []
    for one in outcomes:
        state = "plans" if one.plans else "translates" if one.translates else "resolves" if one.resolves else "-"
        reasons = [reason(problem) for problem in (*one.problems, *one.unplanned)]
        lines.append(f"{state:10s}  {one.name}  ({len(one.notes)} notes)  {'; '.join(dict.fromkeys(reasons[:3]))}")
    return "\n".join(lines)


def told(one: Outcome) -> str:
    """Return all that a user of a recipe is told."""
    problems = [f"  {problem}" for problem in (*one.problems, *one.unplanned)]
    return "\n".join([table([one]), *problems, *(f"  note: {note}" for note in one.notes), ""])


def main(project: str, root: Path, *options: str) -> int:
    models = [f"policy.model_name={option.removeprefix('model=')}" for option in options if option.startswith("model=")]
    recipes = PROJECTS[project](root)
    for option in options:
        if option.startswith("sample="):
            size = int(option.removeprefix("sample="))
            recipes = [recipes[i * len(recipes) // size] for i in range(size)]
    outcomes = [outcome(recipe, models) for recipe in recipes]
    if not outcomes:
        print(f"{root} has no recipes of {project}")
        return 2
    if any(option.startswith("sample=") for option in options):
        print(*map(told, outcomes), sep="\n")
    print(*([table(outcomes), ""] if "table" in options else []), report(outcomes), sep="\n")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in PROJECTS:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
