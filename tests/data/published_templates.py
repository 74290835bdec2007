r"""`python -m tests.data.published_templates FOLDER [TRL_FOLDER]`: do we tokenize and mask as published chat templates say?

FOLDER has chat templates, *.jinja, such as llama.cpp's models/templates or TRL's trl/chat_templates. Each renders the FORMS of
a conversation. A form is `equal` if

- the prompt's tokens are those of `apply_chat_template(messages[:-1], add_generation_prompt=True)`, the conversation's those
  of `apply_chat_template(messages)`;
- each turn of the assistant that is learned begins where the generation prompt ends (or the part of it that the template
  kept), has all words of the turn and no words of others, and ends with a special token where the template writes one.

The check of the mask looks at words that occur once, so it shares no code with the encoder. Of a template with marks of its
own, {% generation %}, only the tokens are checked. `refused` are the forms that the template itself refuses or does not render,
`ours` those that only the encoder refuses; each has its reason. `different` has the difference, and exit status 1.

TRL_FOLDER has TRL's templates, NAME.jinja and NAME_training.jinja. With `data.learn_prefilled` our masks under NAME are
compared with the {% generation %} marks of NAME_training, wherever both render the same text.

The tokenizer is that of SmolLM2 (its folder is HETSTEP_SMOLLM2), with the special tokens of each template added.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from pipeline.config import DataConfig, DatasetConfig, TokenizerConfig
from pipeline.data.chat import Encoder
from pipeline.data.turns import GENERATION_BLOCK

SMOLLM2 = os.environ.get("HETSTEP_SMOLLM2", "")
THINK = re.compile(
    r"\s|<\|(?:START|END)_THINKING\|>|Here ?are ?my ?reasoning ?steps:"
    r"|</?(?:\w+:)?think(?:ing)?(?::\w+)?>|\[/?THINK\]|<\|channel>thought|<channel\|>"
)
SPECIAL = re.compile(
    r"<\|[^|<>{}\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|</?(?:start|end)_of_turn>"
    r"|\[/?(?:INST|THINK|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|SYSTEM_PROMPT|ARGS|CALL_ID|TOOL_CONTENT)\]"
    r"|</?s>|<bos>|<eos>|<\[[^\]<>]{1,40}\]>|\[(?:e~\[|gMASK\]|\|[a-z]+\|\])|<[a-z_]+\|>|<\|[a-z_]+>|<SPECIAL_\d+>|<extra_id_\d>"
    r"|</?\|?im_\w+\|?>|</?\w+:opensource>|<sop>|<role>|</role>|<seed:\w+>|\]~[a-z!]\w*\[|\]~b\]"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "zweather",
        "description": "Toolabout",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Cityabout"}},
            "required": ["city"],
        },
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "zweather", "arguments": {"city": "Oslozed"}}}
RESULT = {"role": "tool", "name": "zweather", "tool_call_id": "call00001", "content": "Sunnyzed"}


def user(word: str) -> dict[str, Any]:
    return {"role": "user", "content": f"User{word} asks"}


def answer(word: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"Reply{word} says", **more}


def call(content: str | None, arguments: Any = None, **more: Any) -> dict[str, Any]:
    made = copy.deepcopy(CALL)
    if arguments is not None:
        made["function"]["arguments"] = arguments
    return {"role": "assistant", "content": content, "tool_calls": [made], **more}


FORMS: dict[str, list[dict[str, Any]]] = {
    "single": [user("one"), answer("one")],
    "system": [{"role": "system", "content": "Systemword"}, user("one"), answer("one")],
    "turns": [user("one"), answer("one"), user("two"), answer("two")],
    "tools": [user("one"), call(""), RESULT, answer("two")],
    "last_call": [user("one"), call("")],
    "tools_text": [user("one"), call("", json.dumps(CALL["function"]["arguments"])), RESULT, answer("two")],
    "null": [user("one"), call(None), RESULT, answer("two"), user("three"), answer("three")],
    "field": [user("one"), answer("one", reasoning_content="Thoughtone here")],
    "fields": [
        user("one"),
        answer("one", reasoning_content="Thoughtone here"),
        user("two"),
        answer("two", reasoning_content="Thoughttwo"),
    ],
    "think": [user("one"), {"role": "assistant", "content": "<think>\nThoughtone here\n</think>\n\nReplyone says"}],
    "thinks": [
        user("one"),
        {"role": "assistant", "content": "<think>\nThoughtone here\n</think>\n\nReplyone says"},
        user("two"),
        {"role": "assistant", "content": "<think>\nThoughttwo here\n</think>\n\nReplytwo says"},
    ],
    "newline": [user("one"), {"role": "assistant", "content": "\n\nReplyone says"}],
}
WORD = re.compile(r"(?:User|Reply|Thought)[a-z]+|Systemword|zweather|Oslozed|Sunnyzed|Toolabout|Cityabout")


@dataclass(frozen=True)
class Outcome:
    form: str
    result: str  # equal, refused (by the template), ours (refused by the encoder), different
    why: str = ""


def tokenizer_for(template: str) -> Any:
    """Return SmolLM2's tokenizer with a template and its special tokens."""
    made = AutoTokenizer.from_pretrained(SMOLLM2)
    found = dict.fromkeys(SPECIAL.findall(template))
    made.add_special_tokens({"additional_special_tokens": [text for text in found if not THINK.fullmatch(text)]})
    made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "<|endoftext|>"})
    made.chat_template = template
    with contextlib.suppress(Exception):  # some templates put their tokens together
        written = str(made.apply_chat_template(FORMS["turns"], tokenize=False))
        made.add_special_tokens({"additional_special_tokens": list(dict.fromkeys(SPECIAL.findall(written)))})
    return made


