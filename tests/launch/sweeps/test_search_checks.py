"""A search with wrong keys, ranges, corners or budget, or without Optuna, is refused before it starts."""

import math
import re

import pytest

from launch.api.sweeps import SweepRun
from launch.submission.prepare import examine
from launch.sweeps import search_space, submission, suite
from launch.sweeps.expressions import Curve
from launch.sweeps.search_loop import values_by_step
from launch.sweeps.search_space import ParameterConfig, SearchConfig
from launch.sweeps.sweep_folder import SweepFolder, SweepJob, SweepPlan
from pipeline.config import Problem, RecipeError
from tests.launch.sweeps.suites import KL, LR, write_search


def problems_of(path) -> dict[str, str]:
    with pytest.raises(RecipeError) as refused:
        suite.load(str(path))
    return {each.key: each.code for each in refused.value.problems}


RANGE = {"low": 1e-5, "high": 1e-2, "log": True}
TPE = {"sampler": "tpe", "trials": 3}
WRONG = [
    ({"parameters": {}}, "search.parameters", "missing-value"),
    ({"parameters": {LR: []}}, f"search.parameters.{LR}.choices", "missing-value"),
    ({"parameters": {LR: [1, 1]}}, f"search.parameters.{LR}.choices", "given-twice"),
    ({"parameters": {LR: [[1]]}}, f"search.parameters.{LR}.choices", "wrong-type"),
    ({"parameters": {LR: {"choices": [1], "low": 0}}}, f"search.parameters.{LR}.low", "contradiction"),
    ({"parameters": {LR: {"low": 1}}}, f"search.parameters.{LR}.high", "missing-value"),
    ({"parameters": {LR: {"low": 2, "high": 1}}}, f"search.parameters.{LR}.low", "contradiction"),
    ({"parameters": {LR: {"low": 0, "high": 1, "log": True}}}, f"search.parameters.{LR}.low", "too-small"),
    ({"parameters": {LR: {**RANGE, "step": 1e-3}}}, f"search.parameters.{LR}.step", "contradiction"),
    ({"parameters": {LR: {"low": 1, "high": 2, "step": 3}}}, f"search.parameters.{LR}.step", "too-large"),
    ({"parameters": {LR: {"lo": 1, "low": 1, "high": 2, "step": 1}}}, f"search.parameters.{LR}.lo", "unknown-key"),
    ({"parameters": {LR: RANGE}}, f"search.parameters.{LR}.step", "missing-value"),  # grid
    ({"parameters": {"run_dir": ["a"]}}, "search.parameters.run_dir", "contradiction"),
    ({"parameters": {"grpo.seed": {"low": 0.5, "high": 2, "step": 1}}}, "search.parameters.grpo.seed.low", "wrong-type"),
    ({"overrides": {LR: 1}}, f"search.overrides.{LR}", "has-no-effect"),
    ({"trials": 3}, "search.trials", "contradiction"),
    ({"sampler": "tpe"}, "search.trials", "missing-value"),
    (
        {"sampler": "cmaes", "trials": 3, "parameters": {LR: [1], KL: {"low": 0, "high": 1}}},
        f"search.parameters.{LR}",
        "unsupported",
    ),
    ({"sampler": "cmaes", "trials": 3, "parameters": {LR: RANGE}}, "search.sampler", "unsupported"),
    ({"metric": "last("}, "search.metric", "bad-format"),
    ({"metric": "3 + 4"}, "search.metric", "bad-format"),
    ({"direction": "up"}, "search.direction", "not-a-choice"),
    ({"min_steps": 3}, "search.min_steps", "has-no-effect"),
    ({"reduction_factor": 1}, "search.reduction_factor", "too-small"),
    ({"top": {"seeds": [7]}}, "seeds", "contradiction"),
]


@pytest.mark.parametrize(("changes", "key", "code"), WRONG, ids=lambda each: each if isinstance(each, str) else "")
def test_a_wrong_key_is_refused(tmp_path, changes, key, code):
    assert problems_of(write_search(tmp_path, **changes)) == {key: code}


