"""Several data sets as one stream: sampling weights, resumption, and the streams of a recipe."""

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.config import RECIPES, Recipe, load
from pipeline.data.mixture import Mixture, build_streams
from pipeline.data.stream import ExampleStream, PromptStream
from tests.data.test_stream import encoder
from tests.problems import refused

TOKENIZER = AutoTokenizer.from_pretrained(RECIPES / "tiny")
SIZES = {"few": 5, "many": 40, "most": 300}


def mixture(weights: dict[str, float], epochs: int = 1000, seed: int = 5, kind: type = PromptStream) -> Mixture:
    streams = {}
    for name in weights:
        records = [{"input": f"{i}+1=", "output": f"{name[0]}{name[2]}{i}"} for i in range(SIZES[name])]
        options = {"dataset": name, "max_length": 100} if kind is PromptStream else {}
        streams[name] = kind(records, encoder(), seed=seed, max_num_epochs=epochs, **options)
    return Mixture(streams, weights, seed)


def test_each_set_is_sampled_by_its_weight():
    weights = {"few": 1.0, "many": 3.0, "most": 6.0}
    drawn = Counter(prompt.dataset for prompt in mixture(weights).take(3000))
    for name, weight in weights.items():
        share = weight / 10
        assert abs(drawn[name] / 3000 - share) < 3.5 * (share * (1 - share) / 3000) ** 0.5, drawn
    assert [p.dataset for p in mixture(weights, seed=6).take(20)] != [p.dataset for p in mixture(weights).take(20)]


def test_engines_that_are_served_in_turn_get_of_all_data_sets():
    prompts = mixture({"few": 1.0, "many": 1.0}).take(400)
    assert all(60 < Counter(prompt.dataset for prompt in prompts[engine::2])["few"] < 140 for engine in (0, 1))


def test_each_set_has_its_own_epochs_and_indices_are_unique():
    """With weights by number of records an epoch has every record once. With equal weights the small set ends early."""
    once = mixture({name: float(size) for name, size in SIZES.items()}, epochs=1)
    prompts = once.take(10_000)
    assert [prompt.index for prompt in prompts] == list(range(345)) and once.take(1) == []
    assert len({(prompt.dataset, prompt.task["answer"]) for prompt in prompts}) == 345
    order = [prompt.dataset for prompt in mixture({"few": 1.0, "most": 1.0}, epochs=2).take(10_000)]
    assert Counter(order) == {"few": 10, "most": 600} and max(i for i, name in enumerate(order) if name == "few") < 60


def test_remaining_sets_share_the_weight_of_an_ended_one():
    """The weight of an ended set is shared by all others, not given to the next one."""
    names = [prompt.dataset for prompt in mixture({"few": 2.0, "many": 1.0, "most": 1.0}, epochs=3).take(130)]
    after = names[max(i for i, name in enumerate(names) if name == "few") + 1 :]
    assert names.count("few") == 15 and len(after) > 80 and 0.35 < after.count("many") / len(after) < 0.65


@pytest.mark.parametrize("before", [0, 7, 344, *(pytest.param(count, marks=pytest.mark.full) for count in (1, 90))])
def test_resumes_at_the_same_record(before):
    weights = {"few": 1.0, "many": 2.0, "most": 2.0}
    whole = [(p.index, p.dataset, p.task["answer"]) for p in mixture(weights, epochs=1).take(10_000)]
    first = mixture(weights, epochs=1)
    taken = first.take(before)
    second = mixture(weights, epochs=1)
    second.take(11)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    while more := second.take(7):
        taken += more
    assert [(p.index, p.dataset, p.task["answer"]) for p in taken] == whole and len(whole) == 345


def test_a_state_of_other_data_sets_is_refused():
    one, state = mixture({"few": 1.0}), mixture({"few": 1.0, "many": 2.0}).state_dict()
    for other, what in (
        (mixture({"few": 1.0, "many": 3.0}), "got weights"),
        (mixture({"few": 1.0, "most": 2.0}), "got weights"),
        (mixture({"few": 1.0, "many": 2.0}, seed=6), "got seed"),
    ):
        with pytest.raises(ValueError, match=what):
            other.load_state_dict(state)
    stream = one._streams["few"]
    with refused(("data", "run-exists")):
        stream.load_state_dict(state)
    with refused(("data", "run-exists")):
        mixture({"few": 1.0, "many": 2.0}).load_state_dict(stream.state_dict())


def test_examples_are_mixed_too():
    taken = mixture({"few": 1.0, "many": 1.0}, kind=ExampleStream).take(60)
    names = [TOKENIZER.decode(example.tokens[example.loss_mask])[:2] for example in taken]
    assert set(names) == {"fw", "mn"} and all(example.loss_mask.any() for example in taken)


# ---- recipes -----------------------------------------------------------------------------------------------------------------

SEVERAL = """
defaults: tiny_grpo
grpo: {max_val_samples: 6}
data:
  train: null
  validation: null
  datasets:
    short: {dataset_name: scratchpad_addition, env_name: addition, weight: 3, kwargs: {size: 20, digits: 1}}
    long:
      dataset_name: scratchpad_addition
      env_name: carefully
      weight: 1
      split_validation_size: 4
      kwargs: {size: 20, digits: 3}
  validations:
    two: {dataset_name: scratchpad_addition, split: validation, env_name: addition, kwargs: {size: 9, digits: 2}}
    four: {dataset_name: scratchpad_addition, split: validation, env_name: carefully, kwargs: {size: 3, digits: 4}}
env:
  addition: {kind: exact_match, kwargs: {pattern: ';(\\d+)$'}}
  carefully: {kind: exact_match}
"""


