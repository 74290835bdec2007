"""Model folders with one fault each: submission reports a problem or a note, or reads what is right. None is silent."""

import numpy as np
import pytest

from launch.preflight import architecture, file_systems, input_files, model_readings
from launch.recipes.model_files import planning_config
from pipeline import config
from pipeline.config import collected
from pipeline.models import rope
from pipeline.models.weight_files import read_weight_files
from tests.launch.model import write_data, write_recipe
from tests.launch.preflight import wrong_models as wrong
from tests.launch.preflight.wrong_models import EMBEDDING, HEAD, INDEX, SHARDS, SINGLE

MODEL, TOKENIZER, TEMPLATE = "policy.model_name", "policy.tokenizer.name", "policy.tokenizer.chat_template"
LINEAR = {"rope_type": "linear", "factor": 2.0}

REFUSED = {  # fault -> how to make it, {(key, code)}; a key with a slash is a file of the folder
    # config.json
    "config.json missing": (wrong.remove("config.json"), {(MODEL, "file-not-found")}),
    "config.json cut": (wrong.cut("config.json"), {("/config.json", "bad-format")}),
    "config.json empty": (wrong.empty("config.json"), {("/config.json", "bad-format"), (MODEL, "unreadable")}),
    "config.json a list": (wrong.text("config.json", "[]"), {("/config.json", "bad-format")}),
    "config.json deep": (wrong.text("config.json", '{"a":' * 100_000), {("/config.json", "bad-format")}),
    "config.json with a byte order mark": (wrong.with_bom("config.json"), {("/config.json", "bad-format")}),
    "config.json a pipe": (wrong.pipe("config.json"), {("/config.json", "unreadable"), (MODEL, "unreadable")}),
    "config.json a loop": (wrong.loop("config.json"), {(MODEL, "file-not-found"), (TOKENIZER, "unreadable")}),
    "config.json a folder": (wrong.directory("config.json"), {("/config.json", "unreadable"), (MODEL, "unreadable")}),
    "no model_type": (wrong.drop("model_type"), {(MODEL, "missing-value")}),
    "unknown model_type": (wrong.change("model_type", "lama"), {(MODEL, "unsupported")}),
    "no hidden_size": (wrong.drop("hidden_size"), {(MODEL, "missing-value")}),
    "hidden_size a text": (wrong.change("hidden_size", "16"), {(MODEL, "wrong-type")}),
    "hidden_size a fraction": (wrong.change("hidden_size", 16.5), {(MODEL, "wrong-type")}),
    "no layers": (wrong.change("num_hidden_layers", 0), {(MODEL, "wrong-type")}),
    "a layer more": (wrong.change("num_hidden_layers", 2), {(MODEL, "unavailable-model")}),
    "layer_types of another length": (wrong.change("layer_types", ["full_attention"] * 3), {(MODEL, "contradiction")}),
    "vocabulary larger than the embedding": (wrong.change("vocab_size", 41), {(MODEL, "unavailable-model")}),
    "vocabulary smaller": (wrong.change("vocab_size", 39), {(MODEL, "unavailable-model"), (TOKENIZER, "too-large")}),
    "no vocab_size": (wrong.drop("vocab_size"), {(MODEL, "missing-value")}),
    "other heads": (wrong.change("num_attention_heads", 3), {(MODEL, "unsupported")}),
    "null for a size": (wrong.change("intermediate_size", None), {(MODEL, "missing-value")}),
    "other key-value heads": (wrong.change("num_key_value_heads", None), {(MODEL, "unavailable-model")}),
    "another head_dim": (wrong.change("head_dim", 8), {(MODEL, "unavailable-model")}),
    "unknown dtype": (wrong.change("torch_dtype", "float13"), {(MODEL, "wrong-type")}),
    "unknown activation": (wrong.change("hidden_act", "swish2"), {(MODEL, "unsupported")}),
    "rms_norm_eps a text": (wrong.change("rms_norm_eps", "1e-5"), {(MODEL, "wrong-type")}),
    "rms_norm_eps NaN": (wrong.change("rms_norm_eps", float("nan")), {(MODEL, "wrong-type")}),
    "short context": (wrong.change("max_position_embeddings", 16), {("policy.max_total_sequence_length", "too-large")}),
    "context a text": (wrong.change("max_position_embeddings", "64"), {(MODEL, "wrong-type")}),
    "tie_word_embeddings a text": (wrong.change("tie_word_embeddings", "false"), {(MODEL, "wrong-type")}),
    "tied weights differ": (wrong.tied_but_different, {(MODEL, "unavailable-model")}),
    "biases that the files lack": (wrong.change("attention_bias", True), {(MODEL, "unavailable-model")}),
    "architectures of an encoder": (wrong.change("architectures", ["BertModel"]), {(MODEL, "unavailable-model")}),
    "a classifier": (wrong.change("architectures", ["LlamaForSequenceClassification"]), {(MODEL, "unavailable-model")}),
    "GPTQ": (wrong.quantized, {(MODEL, "unsupported")}),
    "quantization_config a text": (wrong.change("quantization_config", "fp8"), {(MODEL, "wrong-type")}),
    # RoPE
    "linear without a factor": (wrong.change("rope_scaling", {"type": "linear"}), {(MODEL, "missing-value")}),
    "unknown RoPE": (wrong.change("rope_scaling", {"rope_type": "yarns", "factor": 2.0}), {(MODEL, "not-a-choice")}),
    "factor a text": (wrong.change("rope_scaling", {**LINEAR, "factor": "2"}), {(MODEL, "wrong-type")}),
    "two RoPEs that differ": (wrong.both_ropes, {(MODEL, "contradiction")}),
    "rope_scaling a text": (wrong.change("rope_scaling", "linear"), {(MODEL, "wrong-type")}),
    "negative theta": (wrong.change("rope_theta", -1), {(MODEL, "wrong-type")}),
    "dynamic RoPE": (wrong.change("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}), {(MODEL, "unsupported")}),
    # the index
    "no index": (wrong.remove(INDEX), {(MODEL, "file-not-found")}),
    "index empty": (wrong.empty(INDEX), {(MODEL, "unreadable")}),
    "index a list": (wrong.text(INDEX, "[]"), {(MODEL, "unreadable")}),
    "index with a byte order mark": (wrong.with_bom(INDEX), {(MODEL, "unreadable")}),
    "index without weight_map": (wrong.text(INDEX, "{}"), {(MODEL, "unreadable")}),
    "index names a number": (wrong.mapped(lambda m: {**m, HEAD: 2}), {(MODEL, "unreadable")}),
    "index names a file outside": (wrong.mapped(lambda m: {**m, HEAD: f"../{SHARDS[1]}"}), {(MODEL, "unreadable")}),
    "index names a missing file": (wrong.mapped(lambda m: {**m, HEAD: "model-3.safetensors"}), {(MODEL, "file-not-found")}),
    "index names the other shard": (wrong.mapped(lambda m: {**m, HEAD: SHARDS[0]}), {(MODEL, "unreadable")}),
    "index names an unknown tensor": (wrong.mapped(lambda m: {**m, "x": SHARDS[0]}), {(MODEL, "unreadable")}),
    "no output layer": (wrong.without_head, {(MODEL, "unavailable-model")}),
    # weights
    "shard missing": (wrong.remove(SHARDS[1]), {(MODEL, "file-not-found")}),
    "shard cut": (wrong.cut(SHARDS[1]), {(MODEL, "unreadable")}),
    "shard longer": (wrong.lengthen(SHARDS[1]), {(MODEL, "unreadable")}),
    "shard empty": (wrong.empty(SHARDS[1]), {(MODEL, "unreadable")}),
    "shard a pipe": (wrong.pipe(SHARDS[1]), {(MODEL, "unreadable")}),
    "shard a loop": (wrong.loop(SHARDS[1]), {(MODEL, "unreadable")}),
    "shard a folder": (wrong.directory(SHARDS[1]), {(MODEL, "unreadable")}),
    "shard a page": (wrong.text(SHARDS[1], f"<!DOCTYPE html>{' ' * 100}"), {(MODEL, "unreadable")}),
    "header with another dtype": (
        wrong.header(SHARDS[1], lambda h: wrong.first_entry(h, dtype="F16")),
        {(MODEL, "unreadable")},
    ),
    "header with a negative shape": (
        wrong.header(SHARDS[1], lambda h: wrong.first_entry(h, shape=[-40, -16])),
        {(MODEL, "unreadable")},
    ),
    "header with a gap": (
        wrong.header(SHARDS[1], lambda h: wrong.first_entry(h, data_offsets=[8, 2568])),
        {(MODEL, "unreadable")},
    ),
    "header with a tensor twice": (wrong.twice_in_header, {(MODEL, "unreadable")}),
    "weights of 8 bits": (wrong.stored(SHARDS[1], lambda w: {HEAD: w[HEAD].astype(np.int8)}), {(MODEL, "unsupported")}),
    "weights transposed": (wrong.stored(SHARDS[1], lambda w: {HEAD: w[HEAD].T.copy()}), {(MODEL, "unavailable-model")}),
    "weights with a prefix": (wrong.stored(SHARDS[1], lambda w: {f"model.{HEAD}": w[HEAD]}), {(MODEL, "unreadable")}),
    "a weight too many": (wrong.with_stray_tensor, {(MODEL, "unavailable-model")}),
    "adapters alone": (wrong.adapters_alone, {(MODEL, "file-not-found")}),
    "pickles alone": (wrong.pickles_alone, {(MODEL, "unsupported")}),
    # the tokenizer
    "no tokenizer": (wrong.remove("tokenizer.json"), {(TOKENIZER, "file-not-found")}),
    "tokenizer cut": (wrong.cut("tokenizer.json"), {("/tokenizer.json", "bad-format")}),
    "tokenizer without a model": (wrong.tokenizer(lambda t: t.update(model=None)), {("/tokenizer.json", "bad-format")}),
    "a token more than rows": (
        wrong.tokenizer(lambda t: t["model"]["vocab"].update({"zz": 40})),
        {(TOKENIZER, "too-large")},
    ),
    "eos that the tokenizer lacks": (
        wrong.change("eos_token", "<|eos|>", "tokenizer_config.json"),
        {(TOKENIZER, "too-large")},
    ),
    "tokenizer_config.json broken": (wrong.text("tokenizer_config.json", "{"), {("/tokenizer_config.json", "bad-format")}),
    "an added token of another form": (
        wrong.change("added_tokens_decoder", {"x": {"content": "<x>"}}, "tokenizer_config.json"),
        {("/tokenizer_config.json", "bad-format")},
    ),
    "tokenizer_config.json a list": (wrong.text("tokenizer_config.json", "[]"), {("/tokenizer_config.json", "bad-format")}),
    "special_tokens_map.json broken": (
        wrong.text("special_tokens_map.json", "{"),
        {("/special_tokens_map.json", "bad-format")},
    ),
    "generation_config.json broken": (wrong.text("generation_config.json", "{"), {("/generation_config.json", "bad-format")}),
    "eos_token_id a text": (wrong.change("eos_token_id", "38", "generation_config.json"), {(MODEL, "bad-format")}),
    # the template
    "template cut": (wrong.template("{% for m in messages %}{{ m.content }}"), {(TEMPLATE, "bad-format")}),
    "template with an unknown filter": (wrong.template("{{ messages | nothing }}"), {(TEMPLATE, "bad-format")}),
    "template without the user's text": (wrong.template("<user>"), {(TEMPLATE, "unsupported")}),
    "no template": (wrong.remove("chat_template.jinja"), {("data.apply_chat_template", "missing-value")}),
}

EVERY_DAY = {  # one fault of each part; `full` has the others
    *("config.json cut", "config.json a pipe", "unknown model_type", "hidden_size a text", "a layer more", "GPTQ"),
    *("vocabulary smaller", "tied weights differ", "architectures of an encoder", "unknown RoPE", "dynamic RoPE", "no index"),
    *("header with a gap", "weights transposed", "a weight too many", "pickles alone", "tokenizer cut", "eos_token_id a text"),
    *("an added token of another form", "template cut", "template without the user's text", "no template"),
}

NOTED = {  # fault -> how to make it, the beginning of the note
    "a stale copy": (wrong.stored(SHARDS[0], lambda w: {**w, HEAD: np.zeros((40, 16), np.float32)}), "weights have copies"),
    "a tensor that the index lacks": (
        wrong.mapped(lambda m: {name: file for name, file in m.items() if name != "model.norm.weight"}),
        "weights that model.safetensors.index.json does not list are read too",
    ),
    "a whole file and shards": (wrong.whole_beside, "MODEL has model.safetensors and"),
    "code of its own": (wrong.change("auto_map", {"AutoConfig": "x.Y"}), f"{MODEL}: MODEL has Python code"),
    "no stop token": (wrong.without_eos, "policy: no file of MODEL names a stop token"),
    "adapters beside the model": (wrong.adapters_beside, f"{MODEL}: MODEL has adapters"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(architecture, "is_described", lambda recipe: True)  # as of a recipe with GPUs
    wrong.write_right_model(tmp_path / "model")
    write_data(tmp_path / "data.jsonl", ["1+1=", "2+2="])
    return tmp_path


def submission(folder, *overrides):
    """Return (recipe, {(key, code)} of the problems, notes), as a submission finds them."""
    given = ["policy.random_init=false", "data.apply_chat_template=true", "policy.generation.max_new_tokens=8"]
    given += ["data.unknown_tokens=keep"]  # the marks of the template's turns
    recipe = config.load(str(write_recipe(folder)), [*given, *overrides])
    notes: list[str] = []
    found: list[config.Problem] = []
    for check in (input_files.problems, file_systems.problems):
        with collected(found):
            found += check(recipe, (), notes)
    model = str(folder / "model")
    said = {(problem.key.replace(model, ""), problem.code) for problem in found}
    return recipe, said, [note.replace(model, "MODEL") for note in notes]


def test_the_right_folder_passes(folder):
    assert submission(folder)[1:] == (set(), [])


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[] if fault in EVERY_DAY else pytest.mark.full) for fault in REFUSED]
)
def test_a_wrong_folder_is_refused(folder, fault):
    spoil, expected = REFUSED[fault]
    spoil(folder / "model")
    assert submission(folder)[1] == expected


@pytest.mark.parametrize("fault", NOTED)
def test_what_is_not_read_is_noted(folder, fault):
    spoil, expected = NOTED[fault]
    spoil(folder / "model")
    _, said, notes = submission(folder)
    assert said == set() and [note for note in notes if note.startswith(expected)], notes


@pytest.mark.parametrize(
    ("spoil", "ids"),
    [
        (wrong.change("eos_token_id", [38, 37], "generation_config.json"), (37, 38)),
        (wrong.change("eos_token_id", 5), (38,)),  # a letter, which a class's default may name
        (wrong.drop("eos_token", "tokenizer_config.json"), (38,)),
        (wrong.remove("generation_config.json"), (38,)),
    ],
)
def test_stop_tokens_are_the_union_of_those_that_exist(folder, spoil, ids):
    spoil(folder / "model")
    recipe, said, _ = submission(folder)
    reading = model_readings.read("policy", recipe.policy)
    assert said == set() and reading is not None and reading.stops.ids == ids


def test_every_fault_of_every_day_is_in_the_table():
    assert REFUSED.keys() >= EVERY_DAY


def test_both_spellings_of_rope_are_read(folder):
    for spelling in ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_parameters": LINEAR}):
        for name, value in spelling.items():
            wrong.change(name, value)(folder / "model")
        recipe, said, _ = submission(folder)
        (found,) = rope.decide(planning_config(recipe.policy) or {})
        assert said == set() and (found.kind, found.factor, found.theta) == ("linear", 2.0, 5e5)
        wrong.drop("rope_scaling")(folder / "model")


def test_a_tied_copy_that_is_equal_is_read_once(folder):
    wrong.change("tie_word_embeddings", True)(folder / "model")
    found = read_weight_files(folder / "model").tensors
    assert submission(folder)[1:] == (set(), []) and found[HEAD].shape == found[EMBEDDING].shape


def test_a_broken_index_beside_a_whole_file_is_noted(folder):
    wrong.whole_beside(folder / "model")
    wrong.text(INDEX, "{")(folder / "model")
    _, said, notes = submission(folder)
    assert said == set() and any(SINGLE in note and INDEX in note for note in notes)


def test_a_pipe_does_not_stop_the_check(folder):
    """Nothing waits for a writer, also where the file is optional."""
    wrong.pipe("chat_template.jinja")(folder / "model")
    assert ("/chat_template.jinja", "unreadable") in submission(folder)[1]
