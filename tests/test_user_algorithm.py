"""Algorithms of users: a dotted path, or an entry point of an installed package, and what each mistake prints."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch.preflight import user_imports
from pipeline import config
from pipeline.algorithms import ALGORITHMS, CLASSES, ONLINE, build, read_by
from pipeline.config import reference, user_algorithm
from pipeline.models import FAMILIES
from pipeline.recipe.problems import RecipeError
from pipeline.seams import entry_points
from tests.problems import named, refused

FOCAL = """
from dataclasses import dataclass
from pipeline.algorithms.algorithm import Algorithm
from pipeline.algorithms.grpo import GRPO, GRPOConfig
from pipeline.algorithms.rewarded import RewardedAlgorithm
from pipeline.algorithms.sections import OfflineConfig, RewardedConfig
@dataclass
class FocalConfig(OfflineConfig):
    gamma: float = 2.0
class Focal(Algorithm):
    Section = FocalConfig
    reads = ("plan.longest_tokens",)
    def loss(self, outputs, batch, counts): ...
@dataclass
class MedianConfig(GRPOConfig):
    share: float = 0.5
class Median(GRPO):
    Section = MedianConfig
class NoLoss(Algorithm):
    Section = FocalConfig
class NoAdvantages(RewardedAlgorithm):
    Section = RewardedConfig
class NoSection(Algorithm):
    def loss(self, outputs, batch, counts): ...
class Raises(Focal):
    def __init__(self, recipe): raise KeyError("gamma")
class TwoParameters(Focal):
    def loss(self, outputs): ...
class Other: ...
number = 3
"""
JUDGED = (
    *("data.train.env_name=e", "env={_override_: true, e: {kind: math}}", "data.validation=null"),
    *("my_focal.val_period=0", "my_focal.val_at_start=false"),
)
TRUSTED = {"may_import": lambda path, folders: folders}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a recipe and a module. What a test registers or imports is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_focal.py").write_text(FOCAL)
    (tmp_path / "mine.yaml").write_text("defaults: tiny_sft\nalgorithm: my_focal.Focal\nmy_focal: {gamma: 1.5}\n")
    entry_points.find.cache_clear()
    yield tmp_path
    for name in ALGORITHMS.keys() - CLASSES.keys():
        del ALGORITHMS[name]
    user_algorithm._paths.clear()
    entry_points.find.cache_clear()
    for name in [name for name in sys.modules if name.startswith(("my_focal", "data_focal"))]:
        del sys.modules[name]


def inspected(folder, *overrides, **options):
    return config.inspect(str(folder / "mine.yaml"), overrides, **(TRUSTED | options))


def test_a_class_beside_the_recipe_is_an_algorithm(folder):
    loaded = inspected(folder, "my_focal.max_num_steps=7")
    recipe = loaded.recipe
    assert loaded.problems == [] and (recipe.algorithm, recipe.algorithm_class) == ("my_focal", "my_focal.Focal")
    assert (build(recipe).section.gamma, build(recipe).section.max_num_steps) == (1.5, 7)
    assert "my_focal" in read_by("plan.longest_tokens") and read_by("my_focal.gamma") == ("my_focal",)
    assert (
        "my_focal" not in ONLINE
        and not config.generates(recipe)
        and config.changed(recipe, {"my_focal.gamma": 3.0}).my_focal.gamma == 3.0
    )
    assert reference.explained("my_focal.gamma").startswith("my_focal.gamma: number; default 2.0")
    assert not hasattr(config.inspect("tiny_sft").recipe, "my_focal")  # a recipe has the section of its own algorithm alone
    keys = {problem.key: problem.message for problem in inspected(folder, "my_focal.gama=1").problems}
    assert keys == {"my_focal.gama": "is not a key; did you mean 'my_focal.gamma'?"}
    (folder / "inherits.yaml").write_text("defaults: tiny_sft\nalgorithm: sft\nalgorithm_class: my_focal.Focal\n")
    assert config.inspect(str(folder / "inherits.yaml")).recipe.algorithm_class is None
    unread = inspected(folder, "sft.seed=3")
    assert "try my_focal.seed" in str(unread.unread(unread.recipe)[0][0])


def test_a_run_is_read_without_an_import(folder):
    """A job imports the class; a command that reads the folder has the same values and an algorithm like it."""
    median = inspected(folder, "algorithm=my_focal.Median", "my_focal={_override_: true, share: 0.25, seed: 5}", *JUDGED)
    assert median.problems == []
    config.loading.write(median.recipe, folder / "recipe.yaml")
    for name in ALGORITHMS.keys() - CLASSES.keys():
        del ALGORITHMS[name]
    user_algorithm._paths.clear()
    del sys.modules["my_focal"]
    read = config.read(folder / "recipe.yaml")
    assert "my_focal" not in sys.modules and (read.my_focal.share, read.my_focal.seed) == (0.25, 5)
    assert config.generates(read) and type(build(read)).__mro__[1].__name__ == "GRPO"
    again = config.read(folder / "recipe.yaml", **TRUSTED)
    assert type(build(again)).__name__ == "Median"
    assert config.to_yaml(again) == config.to_yaml(read) == config.to_yaml(median.recipe)


MISTAKES = [
    ("my_focal.Focl", "not-importable", "has no Focl; did you mean Focal?"),
    ("no_focal.Focal", "not-importable", "there is no module no_focal; looked in "),
    ("my_focal.number", "wrong-type", "got a int; expected a class that derives from pipeline.algorithms.algorithm.Algorithm"),
    ("my_focal.Other", "wrong-type", "the class does not derive from Algorithm; expected one of the bases in "),
    ("my_focal.NoLoss", "wrong-type", "the class has no loss; expected loss(self, outputs, batch, counts)"),
    ("my_focal.NoAdvantages", "wrong-type", "the class has no advantages; expected advantages(self, group, rewards)"),
    ("my_focal.TwoParameters", "wrong-type", "got loss(self, outputs); expected (self, outputs, batch, counts): too many"),
    ("my_focal.NoSection", "wrong-type", "expected a dataclass with the keys of my_focal"),
    ("my_focal.Raises", "unsupported", "my_focal.Raises: the class raised KeyError: 'gamma'"),
    ("broken.Focal", "not-importable", "it cannot be imported: NameError: name 'nonsense' is not defined"),
    ("data.Focal", "already-exists", "its section would be 'data', the name of its file, which is a key of every recipe"),
    ("x.grpo.Mine", "already-exists", "its section would be 'grpo', the name of its file, which is an algorithm of Hetstep"),
]


@pytest.mark.parametrize(("path", "code", "says"), MISTAKES, ids=[path for path, _, _ in MISTAKES])
def test_a_mistake_is_named_before_submission(folder, path, code, says):
    (folder / "broken.py").write_text("Focal = nonsense\n")
    try:
        problems = inspected(folder, f"algorithm={path}").problems
    except RecipeError as error:
        problems = error.problems
    (problem,) = [problem for problem in problems if problem.key == "algorithm"]
    assert problem.code == code and says in problem.message and path in problem.message, problem


def test_a_recipe_that_is_not_trusted_is_not_imported(folder):
    (problem,) = inspected(folder, may_import=lambda path, folders: None).problems
    assert problem.code == "not-importable" and "Try trust=true" in problem.message and "my_focal" not in sys.modules


PACKAGE = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "my-focal"
version = "0.3"
[project.entry-points."hetstep.algorithms"]
focal_tuning = "my_focal_package:Focal"
[project.entry-points."hetstep.environments"]
{kind} = "my_focal_package:Short"
[project.entry-points."hetstep.families"]
llama_like = "pipeline.models.llama"
[tool.setuptools]
py-modules = ["my_focal_package"]
"""
ENVIRONMENT = """
from pipeline.environments.environment import BuiltinEnvironment, Outcome
@dataclass
class ShortArguments:
    most: int = 10
class Short(BuiltinEnvironment):
    Arguments = ShortArguments
    def __init__(self, arguments, context): self.most = arguments.most
    def step(self, prompt, text): return Outcome(float(len(text) <= self.most))
"""


