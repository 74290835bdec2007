"""Batch scripts with shell syntax in texts, by `tests/launch/executors/shell_fuzz.py`; and texts refused by key."""

import dataclasses
from pathlib import Path

import pytest

from launch import submit
from pipeline import config
from tests.launch.executors import shell_fuzz
from tests.launch.model import write_recipe
from tests.problems import named


def check(count: int, seed: int) -> None:
    outcomes = list(shell_fuzz.fuzz(count, seed))
    assert not [(each.seed, each.wrong) for each in outcomes if each.wrong]
    assert 0 < sum(bool(each.refused) for each in outcomes) < count / 2


def test_a_few_recipes():
    check(8, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands_of_recipes():
    check(3000, seed=1)


def wrong(tmp_path: Path, in_job: bool, **of_train) -> str:
    """Return what the script does wrong for train ranks with these keys, without the recipe's checks."""
    with shell_fuzz.surroundings() as (work, bin, out):
        recipe = config.load(str(write_recipe(tmp_path)), [f"run_dir={work}/run", f"cluster.generate.python={work}/python"])
        recipe.cluster.train = dataclasses.replace(recipe.cluster.train, python=f"{work}/python", **of_train)
        return "".join(shell_fuzz.run_script(recipe, in_job, work, bin, out))


@pytest.mark.parametrize("in_job", [True, False], ids=["job", "allocation"])
@pytest.mark.parametrize(
    "keys",
    [
        {"env_vars": {"RANDOM": "a[$(pwned)]", "OPTIND": "a[$(pwned)]"}},
        {"env_vars": {"SLURM_PROCID": "a[$(pwned)]", "SLURM_CPUS_ON_NODE": "a[$(pwned)]"}, "gpus_per_node": 1},
        {"env_vars": {"A; pwned; B": "1"}},
        {"account": "a Restarts=a[$(pwned)]"},
    ],
    ids=["RANDOM", "SLURM_PROCID", "a name", "Restarts"],
)
def test_no_text_is_evaluated(tmp_path, keys, in_job):
    assert not wrong(tmp_path, in_job, **keys)


def test_the_fuzzer_finds_a_line_that_should_be_refused(tmp_path):
    found = wrong(tmp_path, True, partition="a\npwned\n")
    assert "/bin/pwned" in found and "lines that are not sbatch's" in found


OPTIONS, VARIABLES = "cluster.train.sbatch_options", "cluster.train.env_vars"


@pytest.mark.parametrize(
    ("argument", "key", "code", "says"),
    [
        ('cluster.train.partition="a\\nid"', "cluster.train.partition", "bad-format", r"got 'a\nid'"),
        ('cluster.generate.srun_args=["--a\\r"]', "cluster.generate.srun_args", "bad-format", r"got '--a\r'"),
        (f'{VARIABLES}={{A: "\\x1b[31m"}}', f"{VARIABLES}.A", "bad-format", "got control characters in the value"),
        ('run_dir="runs/a\\nb"', "run_dir", "bad-format", "a string without control characters"),
        ("run_dir=runs/%j", "run_dir", "bad-format", "without % and \\"),
        ('name="a\\nb"', "name", "bad-format", r"got 'a\nb'"),
        ('policy.model_name="a\\nb"', "policy.model_name", "bad-format", ""),
        ('cluster.train.account="a Restarts=b"', "cluster.train.account", "bad-format", "a name without blanks"),
        (f"{VARIABLES}={{'A; touch b': 1}}", f"{VARIABLES}.A; touch b", "bad-format", "got the name 'A; touch b'"),
        ("cluster.reward.env_vars={1A: 1}", "cluster.reward.env_vars.1A", "bad-format", "got the name '1A'"),
        ("cluster.generate.env_vars={'': 1}", "cluster.generate.env_vars.", "bad-format", "got the name ''"),
        ("cluster.sbatch_options={'A b': x}", "cluster.sbatch_options.A b", "unsupported", "a long option of sbatch"),
        ("cluster.sbatch_options={w: n1}", "cluster.sbatch_options.w", "unsupported", "a long option of sbatch"),
        ('cluster.sbatch_options={comment: "a\\nb"}', "cluster.sbatch_options.comment", "bad-format", r"got 'a\nb'"),
        ("cluster.sbatch_options={partition: a}", "cluster.sbatch_options.partition", "unsupported", "which partition of"),
        (f"{OPTIONS}={{mem: 0}}", f"{OPTIONS}.mem", "unsupported", "which mem of"),
        (f"{OPTIONS}={{tasks-per-node: 2}}", f"{OPTIONS}.tasks-per-node", "unsupported", "which ranks_per_node of"),
        (f"{OPTIONS}={{depend: x}}", f"{OPTIONS}.depend", "unsupported", "which needs sets"),
        (f"{OPTIONS}={{array: 1-2}}", f"{OPTIONS}.array", "unsupported", "Slurm has no arrays of"),
        (f"{VARIABLES}={{HETSTEP_RANK: 3}}", f"{VARIABLES}.HETSTEP_RANK", "bad-format", "which the launcher sets"),
    ],
)
def test_unsafe_texts_are_refused(tmp_path, capsys, monkeypatch, argument, key, code, says):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert submit.main([f"recipe={recipe}", argument]) == 2
    told = capsys.readouterr().err
    assert f"{key}: got " in told and f"[{code}]" in told and says in told and "\x1b" not in told
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (
            "cluster.sbatch_options={w: n1, 'A b': x, a.b: y, partition: z, time: '3', reservation: r}",
            {("w", "unsupported"), ("A b", "unsupported"), ("a.b", "unsupported")}
            | {("partition", "unsupported"), ("time", "unsupported")},
        ),
        (
            "cluster.train.env_vars={'A B': 1, 1A: 2, HETSTEP_RANK: 3, OK: 4}",
            {("A B", "bad-format"), ("1A", "bad-format"), ("HETSTEP_RANK", "bad-format")},
        ),
    ],
)
def test_each_wrong_name_is_reported(tmp_path, given, wrong):
    key = given.partition("=")[0]
    assert named(config.inspect(str(write_recipe(tmp_path)), [given]).problems) == {
        (f"{key}.{name}", code) for name, code in wrong
    }


def test_a_component_without_nodes_has_no_options_of_sbatch(tmp_path):
    given = ["cluster.share_nodes=true", "cluster.generate.sbatch_options={nodelist: n1}"]
    (problem,) = config.inspect(str(write_recipe(tmp_path)), given).problems
    assert (problem.key, problem.code) == ("cluster.generate.sbatch_options", "has-no-effect")


@pytest.mark.parametrize("given", ["[A, B]", "{A: 1, B: [2]}", "{1 a: x}"])
def test_env_vars_in_a_users_kwargs_are_not_checked(tmp_path, given):
    own = ["env.math.kind=mine.Mine", f"env.math.kwargs.env_vars={given}"]
    assert config.inspect(str(write_recipe(tmp_path)), own).problems == []


def test_texts_that_hold_newlines_elsewhere_are_not_refused(tmp_path):
    given = ['policy.tokenizer.chat_template="a\\nb"', "cluster.train.env_vars={A_1: x}"]
    assert config.inspect(str(write_recipe(tmp_path)), given).problems == []
