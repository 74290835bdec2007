"""Describe the keys of the schema: `submit.py help=KEY`, recipes/KEYS.md for readers, recipes/schema.json for editors.

python -m pipeline.config.reference      regenerate recipes/KEYS.md and recipes/schema.json after a change of the schema
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import json
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from pipeline.config import fixed_keys, live_keys, schema_validation, unused_keys
from pipeline.config.config_tree import RECIPES, REPLACES, ConfigMapping, ConfigValue
from pipeline.config.environments import KINDS, kind_class
from pipeline.config.formatting import on_one_line
from pipeline.config.schema import Recipe, recipe_class
from pipeline.recipe.problems import Problem, RecipeError
from pipeline.recipe.values import MISSING
from pipeline.seams import entry_points

NAMES = {"integer": "whole number", "number": "number", "boolean": "true or false", "string": "string", "object": "mapping"}
BOUNDS = {  # name in pydantic -> (keyword in JSON schema, name in messages)
    "ge": ("minimum", "at least"),
    "gt": ("exclusiveMinimum", "above"),
    "le": ("maximum", "at most"),
    "lt": ("exclusiveMaximum", "below"),
}
REPLACED = {"type": "boolean", "description": "true: replace the inherited mapping instead of merging with it."}
NAME = "NAME"
"""Placeholder in a key for a name that the recipe gives, such as that of an environment."""
LONGEST = 120  # characters of a default, at most
GROUPS = {"algorithm": "hetstep.algorithms", "env.NAME.kind": "hetstep.environments", "policy.megatron_cfg": "hetstep.families"}
"""Key -> group of entry points, whose parts its help lists."""
KWARGS = f"env.{NAME}.kwargs"


HEAD = """# Keys of a recipe

`python -m pipeline.config.reference` generates this page from the schema in `pipeline/config/`; do not edit it.
`python launch/submit.py help=KEY` prints the same for one key or section.

A value may be an interpolation, such as `${policy.precision}`. A key without a default is required, unless its meaning says
otherwise. NAME stands for a name that the recipe gives. A key that is Live may change while the run goes on, by
`python launch/steer.py RUN_DIR key=value`."""


@dataclass(frozen=True)
class KeyReference:
    """A key of the schema. A section is a key that contains other keys; it has no default, or null."""

    name: str  # dotted, with NAME where the recipe gives a name
    type: str
    default: str  # as YAML
    meaning: str
    section: str = ""  # the name of its class

    @property
    def parent(self) -> str:
        """The dotted key of the section that contains this key; empty on the first level."""
        return self.name.rpartition(".")[0]


# ---- the schema as JSON schema ----------------------------------------------------------------------------------------------


class _Generator(GenerateJsonSchema):
    """Pydantic's generator of JSON schemas, which also writes bounds and defaults, omits titles and forbids unknown keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate_inner(self, schema: Any) -> dict[str, Any]:
        return {BOUNDS[name][0] if name in BOUNDS else name: one for name, one in super().generate_inner(schema).items()}

    def dataclass_schema(self, schema: Any) -> dict[str, Any]:
        found = super().dataclass_schema(schema)
        del found["title"]
        found.pop("required", None)  # another file may give the value
        defaults = schema_validation.defaults(schema["cls"]).plain()
        meanings = _meanings(schema["cls"])
        for name, described in found["properties"].items():
            if name in meanings:
                described["description"] = meanings[name]
            described.pop("default", None)
            if "$ref" not in described and defaults[name] != MISSING:
                described["default"] = defaults[name]
        return {**found, "additionalProperties": False}


def _meanings(section: type) -> dict[str, str]:
    """Return key -> the text below its field in the source, for the fields of a section and of its bases that have one."""
    found = {}
    for base in reversed(section.__mro__):
        with contextlib.suppress(OSError, TypeError):  # a class without a source, such as one made from the registries
            (defined,) = ast.parse(inspect.getsource(base)).body
            assert isinstance(defined, ast.ClassDef)
            for field, text in itertools.pairwise(defined.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(meaning))):
                        found[name] = " ".join(meaning.split())
    return found