def outcomes(template: str) -> list[Outcome]:
    """Return the outcome of each form."""
    tokenizer = tokenizer_for(template)
    return [outcome(tokenizer, form, messages) for form, messages in FORMS.items()]


def tools_of(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    return [TOOL] if any("tool_calls" in message for message in messages) else None


def outcome(tokenizer: Any, form: str, messages: list[dict[str, Any]]) -> Outcome:
    options = {"tools": tools_of(messages), "return_dict": False}
    try:
        reference, messages = rendered(tokenizer, messages, options)
    except Exception as error:
        return Outcome(form, "refused", f"{type(error).__name__}: {error}".splitlines()[0])
    record = {"messages": FORMS[form], **({"tools": [TOOL]} if options["tools"] else {})}
    encoder = Encoder(tokenizer, TokenizerConfig(), DataConfig(), DatasetConfig(messages_key="messages"))
    try:
        prompt = encoder.prompt(record)
        tokens, mask = encoder.conversation(record)
    except ValueError as error:
        return Outcome(form, "ours", str(error))
    wanted: Any = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, **options)
    if prompt.tolist() != wanted:
        return Outcome(form, "different", f"prompt: {tokenizer.decode(prompt)!r}, not {tokenizer.decode(wanted)!r}")
    if tokens.tolist() != reference:
        return Outcome(form, "different", f"tokens: {tokenizer.decode(tokens)!r}, not {tokenizer.decode(reference)!r}")
    why = wrong_mask(tokenizer, messages, options, tokens, mask)
    return Outcome(form, "different" if why else "equal", why)


def rendered(tokenizer: Any, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[list[int], list]:
    """Return apply_chat_template's tokens, and the messages in the form of tool calls that the template renders well.

    The forms are those of the pages of models: arguments as a mapping or as JSON text, content null, absent or empty.
    """
    last: Exception | None = None
    for as_text in (False, True):
        for absent in (None, "absent", ""):
            changed = [formed(message, as_text, absent) for message in messages]
            try:
                text = tokenizer.apply_chat_template(changed, **{**options, "tokenize": False})
                tokenizer.apply_chat_template(changed[:-1], add_generation_prompt=True, **{**options, "tokenize": False})
            except Exception as error:
                last = last or error
                continue
            if "None" in text or "{'city'" in text or '\\"city' in text:
                last = last or ValueError("it writes None, or arguments that are not JSON")
                continue
            if any("tool_calls" in message for message in changed) and "Oslozed" not in text:
                last = last or ValueError("it renders no tool_calls")
                continue
            return tokenizer.apply_chat_template(changed, **options), changed
    assert last is not None
    raise last


def formed(message: dict[str, Any], as_text: bool, absent: str | None) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    changed = copy.deepcopy(message)
    function = changed["tool_calls"][0]["function"]
    if isinstance(function["arguments"], str) is not as_text:
        function["arguments"] = json.dumps(function["arguments"]) if as_text else json.loads(function["arguments"])
    if changed["content"] is None:
        changed.pop("content")
        changed |= {} if absent == "absent" else {"content": absent}
    return changed


def wrong_mask(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    tokens: np.ndarray,
    mask: np.ndarray,
) -> str:
    """Return what is wrong with a mask, or an empty text."""
    options = {**options, "tokenize": False}
    whole = str(tokenizer.apply_chat_template(messages, **options))
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).tolist()
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if GENERATION_BLOCK.search(str(tokenizer.chat_template)):
        return (
            "" if set(WORD.findall("".join(tokenizer.decode(tokens[a:b]) for a, b in spans))) else "no words of the assistant"
        )
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if len(spans) != len(turns):
        return f"{len(spans)} spans for {len(turns)} turns: {[tokenizer.decode(tokens[a:b]) for a, b in spans]}"
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    for i, (begin, end) in zip(turns, spans, strict=True):
        learned, before = tokenizer.decode(tokens[begin:end]), tokenizer.decode(tokens[:begin])
        expected = words(messages[i]) & set(WORD.findall(whole))
        if set(WORD.findall(learned)) != expected:
            return f"turn {i} learns the words of {learned!r}, not {sorted(expected)}"
        prompt = str(tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, **options))
        if why := wrong_begin(whole, before, learned, prompt):
            return f"turn {i}: {why}"
        ended = str(tokenizer.apply_chat_template(messages[: i + 1], **options)) if i + 1 < len(messages) else whole
        if not any(text in ended[last_word(ended) :] for text in special):
            continue  # the template writes no end where the conversation ends here
        if why := wrong_end(whole[len(before) + len(learned) :], learned, special):
            return f"turn {i}: {why}"
    return ""


