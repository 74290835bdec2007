"""`python -m tests.data.tool_templates`: do we write and read tool calls as published chat templates do?

The templates in tests/data/templates are those that the models were published with. Each plays an episode of two turns with
calls, whose turns are the text that the template itself writes for them. The columns:

- `tokens`: after each turn, the tokens of the prompt, the policy's turns and our observations equal those of
  `apply_chat_template` for the whole conversation.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from pipeline.config import TokenizerConfig
from pipeline.data.call_parsers import CallParser
from pipeline.data.observations import Observations
from pipeline.data.rendering import ChatTemplate
from pipeline.data.tool_messages import ParsedTurn
from tests.data.published_templates import SPECIAL, THINK

FOLDER = Path(__file__).parent / "templates"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["a", "b"],
        },
    },
}
IDS = ("call00001", "call00002")


@dataclass(frozen=True)
class Model:
    """A published model: its template, how it writes, and what its template cannot do."""

    file: str
    end: str  # the token that it samples after a call
    eos: str
    bos: str = "<s>"
    added: tuple[str, ...] = ()  # added tokens that are not special
    parallel: str = ""  # why it writes one call a turn; "": it may write several
    refused: str = ""  # part of the reason why its template is refused

    @property
    def template(self) -> str:
        return (FOLDER / f"{self.file}.jinja").read_text()

    @property
    def special(self) -> list[str]:
        """The special tokens that the template writes."""
        texts = dict.fromkeys([*SPECIAL.findall(self.template), self.end, self.eos, self.bos])
        return [text for text in texts if not THINK.fullmatch(text)]


THINKING = ("<think>", "</think>")
HERMES = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", *THINKING)
DEEPSEEK = "<\uff5c{}\u2581of\u2581sentence\uff5c>"
MODELS = {
    "Qwen3": Model("qwen3", "<|im_end|>", "<|im_end|>", added=HERMES),
    "Qwen3.5": Model("qwen3_5", "<|im_end|>", "<|im_end|>", added=HERMES),
    "Llama 3.1": Model(
        "llama3_1", "<|eot_id|>", "<|eot_id|>", "<|begin_of_text|>", parallel="the template refuses several calls"
    ),
    "Gemma 3": Model("gemma3", "<end_of_turn>", "<end_of_turn>", "<bos>", refused="tools"),
    "GLM-4.5": Model(
        "glm4_5",
        "<|observation|>",
        "<|endoftext|>",
        added=(*HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "gpt-oss": Model("gpt_oss", "<|call|>", "<|return|>", "<|startoftext|>", parallel="<|call|> ends a turn"),
    "Mistral Small 3.1": Model("mistral_small_3_1", "</s>", "</s>"),
    "DeepSeek-V3.1": Model(
        "deepseek_v3_1", DEEPSEEK.format("end"), DEEPSEEK.format("end"), DEEPSEEK.format("begin"), added=THINKING
    ),
}


@functools.cache
def bytes_of() -> str:
    """Return a byte-level tokenizer that was trained on the templates, as JSON."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer, trained.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    trained.train([str(path) for path in sorted(FOLDER.glob("*.jinja"))], trainer)
    return trained.to_str()


def tokenizer_of(model: Model) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the special tokens and the template of a model."""
    trained = Tokenizer.from_str(bytes_of())
    trained.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in model.special])
    trained.add_tokens([AddedToken(text, special=False, normalized=False) for text in model.added])
    made = PreTrainedTokenizerFast(tokenizer_object=trained, bos_token=model.bos, eos_token=model.eos)
    made.chat_template = model.template
    return made


def turn(number: int, count: int = 1) -> dict[str, Any]:
    """Return a turn with `count` calls."""
    arguments = ({"a": number, "b": place, "note": 'say "hi" <now> é'} for place in range(count))
    calls = [
        {"id": id, "type": "function", "function": {"name": "add", "arguments": given}}
        for id, given in zip(IDS, arguments, strict=False)
    ]
    return {"role": "assistant", "content": "", "reasoning_content": f"I add {number}.", "tool_calls": calls}


def results(said: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a result of each call of a turn."""
    return [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": f"sum {i}"}
        for i, call in enumerate(said["tool_calls"])
    ]


def sampled(model: Model, text: Any, messages: list[dict[str, Any]], said: dict[str, Any]) -> str:
    """Return the text that the policy samples for a turn: what the template writes up to the token that ends the turn."""
    prompt, whole = (text(turns, add_generation_prompt=True) for turns in (messages, [*messages, said, *results(said)]))
    assert whole.startswith(prompt), (prompt[-80:], whole[len(prompt) - 80 :])
    written, end, _ = whole[len(prompt) :].partition(model.end)
    return written + end


def token_difference(model: Model, count: int = 1) -> str:
    """Return the first difference between our tokens and those of the whole conversation, "" if there is none.

    count: the calls of a turn. If the template refuses several, the conversation has the last one, and the results of all.
    """
    tokenizer = tokenizer_of(model)
    told = Observations(tokenizer, TokenizerConfig(), chat=True)
    text = functools.partial(ChatTemplate(tokenizer).text, tools=[TOOL])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2+3?"}]
    held = tokenizer(text(messages, add_generation_prompt=True), add_special_tokens=False).input_ids
    for number in range(2):
        said = turn(number, count)
        rendered = {**said, "tool_calls": said["tool_calls"][-1:]} if "refuses" in model.parallel else said
        held += tokenizer(sampled(model, text, messages, rendered), add_special_tokens=False).input_ids
        held += told.tokens(results(said), held[-1], said, [TOOL]).tolist()
        messages += [rendered, *results(said)]
        whole = tokenizer(text(messages, add_generation_prompt=True), add_special_tokens=False).input_ids
        if held != whole:
            return f"turn {number}: {tokenizer.decode(held)!r}, not {tokenizer.decode(whole)!r}"
    return ""


def parsed(model: Model, text: str, thinks: bool = False) -> ParsedTurn:
    """Return what the parser reads in a text that the policy samples."""
    tokenizer = tokenizer_of(model)
    return parser_of(model).parse(tokenizer(text, add_special_tokens=False).input_ids, [TOOL], thinks)


@functools.cache
def parser_of(model: Model) -> CallParser:
    return CallParser(tokenizer_of(model), TokenizerConfig(), chat=True)


def main() -> int:
    for name, model in MODELS.items():
        try:
            print(name, [token_difference(model, count) or "equal" for count in (1, 2)])
        except Exception as error:
            print(name, type(error).__name__, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