@cache
def _described(section: type = Recipe) -> dict[str, Any]:
    """Return the JSON schema of a section, without interpolations."""
    return schema_validation.adapter(section).json_schema(schema_generator=_Generator)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a recipe's file, in which values may be interpolations."""
    whole = json.loads(json.dumps(_described()))
    sections = whole.pop("$defs")
    environment = sections["EnvironmentConfig"]["allOf"] = []
    for kind in KINDS.built_in:
        arguments = kind_class(kind).Arguments
        sections[arguments.__name__] = json.loads(json.dumps(_described(arguments)))
        condition = {"properties": {"kind": {"const": kind}}, "required": ["kind"]}
        given = _or_interpolation({"$ref": f"#/$defs/{arguments.__name__}"})
        environment.append({"if": condition, "then": {"properties": {"kwargs": given}}})
    for section in (whole, *sections.values()):
        for name, described in section["properties"].items():
            section["properties"][name] = _or_interpolation(described)
        section["properties"][REPLACES] = REPLACED
    names = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    whole["properties"]["defaults"] = {
        **names,
        "description": "Parents of this recipe: files next to it, or recipes in recipes/.",
    }
    sections["interpolation"] = {
        "type": "string",
        "pattern": r"\$\{|^\?\?\?$",
        "description": "${another.key}, or ??? if another file must give the value.",
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Hetstep recipe"}
    return {**head, **whole, "$defs": sections}


def _or_interpolation(described: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value that may also be an interpolation. Values inside a mapping may be interpolations too.

    We use `else`, not `anyOf`, so that a validator reports the wrong key or value itself and not the section around it.
    """
    about = {name: described.pop(name) for name in ("description", "default") if name in described}
    choices = described.get("anyOf", [described])
    if choices == [{}]:  # anything
        return about
    for choice in choices:
        if isinstance(values := choice.get("additionalProperties"), dict):
            choice |= {"additionalProperties": _or_interpolation(values), "properties": {REPLACES: REPLACED}}
    return {"if": {"$ref": "#/$defs/interpolation"}, "else": described, **about}


# ---- its keys ---------------------------------------------------------------------------------------------------------------


@cache
def keys(schema: type[Any] = Recipe) -> dict[str, KeyReference]:
    """Return dotted key -> its reference, for all keys of a schema. A section comes before its keys."""
    described, defaults = _described(schema), schema_validation.with_defaults(schema, ConfigMapping())
    return {key.name: key for key in _keys(described, "", defaults, described["$defs"])}


@cache
def kwargs(kinds: tuple[str, ...] | None = None) -> dict[str, list[KeyReference]]:
    """Return kind of environment -> the keys of its kwargs. kinds: None: ours."""
    found = {}
    for kind in KINDS.built_in if kinds is None else kinds:
        arguments = kind_class(kind).Arguments
        described = _described(arguments)
        found[kind] = list(_keys(described, f"{KWARGS}.", schema_validation.defaults(arguments), described.get("$defs", {})))
    return found


def _keys(section: dict[str, Any], prefix: str, defaults: ConfigMapping, sections: dict[str, Any]) -> Iterator[KeyReference]:
    for name, described in section["properties"].items():
        kinds = [kind for kind in described.get("anyOf", [described]) if kind != {"type": "null"}]
        values = kinds[0].get("additionalProperties")
        inner = values if isinstance(values, dict) and "$ref" in values else kinds[0]
        own = inner.get("$ref", "").rpartition("/")[2]
        about = sections.get(own, {})
        given = defaults.find(name)
        default = (
            given.plain() if isinstance(given, ConfigMapping) else given.value if given else described.get("default", MISSING)
        )
        yield KeyReference(
            f"{prefix}{name}",
            _type(described),
            ""
            if default == MISSING or (own and default is not None)
            else textwrap.shorten(on_one_line(default), LONGEST, placeholder=" ..."),
            " ".join(filter(None, (described.get("description"), about.get("description"), _live(f"{prefix}{name}")))),
            own,
        )
        if own:
            below = f"{prefix}{name}.{NAME}." if inner is values else f"{prefix}{name}."
            inside = given if isinstance(given, ConfigMapping) and inner is not values else ConfigMapping()
            yield from _keys(about, below, inside, sections)


def _live(key: str) -> str:
    """Return a sentence for the meaning of a key that may change during a run, or of which an entry may; empty for others."""
    entries = [live.removeprefix(key).lstrip(".") for live in _live_names() if f"{live}.".startswith(f"{key}.")]
    if entries == [""]:
        return "Live."
    entries = [entry for entry in entries if entry and key.endswith(".kwargs")]
    return f"Live: {', '.join(entries)}." if entries else ""


@cache
def _live_names() -> list[str]:
    return [key.replace(f".{live_keys.ANY}.", f".{NAME}.") for key in live_keys.patterns()]


def _type(described: dict[str, Any]) -> str:
    """Return a readable type of a key, with its range or choices."""
    if "anyOf" in described:
        return " or ".join("null" if kind == {"type": "null"} else _type(kind) for kind in described["anyOf"])
    if "enum" in described or "const" in described:
        return ", ".join(map(str, described.get("enum", [described.get("const")])))
    if "$ref" in described:
        return "section"
    if described.get("type") == "array":
        return f"list of {_type(described['items'])}"
    if "$ref" in str(described.get("additionalProperties")):
        return f"mapping of {NAME} to section"
    ranges = [f"{words} {described[name]:.15g}" for name, words in BOUNDS.values() if name in described]
    return ", ".join([NAMES.get(described.get("type", ""), "anything"), *ranges])


# ---- help and KEYS.md -------------------------------------------------------------------------------------------------------


def names_kwargs(key: str) -> bool:
    """Return whether a dotted key is `env.NAME.kwargs`, or inside it."""
    return _generic(key) == KWARGS


def explained(key: str, kinds: Collection[str] | None = None) -> str:
    """Return a text with type, default and meaning of a key, or of a section and its keys. "" means the first level.

    kinds: kinds of environments to list for `env.NAME.kwargs`; None: all. Raise RecipeError, which names the most similar key,
    for an unknown key.
    """
    schema = recipe_class(None)
    name = _generic(key, schema)
    if name is None:
        tree = ConfigMapping()
        tree.set(key, ConfigValue(None))
        if fixed := fixed_keys.hint(key):
            raise RecipeError(Problem("help", "unknown-key", f"got '{key}'; {fixed}"))
        problems = list(schema_validation.unknown_keys(schema, tree, advice=unused_keys.Readers.of_tree(tree)))
        if not problems:  # the key is inside a value, not a section
            parent = key.rpartition(".")[0]
            while _generic(parent, schema) is None:
                parent = parent.rpartition(".")[0]
            raise RecipeError(Problem("help", "unknown-key", f"got '{key}'; {parent} is a value, not a section"))
        problem = problems[0]
        raise RecipeError(Problem("help", "unknown-key", f"got '{problem.key}', which {problem.message}"))
    own = [keys(schema)[name]] if name in keys(schema) else []
    lines = [*map(_paragraph, [*own, *_inside(name, schema)])]
    for kind, inside in kwargs(tuple(KINDS if kinds is None else kinds)).items() if name == KWARGS else ():
        lines += ["", f"kind: {kind}", *map(_paragraph, inside)]
    if name in GROUPS and (installed := entry_points.described(GROUPS[name])):
        lines += ["", "of installed packages:", *(f"    {line}" for line in installed)]
    return "\n".join(lines)


def _inside(section: str, schema: type[Any] = Recipe) -> list[KeyReference]:
    """Return the keys of a section, without those of its subsections."""
    return [key for key in keys(schema).values() if key.parent in (section, f"{section}.{NAME}".lstrip("."))]


def _generic(key: str, schema: type[Any] = Recipe) -> str | None:
    """Return a dotted key in the form of `keys`, in which NAME stands for a recipe's name; None if the schema lacks it."""
    ours = keys(schema)
    known, found = {*ours, *(key.parent for key in ours.values())}, ""
    for part in filter(None, key.split(".")):
        if found in ours and ours[found].type.startswith("mapping") and not ours[found].section:
            return found  # its values have no description
        candidates = [f"{found}.{name}".lstrip(".") for name in (part, NAME)]
        if (found := next((name for name in candidates if name in known), None)) is None:
            return None
    return found


def _paragraph(key: KeyReference) -> str:
    head = f"{key.name}: {key.type}"
    if key.default:
        head += f"; default {key.default}"
    elif not key.section and "Default:" not in key.meaning:
        head += "; required"
    meaning = " ".join(key.meaning.split())
    return "\n".join([head, *textwrap.wrap(meaning, 100, initial_indent="    ", subsequent_indent="    ")])


def markdown() -> str:
    """Return the content of recipes/KEYS.md."""
    lines = [HEAD]
    first: dict[str, str] = {}  # class -> the section that lists its keys
    for section in ("", *(key.name for key in keys().values() if key.section)):
        inside = _inside(section)
        if section:
            own, title = keys()[section], inside[0].parent
            other = first.setdefault(own.section, title)
            lines += ["", f"## {title}", "", own.meaning]
            if other != title:
                before = {key.name.removeprefix(other): key.default for key in _inside(other)}
                inside = [key for key in inside if before[key.name.removeprefix(title)] != key.default]
                link = f"[{other}](#{other.lower().replace('.', '')})"
                lines += ["", f"It has the keys of {link}{', with other defaults:' * bool(inside)}{'.' * (not inside)}"]
        lines += _table(inside)
    for kind, inside in kwargs().items():
        lines += ["", f"## {KWARGS} with kind: {kind}", *(_table(inside) or ["", "There are none."])]
    return "\n".join(lines) + "\n"


def _table(keys: list[KeyReference]) -> list[str]:
    return ["", "| key | type | default | meaning |", "| --- | --- | --- | --- |", *map(_row, keys)] if keys else []


def _row(key: KeyReference) -> str:
    default = f"`{key.default}`" if key.default else ""
    cells = (f"`{key.name.rpartition('.')[2]}`", key.type, default, " ".join(key.meaning.split()))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def write(folder: Path = RECIPES) -> None:
    """Write KEYS.md and schema.json into a folder."""
    (folder / "KEYS.md").write_text(markdown())
    (folder / "schema.json").write_text(json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write()