def words(message: dict[str, Any]) -> set[str]:
    return set(WORD.findall(json.dumps({key: value for key, value in message.items() if key != "role"})))


def wrong_begin(whole: str, before: str, learned: str, prompt: str) -> str:
    if not whole.startswith(before):
        return "the text before is not the template's"
    if whole.startswith(prompt):
        merged = len(prompt) - len(before)  # a token across the border may begin in the prompt
        return (
            ""
            if 0 <= merged <= len(learned) and not learned[:merged].strip()
            else f"begins at {learned[:30]!r} after {before[-40:]!r}"
        )
    theirs, ours = prompt[last_word(prompt) :], before[last_word(before) :]  # white space may differ
    compact, kept = re.sub(r"\s", "", theirs), re.sub(r"\s", "", ours)
    dropped = compact[len(kept) :] if compact.startswith(kept) else None
    if dropped and (first := WORD.search(learned)) and not learned[: first.start()].strip():
        return ""  # the template writes no header here
    if dropped is None or THINK.sub("", dropped):
        return f"begins after {ours!r}, where the generation prompt has {theirs!r}"
    return ""


def last_word(text: str) -> int:
    return max((match.end() for match in WORD.finditer(text)), default=0)


def wrong_end(rest: str, learned: str, special: set[str]) -> str:
    if any(learned.endswith(text) for text in special):
        return ""
    begins = [text for text in special if rest.lstrip().startswith(text)]
    return f"ends without its special token: {learned[-30:]!r} before {rest[:40]!r}" if begins else ""


# ---- TRL's training templates ---------------------------------------------------------------------------------------------


def against_trl(folder: Path) -> list[str]:
    """Return a line for each pair of templates: how many forms have TRL's mask."""
    lines = []
    for training in sorted(folder.glob("*_training.jinja")):
        plain = training.with_name(training.name.replace("_training", ""))
        if plain.exists():
            counts, why = trl_masks(plain.read_text(), training.read_text())
            lines.append(f"{plain.stem:28} {dict(counts)} {why}")
    return lines


def trl_masks(plain: str, training: str) -> tuple[collections.Counter, str]:
    counts: collections.Counter = collections.Counter()
    why = ""
    ours, theirs = tokenizer_for(plain + training), tokenizer_for(plain + training)
    ours.chat_template, theirs.chat_template = plain, training
    for form, messages in FORMS.items():
        options = {"tools": tools_of(messages)}
        try:
            reference, changed = rendered(ours, messages, {**options, "return_dict": False})
            marked: Any = theirs.apply_chat_template(changed, **options, return_dict=True, return_assistant_tokens_mask=True)
            encoder = Encoder(ours, TokenizerConfig(), DataConfig(learn_prefilled=True), DatasetConfig(messages_key="messages"))
            tokens, mask = encoder.conversation({"messages": messages, **options})
        except Exception:
            counts["refused"] += 1
            continue
        if theirs.decode(marked["input_ids"]) != ours.decode(reference):
            counts["another text"] += 1
            continue
        text, their_text = (
            learned_text(ours, tokens, mask),
            learned_text(theirs, marked["input_ids"], marked["assistant_masks"]),
        )
        counts["equal" if text == their_text else "different"] += 1
        why = why or ("" if text == their_text else f"{form}: {text} TRL: {their_text}")
    return counts, why


def learned_text(tokenizer: Any, tokens: Any, mask: Any) -> list[str]:
    """Return the learned spans, without the white space that a template writes after a turn."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, bool), prepend=False, append=False)).tolist()
    return [str(tokenizer.decode(tokens[a:b])).rstrip() for a, b in zip(edges[::2], edges[1::2], strict=True)]


def main(arguments: list[str]) -> int:
    if not arguments or not Path(arguments[0]).is_dir() or not SMOLLM2:
        print(__doc__)
        return 2
    files = [path for path in sorted(Path(arguments[0]).glob("*.jinja")) if not path.stem.endswith("_training")]
    totals: collections.Counter = collections.Counter()
    reasons: list[str] = []
    print(f"{'template':48}" + " ".join(f"{form:10}" for form in FORMS))
    for path in files:
        try:
            found = outcomes(path.read_text())
        except Exception as error:  # a template that does not compile
            print(f"{path.stem[:47]:48}{type(error).__name__}: {error}")
            totals["unreadable"] += 1
            continue
        totals.update(one.result for one in found)
        print(f"{path.stem[:47]:48}" + " ".join(f"{one.result:10}" for one in found), flush=True)
        reasons += [f"{path.stem} {one.form}: {one.result}: {one.why}" for one in found if one.why]
    print("\n".join(["", *reasons, "", f"{len(files)} templates, {len(FORMS)} forms: {dict(totals)}"]))
    if len(arguments) > 1:
        print("\n".join(["", "TRL's training templates:", *against_trl(Path(arguments[1]))]))
    return 1 if totals["different"] or not totals["equal"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
