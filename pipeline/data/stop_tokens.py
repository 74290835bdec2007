"""Decide which tokens end a completion, in one place for training, sampling, judging and export.

The stop tokens are the union of

    the tokenizer's eos token               base models: <|endoftext|>
    generation_config.json eos_token_id     chat models list several
    config.json eos_token_id                also of `text_config`; recipe: hf_config_overrides
    the chat template's end of a turn       supervised training teaches it, `pipeline/data/turn_ends.py`

so sampling stops at the end of a turn, whichever of these tokens the policy was trained to write there. The union also applies
to prompts without a chat template: one engine serves both kinds of prompts, and special tokens are no part of an answer's text.
Engines also stop at policy.generation.stop_token_ids. An export has the union in its generation_config.json.

We ignore an id in config.json that is an ordinary word of the tokenizer: transformers writes its model classes' default there,
such as 2, whatever the tokenizer's token 2 is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import PolicyConfig
from pipeline.data.chat import load_tokenizer
from pipeline.data.turn_ends import TurnEnds, find_turn_ends
from pipeline.recipe import user_files
from pipeline.recipe.problems import Problem, RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG, GENERATION = "config.json", "generation_config.json"
TEMPLATE = "chat template"


@dataclass(frozen=True, slots=True)
class StopToken:
    """A token that ends a completion."""

    id: int
    text: str
    sources: tuple[str, ...]  # such as generation_config.json

    def __str__(self) -> str:
        return f"{self.id} {self.text} ({', '.join(self.sources)})"


@dataclass(frozen=True, slots=True)
class StopTokens:
    """The tokens that end a completion."""

    tokens: tuple[StopToken, ...]
    """In the order of their ids."""
    taught: int | None
    """The id of the token with which the chat template ends a conversation; None if it ends with no token."""
    notes: tuple[str, ...] = ()
    """Notes on tokens that do not count as stop tokens, with the reason."""

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids of the stop tokens, in ascending order."""
        return tuple(token.id for token in self.tokens)

    @property
    def exported(self) -> int | list[int] | None:
        """The value of eos_token_id in generation_config.json. In a list, the id that training teaches comes first."""
        ids = sorted(self.ids, key=lambda id: id != self.taught)
        return ids if len(ids) > 1 else ids[0] if ids else None


def stop_tokens(policy: PolicyConfig) -> StopTokens:
    """Return the stop tokens of a model. Loads its tokenizer. Raises RecipeError for files that cannot be read."""
    files = [model_file(policy.model_name, name) for name in (GENERATION, CONFIG)]
    generation, config = ({} if path is None else read_config(path) for path in files)
    tokenizer = load_tokenizer(policy.tokenizer)
    ends = find_turn_ends(tokenizer, policy.tokenizer.chat_template_kwargs)
    return decide(tokenizer, ends, generation, config, policy.hf_config_overrides)


def decide(
    tokenizer: PreTrainedTokenizerBase,
    ends: TurnEnds,
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    overrides: Mapping[str, Any],
) -> StopTokens:
    """Return the stop tokens that these files and the recipe define.

    ends: the turn ends of the tokenizer's chat template. generation, config: the content of generation_config.json and of
    config.json; empty if the model lacks the file. overrides: the recipe's hf_config_overrides. Raises RecipeError for values
    that are no token ids.
    """
    sources: dict[int, list[str]] = {}
    notes: list[str] = []
    eos: Any = tokenizer.eos_token_id  # typed as for a batch of ids
    if eos is not None:
        sources[eos] = ["tokenizer"]
    for id in _ids(generation.get("eos_token_id"), GENERATION):
        sources.setdefault(id, []).append(GENERATION)
    marks = tokenizer.added_tokens_decoder
    for source, id in _config_ids(config, overrides):
        if id in sources or id in marks:
            sources.setdefault(id, []).append(source)
        else:
            text = str(tokenizer.convert_ids_to_tokens(id))
            notes.append(f"eos_token_id {id} of {source} does not end answers, because {text!r} is not a special token")
    for text in ends.stops:
        sources.setdefault(_id(tokenizer, text), []).append(TEMPLATE)
    if tokenizer.chat_template and not ends.stops:
        notes.append(f"the chat template ends no turn with a token: {ends.why}")
    tokens = [
        StopToken(id, str(tokenizer.convert_ids_to_tokens(id)), tuple(dict.fromkeys(sources[id]))) for id in sorted(sources)
    ]
    return StopTokens(tuple(tokens), _id(tokenizer, ends.last) if ends.last else None, tuple(notes))


def _id(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    id: Any = tokenizer.convert_tokens_to_ids(text)  # typed as for a batch of tokens
    return id


def _config_ids(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Iterable[tuple[str, int]]:
    """Yield (source, id) of each eos_token_id of a model's config, of its `text_config`, and of the overrides of both."""
    given_texts = (values.get("text_config") for values in (config, overrides))
    text, over = (value if isinstance(value, Mapping) else {} for value in given_texts)  # `config_values` refuses others
    values_of = {**({CONFIG: config["eos_token_id"]} if "eos_token_id" in config else {})}
    if "eos_token_id" in text:
        values_of[f"{CONFIG} text_config"] = text["eos_token_id"]
    for source, values in ((CONFIG, overrides), (f"{CONFIG} text_config", over)):
        if "eos_token_id" in values:
            values_of.pop(source, None)
            values_of[source.replace(CONFIG, "hf_config_overrides")] = values["eos_token_id"]
    for source, value in values_of.items():
        yield from ((source, id) for id in _ids(value, source))


def _ids(value: Any, source: str) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if wrong := [id for id in ids if not isinstance(id, int) or isinstance(id, bool) or id < 0]:
        message = f"{source}: got {wrong[0]!r}; expected token ids, such as 2 or [0, 2]"
        raise RecipeError(Problem("policy.model_name", "bad-format", f"eos_token_id of {message}"))
    return ids


def model_file(name: str, file: str) -> Path | None:
    """Return the path of a model's file, in the model's folder or in the local cache; None if there is no such file."""
    from transformers.utils.hub import cached_file  # submission may lack it

    path = cached_file(name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises RecipeError if the file cannot be read or has no JSON object."""
    try:
        content = json.loads(user_files.read_text(path))
    except OSError as error:
        raise RecipeError(Problem(str(path), "unreadable", error.strerror or str(error))) from None
    except (ValueError, RecursionError) as error:
        raise RecipeError(Problem(str(path), "bad-format", f"not JSON: {error}")) from None
    if not isinstance(content, dict):
        raise RecipeError(Problem(str(path), "bad-format", f"got a JSON {type(content).__name__}; expected an object"))
    return content
