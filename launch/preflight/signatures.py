"""Read the parameters of a library's classes from its source. Importing the library would take seconds.

The module does not see classes that are made at run time, nor parameters that a class takes through `**kwargs`, except for
those of its base classes.
"""

from __future__ import annotations

import ast
import importlib.util
from functools import cache
from pathlib import Path

Parameters = dict[str, str | None]
"""Parameter name -> its annotation as written in the source; None without an annotation."""


class NoSuchClass(LookupError):
    """Raised if the library is installed but has no such class."""


@cache
def parameters(dotted: str) -> Parameters | None:
    """Return the parameters of a class, without `self`; None if they are not known. Raises NoSuchClass.

    They are not known if the library is not installed, or the class takes **kwargs.
    """
    module, _, name = dotted.rpartition(".")
    if not module or not _roots(module.partition(".")[0]):
        return None
    class_node = _class(module, name)
    if class_node is None:
        raise NoSuchClass(dotted)
    return _parameters_of(*class_node)


@cache
def required_parameters(dotted: str) -> tuple[str, ...]:
    """Return the parameters of a class that have no default, without `self`; none if they are not known."""
    module, _, name = dotted.rpartition(".")
    class_node = _class(module, name) if module and _roots(module.partition(".")[0]) else None
    for item in class_node[1].body if class_node else ():
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            positional = [*item.args.posonlyargs, *item.args.args]
            named = [a for a, value in zip(item.args.kwonlyargs, item.args.kw_defaults, strict=True) if value is None]
            return tuple(a.arg for a in [*positional[: len(positional) - len(item.args.defaults)][1:], *named])
    return ()


@cache
def _roots(package: str) -> tuple[Path, ...]:
    """Return the folders of a top-level package; none if it is not installed."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return ()
    return tuple(map(Path, spec.submodule_search_locations or ())) if spec else ()


@cache
def module(dotted: str) -> ast.Module | None:
    """Return the syntax tree of a module's source; None if the source is not found."""
    package, *path = dotted.split(".")
    for root in _roots(package):
        for file in (root.joinpath(*path, "__init__.py"), root.joinpath(*path).with_suffix(".py") if path else root):
            if file.is_file():
                return ast.parse(file.read_bytes())
    return None


def _class(dotted: str, name: str, visited: frozenset[str] = frozenset()) -> tuple[str, ast.ClassDef] | None:
    """Return (module, class) for a name that a module defines or imports."""
    if dotted in visited or (tree := module(dotted)) is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return dotted, node
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _class(_imported_from(dotted, node), alias.name, visited | {dotted})
    return None


def _imported_from(dotted: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = dotted.split(".") if _is_package(dotted) else dotted.split(".")[:-1]
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


def _is_package(dotted: str) -> bool:
    package, *path = dotted.split(".")
    return any(root.joinpath(*path, "__init__.py").is_file() for root in _roots(package))


def _parameters_of(dotted: str, node: ast.ClassDef) -> Parameters | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            if item.args.kwarg is not None:
                return None
            arguments = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs][1:]
            return {a.arg: ast.unparse(a.annotation) if a.annotation else None for a in arguments}
    return fields(dotted, node)


def fields(dotted: str, node: ast.ClassDef) -> Parameters:
    """Return name -> annotation for the annotated fields of a class and of its bases, as in a dataclass."""
    annotated: Parameters = {}
    for base in reversed(node.bases):
        if isinstance(base, ast.Name) and (above := _class(dotted, base.id)):
            annotated |= fields(*above)
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            annotated[item.target.id] = ast.unparse(item.annotation)
    return {name: kind for name, kind in annotated.items() if not (kind or "").startswith("ClassVar")}
