"""Loading a recipe: merging, interpolation, the origin of each value, and all problems at once."""

import textwrap

import pytest
from omegaconf import OmegaConf

from pipeline import config
from pipeline.config import config_tree, interpolation, yaml_text
from tests.problems import named, refused

BASE = """\
algorithm: grpo
policy:
  model_name: x
  optimizer:
    kwargs: {lr: 1e-6, eps: 1e-8}
env:
  e: {kind: math}
data:
  train: {env_name: e}
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def to(name, text):
        (tmp_path / name).write_text(textwrap.dedent(text))
        return name

    return to


# ---- layers ---------------------------------------------------------------------------------------------------------------


SCALARS = """1e-8 1e10 1.5e3 5.0e-6 1_000 1_000.5 .5 1. 0x1F 017 2020-01-01 1:30 yes On null ~ .inf -.inf nan None '1' 1e 1e+5
+1 1E5 -1e-3 _1 0b11 [1,2e3] {a:1} {a,b} [] ''"""


@pytest.mark.parametrize("text", SCALARS.split())
def test_scalars_are_parsed_like_omegaconf(text):
    expected = OmegaConf.create({"x": OmegaConf.create(f"x: {text}")}).x.x
    got = yaml_text.parse_value(text)
    assert got == expected and type(got) is type(OmegaConf.to_container(expected) if isinstance(got, dict | list) else expected)


@pytest.mark.parametrize(
    ("below", "above", "merged"),
    [
        ("a: {x: 1, y: 2}", "a: {y: 3}", {"a": {"x": 1, "y": 3}}),
        ("a: {x: 1, y: 2}", "a: {_override_: true, y: 3}", {"a": {"y": 3}}),
        ("a: {x: 1, y: 2}", "a: {_override_: false, y: 3}", {"a": {"x": 1, "y": 3}}),
        ("a: {x: 1}", "a: null", {"a": None}),
        ("a: null", "a: {x: 1}", {"a": {"x": 1}}),
        ("a: {x: 1}", "a: 5", {"a": 5}),
        ("a: [1, 2, 3]", "a: [4]", {"a": [4]}),
        ("a: [{x: 1}]", "a: [{y: 1}]", {"a": [{"y": 1}]}),
        ("a: 1", "a: ???", {"a": 1}),
        ("a: {x: 1}", "a: {}", {"a": {"x": 1}}),
        ("a: &k {x: 1}\nb: {<<: *k, y: 2}", "b: {x: 3}", {"a": {"x": 1}, "b": {"x": 3, "y": 2}}),
    ],
)
def test_later_layers_replace_values_and_merge_mappings(write, below, above, merged):
    write("below.yaml", below)
    tree = config_tree.load_with_parents(config.find(write("above.yaml", f"defaults: below.yaml\n{above}")))
    assert tree.plain() == merged


def test_the_last_of_several_parents_wins_and_each_may_have_its_own(write, tmp_path):
    (tmp_path / "deep").mkdir()
    write("deep/grandparent.yaml", "a: 1\nb: 1\nc: 1")
    write("deep/mother.yaml", "defaults: grandparent.yaml\nb: 2")
    write("father.yaml", "c: 3\nd: 3")
    tree = config_tree.load_with_parents(config.find(write("child.yaml", "defaults: [deep/mother.yaml, father.yaml]\nd: 4")))
    assert tree.plain() == {"a": 1, "b": 2, "c": 3, "d": 4}
    assert {key: leaf.origin for key, leaf in tree.leaves()} == {
        "a": "deep/grandparent.yaml:1",
        "b": "deep/mother.yaml:2",
        "c": "father.yaml:1",
        "d": "child.yaml:2",
    }


def test_the_schemas_mappings_are_merged_unless_they_are_replaced(write):
    kwargs = {"lr": 1e-6, "eps": 1e-8, "weight_decay": 0.01}
    path = write("a.yaml", BASE)
    assert config.load(path).policy.optimizer.kwargs == kwargs
    path = write("b.yaml", "defaults: a.yaml\npolicy: {optimizer: {kwargs: {_override_: true, lr: 1}}}")
    assert config.load(path).policy.optimizer.kwargs == {"lr": 1}
    given = ["policy.optimizer.kwargs={_override_: true, lr: 1}", "env={_override_: true, f: {kind: math}}"]
    recipe = config.load(write("a.yaml", BASE), [*given, "env.f.timeout_s=5", "data.train.env_name=f"])
    assert recipe.policy.optimizer.kwargs == {"lr": 1} and list(recipe.env) == ["f"] and recipe.env["f"].timeout_s == 5
    path = write("c.yaml", "defaults: a.yaml\npolicy: {megatron_cfg: {optimizer: {lr: 1e-3}}}")
    assert config.load(path).policy.megatron_cfg.optimizer.lr == 1e-3
    path = write("d.yaml", "defaults: c.yaml\npolicy: {megatron_cfg: {optimizer: null}}")
    assert config.load(path).policy.megatron_cfg.optimizer is None


@pytest.mark.parametrize(
    ("text", "key", "code", "origin"),
    [
        ("a: 1\na: 2", "a", "given-twice", ":1"),
        ("1.5: x", "1.5", "wrong-type", ":1"),
        ("algorithm: grpo\ntrue: x", "true", "wrong-type", ":2"),
        ("a: &a {b: *a}", "", "circular", ":1"),
        ("a: !!set {x}", "", "wrong-type", ":1"),
        ("a: !!python/object:os.system x", "", "bad-format", ""),
        ("a: !!binary aGk=", "", "wrong-type", ":1"),
        ("defaults: {a: b}", "defaults", "wrong-type", ":1"),
        ("x: 1\ndefaults: [b.yaml]", "defaults", "file-not-found", ":2"),
        ("defaults: a.yaml", "defaults", "circular", ""),
        ("a: [", "", "bad-format", ""),
        ("- a", "", "wrong-type", ""),
    ],
)
def test_an_unreadable_file_is_reported_with_its_line(write, text, key, code, origin):
    with refused((key, code)) as error:
        config.inspect(write("a.yaml", text))
    (problem,) = error.value.problems
    assert problem.origin == f"a.yaml{origin}" and "\n" not in problem.message


def test_the_position_of_a_yaml_error_is_reported(write):
    with refused(("", "bad-format")) as error:
        config.inspect(write("a.yaml", "algorithm: grpo\ngrpo:\n  seed: 1\n max_num_steps: 2\n"))
    (problem,) = error.value.problems
    assert problem.message.endswith("did not find expected key at line 4, column 2") and "unicode" not in problem.message


# ---- interpolations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seed"),
    [
        ("${add:1,2}", 3),
        ("${mul:${.max_num_steps},3}", 30),
        ("${div:${grpo.max_num_steps},5}", 2),
        ("${max:3,${grpo.max_num_steps}}", 10),
        ("${add:${mul:2,3},${max:1,4}}", 10),
        ("${oc.env:HETSTEP_TEST_SEED}", 17),
        ("${oc.env:HETSTEP_NO_SUCH_VARIABLE,5}", 5),
        ("${oc.select:grpo.max_num_steps}", 10),
        ("${grpo.${name}}", 10),
    ],
)
def test_resolvers(write, monkeypatch, value, seed):
    monkeypatch.setenv("HETSTEP_TEST_SEED", "17")
    path = write("a.yaml", BASE + f'grpo: {{max_num_steps: 10, seed: "{value}"}}\nname: max_num_steps\n')
    assert config.load(path).grpo.seed == seed


def test_division_gives_a_float_if_it_is_not_whole():
    tree = config_tree.from_plain({"a": "${div:1,4}", "b": "${div:4,2}"}, None)
    assert interpolation.resolve(tree) == {}
    assert tree.plain() == {"a": 0.25, "b": 2.0}


def test_a_whole_section_may_be_referenced(write):
    path = write(
        "a.yaml", BASE + "value: {optimizer: '${policy.optimizer}'}\nteacher: {hf_config_overrides: '${env.e.kwargs}'}\n"
    )
    recipe = config.load(path)
    assert recipe.value.optimizer == recipe.policy.optimizer
    assert recipe.teacher.hf_config_overrides == {}


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("${nowhere.at_all}", "unknown-reference", "nowhere.at_all"),
        ("${oc.env:HETSTEP_NO_SUCH_VARIABLE}", "missing-value", "HETSTEP_NO_SUCH_VARIABLE"),
        ("${.seed}", "circular", ".seed"),
        ("${div:1,0}", "bad-interpolation", "div:1,0"),
        ("${add:1,x}", "bad-interpolation", "add:1,x"),
        ("${sub:1,2}", "bad-interpolation", "add, div, if, max, mul"),
        ("${add:1", "bad-interpolation", "add:1"),
        ("${name}", "wrong-type", "got 'a'"),
        ("${mul:-1,3}", "too-small", "It comes from ${mul:-1,3}"),
    ],
)
def test_an_interpolation_without_a_value_is_reported_with_its_line(write, text, code, names):
    loaded = config.inspect(write("a.yaml", BASE + f"grpo:\n  seed: '{text}'\n"))
    (problem,) = loaded.problems
    assert (problem.origin, problem.key, problem.code) == ("a.yaml:11", "grpo.seed", code)
    assert names in problem.message
    assert loaded.recipe.grpo.seed == 42 and loaded.faulty == {"grpo.seed"}


def test_consequences_of_a_faulty_value_are_not_reported(write):
    text = BASE + "a: 1\ngrpo: {seed: '${.max_num_steps}', max_num_steps: '${.val_period}', val_period: many}\n"
    loaded = config.inspect(write("a.yaml", text), ["policy.max_total_sequence_length=long", "policy.precision=fp4"])
    assert [(problem.origin, problem.key, problem.code) for problem in loaded.problems] == [
        ("a.yaml:10", "a", "unknown-key"),
        ("a.yaml:11", "grpo.val_period", "wrong-type"),
        ("the command line", "policy.max_total_sequence_length", "wrong-type"),
        ("the command line", "policy.precision", "not-a-choice"),
    ]


# ---- types and keys ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("grpo.seed=1e3", 1000),
        ("grpo.seed='7'", 7),
        ("grpo.batch_multiplier=1", 1.0),
        ("grpo.val_at_start='true'", True),
        ("grpo.val_at_start=off", False),
        ("policy.tokenizer.name=5", "5"),
        ("cluster.train.srun_args=[1,b]", ["1", "b"]),
        ("policy.generation.stop_token_ids=[1]", [1]),
        ("cluster.train.env_vars={A: 1}", {"A": "1"}),
        ("policy.scheduler={name: x}", {"name": "x"}),
    ],
)
def test_values_are_converted_to_their_type(write, override, value):
    recipe = config.inspect(write("a.yaml", BASE), [override]).recipe
    for name in override.partition("=")[0].split("."):
        recipe = getattr(recipe, name)
    assert recipe == value and type(recipe) is type(value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("grpo.seed=1.5", "a whole number"),
        ("grpo.seed=true", "a number"),
        ("grpo.seed=null", "a whole number"),
        ("grpo.seed=one", "a whole number"),
        ("grpo.seed={a: 1}", "a whole number"),
        ("grpo.batch_multiplier=.nan", "a finite number"),
        ("grpo.batch_multiplier=true", "a number"),
        ("grpo.val_at_start=1", "true or false"),
        ("policy.tokenizer.name=yes", "a string, in quotes if 'true' is meant"),
        ("policy.tokenizer=5", "a mapping of keys"),
        ("policy.tokenizer=null", "a mapping of keys"),
        ("cluster.train.srun_args=x", "a list"),
        ("cluster.train.srun_args=[[x]]", "a string for each item"),
        ("policy.generation.top_k=x", "a whole number"),
        ("env.e=null", "a mapping of keys"),
    ],
)
def test_values_of_another_type(write, override, expected):
    (problem,) = config.inspect(write("a.yaml", BASE), [override]).problems
    assert (problem.key, problem.code) == (override.partition("=")[0], "wrong-type")
    assert problem.message.endswith(f"; expected {expected}")


@pytest.mark.parametrize(
    ("override", "code", "expected"),
    [
        ("grpo.max_num_steps=-1", "too-small", "got -1; expected at least 0"),
        ("policy.generation.temperature=0", "too-small", "got 0; expected above 0"),
        ("policy.generation.top_p=1.5", "too-large", "got 1.5; expected at most 1"),
        ("loss_fn.reference_policy_kl_type=k4", "not-a-choice", "got 'k4'; expected one of: k1, k2, k3"),
        ("policy.dtensor_cfg.flash_attention='4'", "too-large", "got '4'; expected at most 3"),
    ],
)
def test_values_out_of_range(write, override, code, expected):
    (problem,) = config.inspect(write("a.yaml", BASE), [override]).problems
    assert (problem.key, problem.code, problem.message) == (override.partition("=")[0], code, expected)


@pytest.mark.parametrize("override", ["env.f={}", "algorithm=???", "policy.model_name=???"])
def test_keys_without_a_value(write, override):
    loaded = config.inspect(write("a.yaml", BASE.replace("algorithm: grpo\n", "").replace("  model_name: x\n", "")), [override])
    assert named(loaded.problems) >= {("algorithm", "missing-value"), ("policy.model_name", "missing-value")}
    assert (("env.f.kind", "missing-value") in named(loaded.problems)) == ("env.f" in override)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("grpo.max_num_step", "did you mean 'grpo.max_num_steps'"),
        ("GRPO.seed", "did you mean 'grpo'"),
        ("train_global_batch_size", "did you mean 'policy.train_global_batch_size'"),  # moved
        ("policy.gpu_memory_utilization", "did you mean 'policy.generation.vllm_cfg.gpu_memory_utilization'"),
        ("policy.generation.refit_digset", "there are: "),
        ("env.e.timeout", "did you mean 'env.e.timeout_s'"),
        ("policy.megatron_cfg.optimizer.lr_decay_style", "did you mean 'policy.megatron_cfg.scheduler.lr_decay_style'"),
    ],
)
def test_an_unknown_key_suggests_a_similar_one(write, key, meant):
    (problem,) = config.inspect(write("a.yaml", BASE), [f"{key}=1"]).problems
    assert (problem.key, problem.code) == (key.removesuffix(".seed") if "GRPO" in key else key, "unknown-key")
    assert problem.origin == "the command line" and meant in problem.message


# ---- origins ----------------------------------------------------------------------------------------------------------------


def test_every_given_value_has_its_line(write):
    write("base.yaml", BASE)
    path = write(
        "child.yaml", "defaults: base.yaml\npolicy:\n  optimizer:\n    kwargs:\n      lr: 1e-5\n\n  max_grad_norm: null\n"
    )
    loaded = config.inspect(path, ["grpo.seed=5", "policy.hf_config_overrides={a: 1}"])
    assert loaded.origins == {
        "algorithm": "base.yaml:1",
        "policy.model_name": "base.yaml:3",
        "policy.optimizer.kwargs.lr": "child.yaml:5",
        "policy.optimizer.kwargs.eps": "base.yaml:5",
        "policy.max_grad_norm": "child.yaml:7",
        "policy.hf_config_overrides.a": "the command line",
        "env.e.kind": "base.yaml:7",
        "data.train.env_name": "base.yaml:9",
        "grpo.seed": "the command line",
    }


def test_show_prints_the_recipe_as_yaml_with_each_values_origin(write):
    path = write("a.yaml", BASE + 'grpo:\n  seed: 7\n  max_num_steps: "${.seed}"\n')
    loaded = config.inspect(path, ['policy.tokenizer.chat_template="a\\nb # ${name}"', "cluster.train.srun_args=[--x, 'a: b']"])
    text = config.format_with_origins(loaded)
    assert config.read(config.find(write("again.yaml", text))) == loaded.recipe
    behind = {}
    for line in text.splitlines():
        value, _, origin = line.rpartition("  # ")
        behind.setdefault(value.strip(), origin)
    assert behind["seed: 7"] == "a.yaml:11" and behind["max_num_steps: 7"] == "a.yaml:12"
    assert behind["lr: 1.0e-06"] == behind["eps: 1.0e-08"] == "a.yaml:5"
    assert behind["weight_decay: 0.01"] == behind["name: a"] == "default"
    assert behind["srun_args: [--x, 'a: b']"] == "the command line"
    assert behind['chat_template: "a\\nb # a"'] == "the command line"


def test_a_reference_to_a_section_of_another_kind_is_refused_key_by_key(write):
    loaded = config.inspect(write("a.yaml", BASE + "teacher: '${value}'\nsft: '${policy.optimizer}'\n"))
    unknown = {f"teacher.{name}" for name in ("max_grad_norm", "optimizer", "scheduler")}
    assert named(loaded.problems) == {(key, "unknown-key") for key in (*unknown, "sft.name", "sft.kwargs")}
    assert {problem.origin for problem in loaded.problems if problem.key == "sft.kwargs"} == {"a.yaml:5"}
    assert config.inspect(write("b.yaml", BASE + "grpo: '${grpo}'\nvalue: {optimizer: '${value}'}\n")).problems


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"policy.megatron_cfg.optimizer.lr": 0.5}, {"policy.megatron_cfg.optimizer.lr": 0.5}),
        ({"logger.wandb.project": "${name}"}, {"logger.wandb.project": "tiny_sft"}),
        ({"sft.seed": "${mul:${sft.max_num_steps},2}"}, {"sft.seed": 700}),
    ],
    ids=["a section that was null", "another key", "a number"],
)
def test_a_changed_recipe_is_the_one_that_the_command_line_makes(changes, expected):
    changed = config.changed(config.load("tiny_sft"), changes)
    assert changed == config.load("tiny_sft", [f"{key}={value}" for key, value in changes.items()])
    assert changed == config.load("tiny_sft", [f"{key}={value}" for key, value in expected.items()])


def test_a_change_below_a_scalar_is_refused():
    with refused(("policy.precision", "not-a-choice")):
        config.changed(config.load("tiny_sft"), {"policy.precision.x": 1})


def test_a_key_may_be_removed_with_the_mapping_around_it():
    tree = config_tree.from_plain({"a": {"b": {"c": 1}, "d": 2}}, None)
    for key in ("a.b", "a.b.c", "a.b", "x.y"):
        tree.drop(key)
    assert tree.plain() == {"a": {"d": 2}}


def test_a_removed_default_stays_removed_in_the_run(tmp_path):
    parent = config.find("tiny_sft").resolve()
    (tmp_path / "a.yaml").write_text(
        f"defaults: {parent}\npolicy: {{optimizer: {{name: torch.optim.SGD, kwargs: {{_override_: true, lr: 0.1}}}}}}"
    )
    recipe = config.load(str(tmp_path / "a.yaml"))
    assert recipe.policy.optimizer.kwargs == {"lr": 0.1}
    config.write(recipe, tmp_path / "written.yaml")
    assert config.read(tmp_path / "written.yaml") == recipe


@pytest.mark.parametrize("name", ["rev_grpo.yml", "./rev_grp", "rev_grpo.yml.yaml"])
def test_a_path_without_a_file_names_the_nearest_file_beside_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rev_grpo.yaml").write_text("")
    with refused(("recipe", "file-not-found")) as error:
        config.find(name)
    assert str(error.value) == f"recipe: there is no file {tmp_path / name}; did you mean rev_grpo.yaml?"


def test_a_path_with_no_similar_file_beside_it(tmp_path):
    for name in ("rev_grpo.yml", "no/folder/tiny_grpo", "a\0b.yaml", "a" * 5000 + "/b.yaml"):
        with refused(("recipe", "file-not-found")) as error:
            config.find(str(tmp_path / name))
        assert "there is no file " in str(error.value) and "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["reward.py", "rows.jsonl"])
def test_a_file_of_another_kind_is_no_recipe(tmp_path, name):
    (tmp_path / name).write_text('{"input": 1}')
    with refused(("recipe", "bad-format")) as error:
        config.load(str(tmp_path / name))
    assert f"got '{tmp_path / name}'; expected a .yaml recipe" in str(error.value)


@pytest.mark.parametrize("text", ["grpo:\n\tseed: 3\n", "grpo:\n  seed: 3\n\tval_period: 1\n", "name: @a\n"])
def test_a_tab_or_a_mark_that_yaml_cannot_read_is_explained(write, text):
    with pytest.raises(config.RecipeError, match="YAML indents with spaces, not tabs; a value that starts with @"):
        config.load(write("a.yaml", text))
