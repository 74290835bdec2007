"""Every key of the schema is read somewhere."""

import ast
from pathlib import Path

from pipeline.config import reference, schema_validation
from pipeline.config.config_tree import ConfigMapping, ConfigValue
from pipeline.config.schema import Recipe
from pipeline.trackers import TRACKERS

ROOT = Path(__file__).parent.parent


def names_used() -> set[str]:
    """Return the attributes that the code reads, and its string constants, which getattr(section, name) may read."""
    found = set()
    for path in [*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("launch/**/*.py")]:
        if path.parent.name in ("config", "nemo_rl") or path.name.startswith("preflight"):
            continue  # a check that reads a key gives it no effect
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


LEAVES = [
    key
    for key in schema_validation.keys(Recipe)
    if not any(other.startswith(f"{key}.") for other in schema_validation.keys(Recipe))
]


def test_every_key_is_read_somewhere():
    used = names_used()
    names = {key: key.rpartition(".")[2] for key in LEAVES}
    prefixed = {f"val_{name}" for name in used if "val_" in used}  # read by getattr(section, f"{prefix}{name}")
    switches = {f"{name}_enabled" for name in TRACKERS}  # read by getattr(logger, f"{name}_enabled")
    unread = {key for key, name in names.items() if name not in used | prefixed | switches}
    assert unread == set()


def test_true_is_neither_a_number_nor_a_string_for_any_key():
    kinds = ("whole number", "number", "text")
    names = [key.name for key in reference.keys().values() if key.type.startswith(kinds)]
    taken = []
    for name in names:
        tree = schema_validation.with_defaults(Recipe, ConfigMapping())
        tree.set(name, ConfigValue(True))
        if name not in {problem.key for problem in schema_validation.validate_tree(Recipe, tree)[1]}:
            taken.append(name)
    assert len(names) > 150 and taken == []