def several(folder: Path, *overrides: str) -> Recipe:
    path = folder / "several.yaml"
    path.write_text(SEVERAL.replace("defaults: tiny_grpo", f"defaults: {RECIPES / 'tiny_grpo.yaml'}"))
    return load(path, overrides)


def test_a_recipe_of_several_data_sets(tmp_path):
    stream, validation = build_streams(several(tmp_path), TOKENIZER)
    prompts = stream.take(200)
    assert [prompt.index for prompt in prompts] == list(range(200))
    assert {(prompt.dataset, prompt.environment) for prompt in prompts} == {("short", "addition"), ("long", "carefully")}
    assert 120 < Counter(prompt.dataset for prompt in prompts)["short"] < 180
    assert [(p.dataset, p.environment) for p in validation] == (
        [("long", "carefully")] * 4 + [("two", "addition")] * 6 + [("four", "carefully")] * 3
    )
    assert [prompt.index for prompt in validation] == list(range(13))
    held_out = {prompt.task["text"] for prompt in validation[:4]}
    assert not held_out & {prompt.task["text"] for prompt in prompts if prompt.dataset == "long"}


def test_default_weights_are_the_numbers_of_records(tmp_path):
    sizes = ("data.datasets.short.kwargs.size=60", "data.datasets.short.weight=null", "data.datasets.long.weight=null")
    stream, _ = build_streams(several(tmp_path, *sizes), TOKENIZER)
    assert stream.state_dict()["weights"] == {"short": 60.0, "long": 16.0}


def test_one_to_train_and_one_to_validate_on_have_no_names(tmp_path):
    recipe = load(RECIPES / "tiny_grpo.yaml", ["data.train.kwargs.size=20", "data.validation.kwargs.size=4"])
    stream, validation = build_streams(recipe, TOKENIZER)
    assert {prompt.dataset for prompt in [*stream.take(5), *validation]} == {""} and isinstance(stream, PromptStream)


def test_a_split_that_does_not_exist_is_named_with_its_key(tmp_path):
    (folder := tmp_path / "rows").mkdir()
    (folder / "train.jsonl").write_text('{"input": "1+1=", "output": "2"}\n')
    for key in ("data.datasets.long", "data.validations.four"):
        options = (f"{key}.dataset_name={folder}", f"{key}.split=tset", f"{key}.kwargs={{_override_: true}}")
        with refused((f"{key}.split", "not-a-choice")):
            build_streams(several(tmp_path, *options), TOKENIZER)


def test_prompts_leave_space_for_an_answer():
    """By default a prompt may have the maximum total length, but the engine must have one token to sample."""
    one_digit = ["data.train.kwargs={size: 20, digits: 1}", "data.validation.kwargs={size: 4, digits: 1}"]
    full, roomy = (load(RECIPES / "tiny_grpo.yaml", [*one_digit, f"policy.max_total_sequence_length={n}"]) for n in (5, 6))
    assert full.data.max_input_seq_length == full.policy.generation.vllm_cfg.max_model_len == 5
    with pytest.raises(ValueError, match=r"5 tokens leave no room for an answer in policy.max_total_sequence_length 5"):
        build_streams(full, TOKENIZER)
    _, validation = build_streams(roomy, TOKENIZER)
    assert [len(prompt.tokens) for prompt in validation] == [5] * 4


GSM8K = "{dataset_name: gsm8k, env_name: addition, weight: 1}"


@pytest.mark.parametrize(
    ("override", "key", "code"),
    [
        ("train.dataset_name=gsm8k data.train.env_name=addition", "train", "contradiction"),
        ("validation.dataset_name=gsm8k", "validation", "contradiction"),
        ("datasets.long.weight=null", "datasets.long.weight", "missing-value"),
        ("datasets.long.weight=0", "datasets.long.weight", "too-small"),
        ("datasets.long.env_name=none", "datasets.long.env_name", "not-a-choice"),
        ("validations.two.env_name=null", "validations.two.env_name", "missing-value"),
        ("validations.two.weight=2", "validations.two.weight", "has-no-effect"),
        ("validations.two.split_validation_size=2", "validations.two.split_validation_size", "has-no-effect"),
        ("validations.long={dataset_name: gsm8k, env_name: addition}", "validations.long", "ambiguous"),
        (f"datasets.a@b={GSM8K}", "datasets.a@b", "bad-format"),
    ],
)
def test_contradicting_data_sets_are_refused(tmp_path, override, key, code):
    with refused((f"data.{key}", code)):
        several(tmp_path, *(f"data.{override}".split(" ") if " data." in override else [f"data.{override}"]))


def test_a_recipe_without_training_data_is_refused():
    with refused(("data.train", "missing-value")):
        load(RECIPES / "tiny_grpo.yaml", ["data.train=null"])


@pytest.mark.parametrize("epochs", [1, 3])
def test_other_weights_and_epochs_from_here_on_equal_a_resume_with_them(epochs):
    """Also for a set that has ended: more epochs begin it again where it is."""
    trained = mixture({"few": 5.0, "many": 1.0}, epochs=2)
    trained.take(30)
    assert trained._streams["few"].take(1) == []
    trained.follow({"few": 1.0, "many": None}, epochs)
    resumed = mixture({"few": 1.0, "many": 40.0}, epochs)
    resumed.load_state_dict(json.loads(json.dumps(trained.state_dict())))

    def rest(stream: Mixture) -> list:
        return [(prompt.index, prompt.dataset, prompt.task["answer"]) for prompt in stream.take(1000)]

    found = rest(trained)
    assert found == rest(resumed)
    assert sum(name == "few" for _, name, _ in found) == max(0, 5 * (epochs - 2))
