"""What batch scripts do with texts that hold shell syntax, by `tests/launch/shell_fuzz.py`; and what is refused by name."""

import dataclasses
from pathlib import Path

import pytest

from launch import submit
from pipeline import config
from tests.launch import shell_fuzz
from tests.launch.model import write_recipe


def check(count: int, seed: int) -> None:
    outcomes = list(shell_fuzz.fuzz(count, seed))
    assert not [(each.seed, each.wrong) for each in outcomes if each.wrong]
    assert 0 < sum(bool(each.refused) for each in outcomes) < count / 2


def test_some():
    check(16, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_thousands():
    check(3000, seed=1)


def wrong(tmp_path: Path, in_job: bool, **of_train) -> str:
    """What the script does wrong that train ranks with these keys have, whatever checks say of them."""
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


def test_the_fuzzer_sees_a_line_that_should_have_been_refused(tmp_path):
    found = wrong(tmp_path, True, partition="a\npwned\n")
    assert "/bin/pwned" in found and "lines that are not sbatch's" in found


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (
            'cluster.train.partition="a\\nid"',
            r"cluster.train.partition: got 'a\nid'; expected a text without control characters",
        ),
        ('cluster.generate.srun_args=["--a\\r"]', r"cluster.generate.srun_args: got '--a\r'; expected a text without control"),
        (
            'cluster.train.env_vars={A: "\\x1b[31m"}',
            "cluster.train.env_vars: got control characters in the value of A; expected",
        ),
        ('run_dir="runs/a\\nb"', "expected a text without control characters"),
        ("run_dir=runs/%j", "expected no % and no \\, with which Slurm and submitit write"),
        ('name="a\\nb"', r"name: got 'a\nb'; expected a text without control characters"),
        ('policy.model_name="a\\nb"', "policy.model_name: got"),
        ('cluster.train.account="a Restarts=b"', "cluster.train.account: got 'a Restarts=b'; expected a name without blanks"),
        ("cluster.train.env_vars={'A; touch b': 1}", "cluster.train.env_vars: got the name 'A; touch b'; expected letters,"),
        ("policy.megatron_cfg.env_vars={1A: 1}", "policy.megatron_cfg.env_vars: got the name '1A'; expected letters, digits"),
        ("policy.generation.vllm_cfg.env_vars={'': 1}", "policy.generation.vllm_cfg.env_vars: got the name ''; expected"),
        ("cluster.sbatch_options={'A b': x}", "cluster.sbatch_options: got the name 'A b'; expected a long option of sbatch"),
        ("cluster.sbatch_options={w: n1}", "cluster.sbatch_options: got the name 'w'; expected a long option of sbatch"),
        ('cluster.sbatch_options={comment: "a\\nb"}', r"cluster.sbatch_options.comment: got 'a\nb'; expected a text without"),
        (
            "cluster.sbatch_options={partition: a}",
            "cluster.sbatch_options: got partition; set by cluster.train.partition",
        ),
        ("cluster.generate.sbatch_options={mem: 0}", "got mem; set by cluster.generate.mem; try that"),
        ("cluster.train.sbatch_options={tasks-per-node: 2}", "got tasks-per-node; set by cluster.train.ranks_per_node;"),
        ("cluster.train.sbatch_options={depend: x}", "cluster.train.sbatch_options: got depend; set by needs; try that"),
        ("cluster.train.sbatch_options={array: 1-2}", "cluster.train.sbatch_options: got array; Slurm has no arrays of"),
        ("cluster.generate.env_vars={HETSTEP_RANK: 3}", "cluster.generate.env_vars: got HETSTEP_RANK, which the launcher sets"),
    ],
)
def test_what_is_refused_before_anything_starts(tmp_path, capsys, monkeypatch, argument, says):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert submit.main([f"recipe={recipe}", argument]) == 2
    told = capsys.readouterr().err
    assert says in told and told.count(says) == 1 and "\x1b" not in told
    assert sorted(tmp_path.rglob("*")) == before


def test_each_wrong_option_of_sbatch_is_told(tmp_path, capsys):
    given = "cluster.sbatch_options={w: n1, 'A b': x, a.b: y, partition: z, time: '3', reservation: r}"
    assert submit.main([f"recipe={write_recipe(tmp_path)}", given]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: 5 problems") and "reservation:" not in told
    assert all(told.count(f"cluster.sbatch_options: got {name}") == 1 for name in ("partition", "time"))
    assert all(told.count(f"got the name {name!a}") == 1 for name in ("w", "A b", "a.b"))


def test_each_wrong_variable_is_told(tmp_path, capsys):
    given = "cluster.train.env_vars={'A B': 1, 1A: 2, HETSTEP_RANK: 3, OK: 4}"
    assert submit.main([f"recipe={write_recipe(tmp_path)}", given]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: 3 problems") and told.count("cluster.train.env_vars: got ") == 3


def test_a_component_without_nodes_has_no_options_of_sbatch(tmp_path):
    given = ["cluster.share_nodes=true", "cluster.generate.sbatch_options={nodelist: n1}"]
    (problem,) = config.inspect(str(write_recipe(tmp_path)), given).problems
    assert str(problem).startswith("cluster.generate.sbatch_options: its ranks are on cluster.train's nodes")


@pytest.mark.parametrize("given", ["[A, B]", "{A: 1, B: [2]}", "{1 a: x}"])
def test_what_the_kwargs_of_ones_own_code_call_env_vars_is_not_looked_at(tmp_path, given):
    own = ["env.math.kind=mine.Mine", f"env.math.kwargs.env_vars={given}"]
    assert config.inspect(str(write_recipe(tmp_path)), own).problems == []


def test_texts_that_hold_newlines_elsewhere_are_not_refused(tmp_path):
    given = ['policy.tokenizer.chat_template="a\\nb"', "cluster.train.env_vars={A_1: x}"]
    assert config.inspect(str(write_recipe(tmp_path)), given).problems == []
