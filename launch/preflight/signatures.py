"""Read the signatures of functions and classes from their source.

Importing a library takes seconds (torch 2, transformers 5, vLLM 8 of CPU time), may need GPUs, and importing a stranger's code
runs it. The source does not show classes that are made at run time, nor parameters that a class takes through `**kwargs`.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any


class NoSuchClass(LookupError):
    """Raised if the library is installed but has no such class."""


class SourceText(str):
    """The source of a parameter's default, which is its repr."""

    def __repr__(self) -> str:
        return self if len(self) <= 40 else "..."


def module_spec(dotted: str, folders: Sequence[Path] = ()) -> ModuleSpec | None:
    """Return the spec of a module, found as an import finds it, but without importing the packages above it.

    folders: searched after installed packages. Returns None if there is no such module.
    """
    top, *inner = dotted.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:  # a folder without __init__.py, which any other module hides
        spec = PathFinder.find_spec(top, [*map(str, folders)]) or spec
    for part in inner:
        spec = PathFinder.find_spec(part, [*map(str, spec.submodule_search_locations or ())]) if spec else None
    return spec


def module(dotted: str, folders: Sequence[Path] = ()) -> ast.Module | None:
    """Return the syntax tree of a module; None if its source is not found. folders: as of `module_spec`."""
    spec = module_spec(dotted, folders)
    return _parsed(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


@cache
def _parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_bytes())


def absolute(dotted: str, is_package: bool, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module that a `from ... import` statement of the module `dotted` names."""
    if not node.level:
        return node.module or ""
    above = dotted.split(".")[: None if is_package else -1]
    return ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])


def signature_of(arguments: ast.arguments) -> Signature:
    """Return the signature of a definition. Annotations are their source, and defaults are SourceText."""
    positional = [*arguments.posonlyargs, *arguments.args]
    kinds: list[Any] = [Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    defaults = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults]
    rows = [
        *zip(kinds, positional, defaults, strict=True),
        (Parameter.VAR_POSITIONAL, arguments.vararg, None),
        *((Parameter.KEYWORD_ONLY, *row) for row in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)),
        (Parameter.VAR_KEYWORD, arguments.kwarg, None),
    ]
    return Signature([_parameter(kind, argument, default) for kind, argument, default in rows if argument])


def _parameter(kind: Any, argument: ast.arg, default: ast.expr | None) -> Parameter:
    value = Parameter.empty if default is None else SourceText(ast.unparse(default))
    annotation = ast.unparse(argument.annotation) if argument.annotation else Parameter.empty
    return Parameter(argument.arg, kind, default=value, annotation=annotation)


# ---- classes of libraries -----------------------------------------------------------------------------------------------


@cache
def signature(dotted: str, folders: tuple[Path, ...] = ()) -> Signature | None:
    """Return the signature of a class, without *args; None if it is not known. Raises NoSuchClass.

    It is not known if the library is not installed, the class takes **kwargs, or a base with the signature is not found.
    folders: searched after installed packages.
    """
    module_name, _, name = dotted.rpartition(".")
    if not module_name or module_spec(module_name.partition(".")[0], folders) is None:
        return None
    if (definition := _class(module_name, name, folders)) is None:
        raise NoSuchClass(dotted)
    for item in definition[1].body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            parameters = [*signature_of(item.args).parameters.values()][1:]
            keywords = [parameter for parameter in parameters if parameter.kind is not Parameter.VAR_POSITIONAL]
            return None if item.args.kwarg else Signature(keywords)
    annotated = fields(*definition)
    return Signature([*annotated.values()]) if annotated else _inherited(*definition, folders)


def _inherited(dotted: str, node: ast.ClassDef, folders: tuple[Path, ...]) -> Signature | None:
    """Return the signature that a class of the module `dotted` inherits from its first base."""
    if not node.bases:
        return Signature([])
    base = ast.unparse(node.bases[0])
    if "." not in base and (above := _class(dotted, base, folders)) is not None and above[1] is not node:
        base = f"{above[0]}.{above[1].name}"
    try:
        return signature(base, folders)
    except NoSuchClass:
        return None


def fields(dotted: str, node: ast.ClassDef) -> dict[str, Parameter]:
    """Return name -> parameter for the annotated fields of a class of the module `dotted` and of its bases."""
    annotated: dict[str, Parameter] = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and (above := _class(dotted, base.id)):
            annotated |= fields(*above)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            argument = ast.arg(item.target.id, item.annotation)
            annotated[argument.arg] = _parameter(Parameter.KEYWORD_ONLY, argument, item.value)
    return {name: field for name, field in annotated.items() if not field.annotation.startswith("ClassVar")}


def _class(
    dotted: str, name: str, folders: tuple[Path, ...] = (), visited: frozenset[str] = frozenset()
) -> tuple[str, ast.ClassDef] | None:
    """Return (module, class) for a name that a module defines or imports."""
    if dotted in visited or (tree := module(dotted, folders)) is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return dotted, node
    for node in [node for node in tree.body if isinstance(node, ast.ImportFrom)]:
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                spec = module_spec(dotted, folders)
                is_package = spec is not None and spec.submodule_search_locations is not None
                return _class(absolute(dotted, is_package, node), alias.name, folders, visited | {dotted})
    return None
