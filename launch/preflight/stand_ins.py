"""Make stand-ins for the functions and classes in a syntax tree: they have its names and signatures, and none of its code."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

UNKNOWN: Any = object()
"""What the source does not show."""
UNSET = (
    "__slots__",
    "__class__",
    "__dict__",
    "__weakref__",
    "__module__",
    "__init_subclass__",
    "__set_name__",
    "__class_getitem__",
)
"""Attributes that Python itself reads while it makes a class."""


class _Default:
    """The default of a parameter, which shows its source."""

    def __init__(self, node: ast.expr) -> None:
        self._text = ast.unparse(node)

    def __repr__(self) -> str:
        return self._text if len(self._text) <= 40 else "..."


def function_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Any:
    """Return a function with the signature in the source; UNKNOWN if a decorator may change it."""
    if getattr(node, "decorator_list", ()):
        return UNKNOWN
    return _function(node)


def class_of(node: ast.ClassDef, bases: Sequence[Any]) -> Any:
    """Return a class with these bases and with the methods in the source; UNKNOWN if they do not show it."""
    if node.decorator_list or node.keywords or not all(isinstance(base, type) for base in bases):
        return UNKNOWN
    members = {name: _member(found) for name, found in bindings(node.body).items() if name not in UNSET}
    try:
        return types.new_class(node.name, tuple(bases), {}, lambda namespace: namespace.update(members))
    except Exception:  # such as bases that do not go together, which only the import reports
        return UNKNOWN


def _member(node: ast.AST) -> Any:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = [ast.unparse(each).rpartition(".")[2] for each in node.decorator_list]
        made = _function(node if not set(decorators) - {"abstractmethod", "override"} else None)
        if "abstractmethod" in decorators:
            made.__isabstractmethod__ = True
        return property(made) if {"property", "cached_property"} & {*decorators} else made
    if isinstance(node, ast.Constant):
        return node.value
    return _function(None)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None) -> Any:
    """Return a function that does nothing. None: it takes any arguments."""

    async def coroutine(*args: Any, **kwargs: Any) -> None: ...

    def plain(*args: Any, **kwargs: Any) -> None: ...

    stand_in: Any = coroutine if isinstance(node, ast.AsyncFunctionDef) else plain
    if node is not None:
        stand_in.__signature__ = _signature(node.args)
        stand_in.__name__ = stand_in.__qualname__ = getattr(node, "name", "<lambda>")
    return stand_in


def _signature(given: ast.arguments) -> inspect.Signature:
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    kinds = [inspect.Parameter.POSITIONAL_ONLY] * len(given.posonlyargs)
    kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(given.args)
    found = [_parameter(one.arg, kind, default) for one, kind, default in zip(positional, kinds, defaults, strict=True)]
    found += [_parameter(given.vararg.arg, inspect.Parameter.VAR_POSITIONAL, None)] if given.vararg else []
    named = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    found += [_parameter(one.arg, inspect.Parameter.KEYWORD_ONLY, default) for one, default in named]
    found += [_parameter(given.kwarg.arg, inspect.Parameter.VAR_KEYWORD, None)] if given.kwarg else []
    return inspect.Signature(found)


def _parameter(name: str, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is None else _Default(default))


# ---- names --------------------------------------------------------------------------------------------------------------


def bindings(body: Sequence[ast.stmt]) -> dict[str, ast.AST]:
    """Return what the statements of a module or a class bind to each name, also within `if`, `try` and `with`.

    A definition, the value of an assignment, or the import statement. Of several, the last.
    """
    found: dict[str, ast.AST] = {}
    for node in statements(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name.partition(".")[0]): node for alias in node.names if alias.name != "*"}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = None if isinstance(node, ast.AugAssign) else node.value
            for target in targets if value is not None or isinstance(node, ast.AugAssign) else ():
                whole = isinstance(target, ast.Name)
                found |= dict.fromkeys(_stored(target), value if whole and value is not None else node)
        elif isinstance(node, ast.For | ast.AsyncFor):
            found |= dict.fromkeys(_stored(node.target), node)
        elif isinstance(node, ast.With | ast.AsyncWith):
            found |= {name: node for item in node.items if item.optional_vars for name in _stored(item.optional_vars)}
    return found


def statements(body: Sequence[ast.stmt], always: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements of a block, with those in blocks inside it but not in functions and classes.

    always: only those that certainly run.
    """
    for node in body:
        yield node
        if not always and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, inner, ()))
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from statements(part.body)


def _stored(target: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