def install(folder: Path, kind: str) -> None:
    """Install a package into the folder `site`, and let this process search it."""
    (folder / "package").mkdir()
    (folder / "package/pyproject.toml").write_text(PACKAGE.format(kind=kind))
    (folder / "package/my_focal_package.py").write_text(FOCAL + ENVIRONMENT)
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--target", str(folder / "site"))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(folder / "package")], check=True, capture_output=True)
    sys.path.append(str(folder / "site"))
    entry_points.find.cache_clear()


def test_an_installed_package_adds_its_parts(folder):
    install(folder, "brevity")
    assert "focal_tuning: my_focal_package.Focal of my-focal 0.3" in reference.explained("algorithm")
    assert "brevity: my_focal_package.Short of my-focal 0.3" in reference.explained("env.NAME.kind")
    assert "my_focal_package" not in sys.modules  # only names are read
    loaded = config.inspect("tiny_sft", ["algorithm=focal_tuning", "focal_tuning.gamma=3"])
    assert loaded.problems == [] and build(loaded.recipe).section.gamma == 3.0
    with refused(("env.addition.kwargs.mst", "unknown-key")):
        config.load("tiny_grpo", ["needs=[]", "env.addition={_override_: true, kind: brevity, kwargs: {mst: 3}}"])
    assert "llama_like" in FAMILIES and FAMILIES["llama_like"] is FAMILIES["llama"]


def test_a_package_with_a_name_of_ours_is_refused(folder):
    install(folder, "math")
    with pytest.raises(config.RecipeError) as error:
        config.load("tiny_grpo", ["env.addition.kind=none_of_ours", "needs=[]"])
    assert "the package my-focal names 'math', which is one of Hetstep's" in str(error.value)
    recipe = config.load("tiny_grpo", ["needs=[]"])  # whose kind is ours: a submission says it too
    assert named(user_imports.problems(recipe, "local", [], {})) == {("hetstep.environments", "already-exists")}