def test_a_search_is_read_as_it_was_written(tmp_path):
    loaded = suite.load(str(write_search(tmp_path, **TPE, parameters={LR: RANGE, KL: [0, 0.1]})), ["search.trials=5"])
    search = loaded.suite.search
    assert search is not None and search.trials == 5
    assert search.parameters == {LR: ParameterConfig(1e-5, 1e-2, True), KL: ParameterConfig(choices=[0, 0.1])}
    (tmp_path / "written.yaml").write_text(suite.to_yaml(loaded.suite))
    assert suite.read(tmp_path / "written.yaml") == loaded.suite


# ---- the space ----------------------------------------------------------------------------------------------------------


def test_whole_numbers_are_those_of_the_schema():
    assert search_space.points("grpo.num_prompts_per_step", ParameterConfig(2, 8, step=3)) == [2, 5, 8]
    assert [type(each) for each in search_space.points("grpo.num_prompts_per_step", ParameterConfig(2, 8), ends=True)] == [
        int,
        int,
    ]
    assert [type(each) for each in search_space.points(KL, ParameterConfig(0, 1), ends=True)] == [float, float]
    assert not search_space.is_whole(LR, ParameterConfig(0, 1)) and search_space.is_whole(LR, ParameterConfig(0, 4, step=2))


@pytest.mark.parametrize(("low", "high", "step", "points"), [(0, 0.3, 0.1, [0, 0.1, 0.2, 0.3]), (0.1, 0.3, 0.2, [0.1, 0.3])])
def test_a_grid_has_both_ends_as_they_are_written(tmp_path, low, high, step, points):
    """In binary 3 * 0.1 is above 0.3, 0.3 / 0.1 below 3, and 0.3 - 0.1 below 0.2."""
    path = write_search(tmp_path, parameters={KL: {"low": low, "high": high, "step": step}}, trials=len(points))
    search = suite.load(str(path)).suite.search
    assert search is not None and search_space.points(KL, search.parameters[KL]) == points


def test_a_large_space_is_checked_at_each_end_of_each_parameter():
    names = ("ratio_clip_min", "ratio_clip_max", "entropy_coeff", "reference_policy_kl_penalty", "kl_input_clamp_value")
    few = SearchConfig(parameters={f"loss_fn.{name}": ParameterConfig(0, 1) for name in names})
    assert len(search_space.corners(few)) == 32
    many = SearchConfig(parameters={**few.parameters, "grpo.seed": ParameterConfig(choices=[1, 2, 3])})
    corners = search_space.corners(many)
    assert len(corners) == 2 + 5 + 2
    for key, parameter in many.parameters.items():
        assert {corner[key] for corner in corners} == set(search_space.points(key, parameter, ends=True))


# ---- the corners --------------------------------------------------------------------------------------------------------


PROMPTS = "grpo.num_prompts_per_step"
MISSPELT = "loss_fn.reference_policy_kl_penalti"
AT = "search.parameters."


@pytest.mark.parametrize(
    ("parameters", "problems"),
    [
        ({KL: {"low": -0.1, "high": 1}, LR: RANGE}, {(AT + KL, "too-small"): "got -0.1; expected at least 0"}),
        (
            {MISSPELT: {"low": 0, "high": 1}, PROMPTS: {"choices": [2, 2.5, "many"]}},
            {(AT + MISSPELT, "unknown-key"): "did you mean", (AT + PROMPTS, "wrong-type"): "got "},
        ),
        (
            {"policy.optimiser.lr": {"choices": [1, 2]}},
            {(f"{AT}policy.optimiser.lr", "unknown-key"): "policy.optimiser is not a key; did you mean 'policy.optimizer'?"},
        ),
        ({PROMPTS: {"choices": [2, 3]}}, {("policy.train_global_batch_size", "not-divisible"): f"with {PROMPTS}=3"}),
    ],
    ids=["range", "misspelt and wrong type", "misspelt section", "batch"],
)
def test_problems_of_the_corners_are_told_once_at_the_parameter_or_with_the_corner(tmp_path, parameters, problems):
    path = write_search(tmp_path, **TPE, parameters=parameters)
    found = [*submission.corner_problems(suite.load(str(path)).suite.search, [])]
    assert [(each.key, each.code) for each in found] == [*problems]
    for each, said in zip(found, problems.values(), strict=True):
        assert said in str(each)


