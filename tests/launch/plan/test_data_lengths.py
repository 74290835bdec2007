"""The plan takes the mean length of data that are here."""

import json

import pytest

from launch.plan import data_lengths
from launch.plan.memory_parts import longest_sequence, rank_batches
from pipeline import config
from pipeline.config import RECIPES
from pipeline.data.chat import Encoder, load_tokenizer
from pipeline.data.mixture import build_streams
from tests.launch.plan.plans import planned

LIMIT = 128
KEYS = (
    f"policy.tokenizer.name={RECIPES}/tiny",
    f"policy.model_name={RECIPES}/tiny",
    f"policy.max_total_sequence_length={LIMIT}",
)
UNPACKED = ("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=2", "policy.train_global_batch_size=64")


@pytest.fixture
def written(tmp_path):
    """Return a function that writes records with answers of these lengths, and returns the file."""

    def write(*answers: int, name: str = "data"):
        path = tmp_path / f"{name}.jsonl"
        records = ({"input": f"1+{number % 10}", "output": "7" * length} for number, length in enumerate(answers))
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write


def keys(section: str = "sft", path="", *more: str) -> list[str]:
    """Return the keys of a recipe without validation, with its training data from a file."""
    none = ("data.validation=null", f"{section}.val_at_end=false", f"{section}.val_at_start=false", f"{section}.val_period=0")
    train = (*source("train", path), *none) if path else none
    return [*KEYS, "run_dir=runs/none", *train, "checkpointing.metric_name=null", *more]


def source(name: str, path) -> tuple[str, ...]:
    return f"data.{name}.dataset_name=null", f"data.{name}.kwargs={{}}", f"data.{name}.data_path={path}"


def of_file(path, *more: str, section: str = "sft"):
    return config.load(f"tiny_{section}", keys(section, path, *more))


def test_lengths_are_those_that_the_job_trains_on(written):
    recipe = of_file(written(3, 9, 50, 21))
    stream, _ = build_streams(recipe, load_tokenizer(recipe.policy.tokenizer))
    lengths = [len(sample.tokens) for sample in stream.take(4)]
    assert data_lengths.measure(recipe) == (sum(lengths) / 4, "the mean of the first 4 records of data.train")


def test_the_longest_sequence_bounds_memory():
    without, found = (planned("tiny_sft", *KEYS, *UNPACKED, f"plan.longest_tokens={longest}") for longest in ("null", 60))
    assert rank_batches(found.recipe, 1).train_tokens == 2 * 60
    assert rank_batches(without.recipe, 1).train_tokens == 2 * LIMIT
    assert found.train.parts["activations"] < without.train.parts["activations"]
    assert "all sequences of a step have 60 tokens (plan.longest_tokens)" in " ".join(found.train.assumptions)
    assert any("max_total_sequence_length; if all records are shorter, set" in text for text in without.train.assumptions)


@pytest.mark.parametrize(
    "sizes", [UNPACKED, ("policy.sequence_packing.train_mb_tokens=4096", "policy.train_global_batch_size=64")]
)
def test_compiled_layers_start_with_the_longest_sequences_that_may_come(sizes):
    """Shorter records do not shorten these. The optimizer has no moments yet."""
    held = [
        planned("tiny_sft", *KEYS, *sizes, f"policy.dtensor_cfg.compile={compiled}", f"plan.longest_tokens={longest}").train
        for compiled, longest in (("true", 3), ("true", LIMIT), ("false", LIMIT), ("false", 3))
    ]
    activations = [one.parts.get("activations", 0.0) for one in held]
    assert activations[0] == activations[1] == activations[2] > activations[3]
    assert held[3].total < held[0].total < held[1].total == held[2].total
    assert held[0].phase.endswith("in the trial of compiled layers, policy") and "optimizer" not in held[0].parts


def test_a_part_of_the_records_is_enough(written, monkeypatch):
    path = written(*[3] * 20, 100)
    monkeypatch.setattr(data_lengths, "MOST_RECORDS", 20)
    assert "first 20 records" in data_lengths.measure(of_file(path))[1]
    monkeypatch.setattr(data_lengths, "MOST_TOKENS", 10)
    assert "first 2 records" in data_lengths.measure(of_file(path))[1]
    monkeypatch.setattr(Encoder, "count", lambda encoder, example: 1 / 0)
    assert data_lengths.measure(of_file(path)) is None  # the job may read what was not read here


def test_the_run_drops_or_refuses_longer_records(written):
    short = "data.max_input_seq_length=40"
    assert longest_sequence(of_file(written(3, 50), short)) == 40
    assert data_lengths.measure(of_file(written(3, 50), short))[0] < 40
    assert longest_sequence(of_file(written(3), "plan.longest_tokens=30")) == 30
    assert longest_sequence(of_file(written(3), "plan.longest_tokens=3000")) == LIMIT
    assert longest_sequence(config.load("tiny_grpo", [*KEYS, short, "plan.longest_tokens=30"])) == LIMIT  # of answers


def test_keys_and_measured_runs_come_before_the_data(written):
    path = written(3, 9)
    found = planned("tiny_sft", *keys("sft", path, "plan.prompt_tokens=20", "plan.answer_tokens=30"))
    assert found.lengths.sequence == 50


def test_prompts_of_an_algorithm_that_samples(written):
    path = written(1, 1, 1)
    answers = "data.train.output_key=output"
    found = planned("tiny_grpo", *keys("grpo", path, answers))
    mean, source = data_lengths.measure(of_file(path, answers, section="grpo"))
    assert found.lengths.prompt == mean >= 3 and f"prompts of {mean:,.0f} tokens: {source}" in found.lengths.source


def test_sequences_of_a_pair_count_one_by_one(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "1+2", "chosen": "3", "rejected": "4" * 40}) + "\n")
    mean, _ = data_lengths.measure(of_file(path, section="dpo"))
    assert 20 < mean < 40


def test_data_in_the_hubs_cache(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "datasets--org--set"
    folder = repository / "snapshots/abc/data"
    folder.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc")
    for split, length in (("train", 10), ("test", 90)):
        table = pyarrow.table({"input": ["1+2"] * 3, "output": ["7" * length] * 3})
        pyarrow.parquet.write_table(table, folder / f"{split}-00000-of-00001.parquet")

    def cached(name: str, *more: str):
        of_hub = (f"data.train.dataset_name=org/{name}", "data.train.kwargs={}", *more)
        return config.load("tiny_sft", keys("sft", "", *of_hub))

    found = data_lengths.measure(cached("set"))
    assert 10 < found[0] < 40
    assert data_lengths.measure(cached("set", "data.train.split=test"))[0] > 90
    assert data_lengths.measure(cached("other")) is None


def test_data_that_cannot_be_read_are_left_to_a_guess(written, tmp_path):
    assert data_lengths.measure(config.load("tiny_sft", KEYS)) is None  # generated
    assert data_lengths.measure(of_file(tmp_path / "absent.jsonl")) is None
    assert data_lengths.measure(of_file(written(3), f"policy.tokenizer.name={tmp_path}")) is None
