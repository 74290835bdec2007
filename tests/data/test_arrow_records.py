"""Records of Parquet files: Arrow's nulls, and the location of a bad record."""

import datasets
import pytest
from transformers import AutoTokenizer

from pipeline.config import RECIPES, DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.chat import Encoder
from pipeline.data.datasets import load_records, record_location
from pipeline.data.stream import ExampleStream
from tests.data.test_turns import AS_MAPPING, QUESTION, TOOL, called, said
from tests.problems import refused


@pytest.fixture
def folder(tmp_path):
    tools = [{**TOOL, "strict": True}]
    rows = [
        {"messages": [QUESTION, called({"city": "Oslo"}), said("uno")], "tools": [TOOL], "info": {"a": 1}},
        {"messages": [QUESTION, called({"unit": "no"}), said("dos")], "tools": tools, "info": {"b": 2}},
    ]
    for name, part in (("a", rows), ("b", [{**rows[0], "messages": [said("tres")]}, rows[0]])):
        datasets.Dataset.from_list(part).to_parquet(tmp_path / f"{name}.parquet")
    return tmp_path


def test_nulls_that_arrow_fills_in_are_absent_keys(folder):
    records = load_records(DatasetConfig(dataset_name=str(folder)), 0)
    calls = [message["tool_calls"][0]["function"]["arguments"] for message in (records[i]["messages"][1] for i in (0, 1))]
    assert calls == [{"city": "Oslo"}, {"unit": "no"}]
    assert records[0]["tools"] == [TOOL]
    assert records[0]["info"] == {"a": 1, "b": None}  # a column of the user's own
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "tiny", chat_template=AS_MAPPING)
    encoder = Encoder(tokenizer, TokenizerConfig(), DataConfig(), DatasetConfig(messages_key="messages"))
    tokens, _ = encoder.conversation(records[0])
    messages = [QUESTION, called({"city": "Oslo"}), said("uno")]
    assert tokens.tolist() == tokenizer.apply_chat_template(messages, tools=[TOOL], return_dict=False)


def test_a_bad_record_is_named_by_its_file_and_row(folder):
    records = load_records(DatasetConfig(dataset_name=str(folder)), 0)
    assert record_location(records, 2) == f"{folder}/b.parquet, row 0 (from 0)"
    selected = load_records(DatasetConfig(dataset_name=str(folder), max_samples=4), 0)
    assert {record_location(selected, i) for i in range(4)} == {record_location(records, i) for i in range(4)}
    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "tiny", chat_template=AS_MAPPING)
    dataset = DatasetConfig(messages_key="messages")
    for choice in ("error", "drop"):
        data = DataConfig(bad_records=choice, max_input_seq_length=500, unknown_tokens="keep")
        encoder = Encoder(tokenizer, TokenizerConfig(), data, dataset)
        if choice == "error":
            with refused(("data", "bad-record")) as error:
                ExampleStream(records, encoder, seed=0)
            assert "b.parquet, row 0" in str(error.value)
        else:
            stream = ExampleStream(records, encoder, seed=0)
            assert (stream.dropped_at_start, len(stream.take(9)), stream.dropped) == (1, 3, 1)