def test_a_recipe_with_problems_of_its_own_is_told_as_such(tmp_path):
    search = suite.load(str(write_search(tmp_path))).suite.search
    found = [*submission.corner_problems(search, ["grpo.max_num_steps=-1"])]
    assert [(each.key, each.origin.split(":")[0]) for each in found] == [("grpo.max_num_steps", "search.recipe")]


# ---- the budget ---------------------------------------------------------------------------------------------------------


def test_a_budget_without_a_price_is_refused(tmp_path):
    search = SearchConfig(trials=8, budget_gpu_hours=1000)
    planned = examine(str(suite.load(str(write_search(tmp_path))).suite.search.recipe), [], dry=True).prepared[-1].plan
    assert submission.price_of(search, [planned]) is None  # it has no GPUs
    assert [each.code for each in submission.budget_problems(search, None)] == ["has-no-effect"]


def test_a_missing_optuna_is_named_with_the_command(monkeypatch):
    versions = {"optuna": "4.1.0", "cmaes": "0.13"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    (found,) = submission.package_problems(SearchConfig())
    assert found.code == "not-installed" and "got 4.1.0" in found.message and "pip install '.[search]'" in found.message
    versions["optuna"] = "5.0.1"
    assert not [*submission.package_problems(SearchConfig(sampler="cmaes"))]


# ---- the metric ---------------------------------------------------------------------------------------------------------


def metric(text: str):
    return SearchConfig(metric=text).expression


def test_the_metric_is_evaluated_over_the_steps_so_far():
    found = {"val/accuracy": Curve([0, 5, 10], [0.1, 0.4, 0.2]), "train/loss": Curve([1, 2, 3], [3.0, None, 1.0])}
    assert [*values_by_step(metric("val/accuracy"), found)] == [(0, 0.1), (5, 0.4), (10, 0.2)]
    assert [*values_by_step(metric("max(val/accuracy)"), found, after=0)] == [(5, 0.4), (10, 0.4)]
    assert [step for step, _ in values_by_step(metric("mean(val/accuracy, last=2)"), found)] == [5, 10]
    assert [step for step, value in values_by_step(metric("train/loss"), found) if math.isnan(value)] == [2]
    assert [*values_by_step(metric("val/reward"), found)] == []
    with pytest.raises(ValueError):
        metric("last(")


def test_the_suites_of_the_repository_have_a_search_that_fits():
    search = suite.load("tiny_search").suite.search
    assert search is not None and not [*submission.corner_problems(search, [])]
    assert re.fullmatch(r"[\w.]+=\S+( [\w.]+=\S+)*", search_space.as_text(search_space.corners(search)[0]))


def test_the_jobs_of_a_search_have_states_where_optuna_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(submission, "package_problems", lambda search: iter([Problem("search", "not-installed", "got none")]))
    folder = SweepFolder(tmp_path / "sweeps/some/x")
    folder.path.mkdir(parents=True)
    job = SweepJob("trial-0000", "tiny", [], str(folder.path / "runs/trial-0000"), run="trial")
    loaded = suite.load(str(write_search(tmp_path, parameters={LR: [1.0]})))
    folder.begin(loaded.suite, SweepPlan("x", "local", str(tmp_path), "", [], [job]))
    run = SweepRun(folder.path)
    assert run.states() == {"trial-0000": "missing"}
    with pytest.raises(RecipeError, match="got none"):
        run.trials()
