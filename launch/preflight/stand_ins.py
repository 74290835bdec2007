"""Make stand-ins for the functions and classes of a syntax tree: objects with the same names and signatures, but no code."""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator, Sequence
from typing import Any

UNKNOWN: Any = object()
"""Stands for a value that the source does not show."""
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
MAKE_NAMES = ("globals", "vars", "exec")
"""Functions by which a module binds names that its source does not show."""


class _Default:
    """Stands for the default of a parameter. Its repr is the default's source."""

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
    """Return a class with these bases and the methods in the source; UNKNOWN if bases and source do not determine it."""
    if node.decorator_list or node.keywords or not all(isinstance(base, type) for base in bases):
        return UNKNOWN
    members = {name: _member(definition) for name, definition in bindings(node.body).items() if name not in UNSET}
    try:
        return types.new_class(node.name, tuple(bases), {}, lambda namespace: namespace.update(members))
    except Exception:  # such as bases that do not go together, which only the import reports
        return UNKNOWN


def _member(node: ast.AST | None) -> Any:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = [ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list]
        stand_in = _function(node if not set(decorators) - {"abstractmethod", "override"} else None)
        if "abstractmethod" in decorators:
            stand_in.__isabstractmethod__ = True
        return property(stand_in) if {"property", "cached_property"} & {*decorators} else stand_in
    if isinstance(node, ast.Constant):
        return node.value
    return _function(None)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | None) -> Any:
    """Return a function that does nothing and has the signature of a definition, or takes any arguments if `node` is None."""

    async def coroutine(*args: Any, **kwargs: Any) -> None: ...

    def plain(*args: Any, **kwargs: Any) -> None: ...

    stand_in: Any = coroutine if isinstance(node, ast.AsyncFunctionDef) else plain
    if node is not None:
        stand_in.__signature__ = _signature(node.args)
        stand_in.__name__ = stand_in.__qualname__ = getattr(node, "name", "<lambda>")
    return stand_in


def _signature(arguments: ast.arguments) -> inspect.Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    kinds = [inspect.Parameter.POSITIONAL_ONLY] * len(arguments.posonlyargs)
    kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(arguments.args)
    parameters = [
        _parameter(argument.arg, kind, default) for argument, kind, default in zip(positional, kinds, defaults, strict=True)
    ]
    parameters += [_parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL, None)] if arguments.vararg else []
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [_parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default) for argument, default in named]
    parameters += [_parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, None)] if arguments.kwarg else []
    return inspect.Signature(parameters)


def _parameter(name: str, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is None else _Default(default))


# ---- names --------------------------------------------------------------------------------------------------------------


def bindings(body: Sequence[ast.stmt]) -> dict[str, ast.AST | None]:
    """Return name -> node for the names that a module or a class binds, also within `if`, `try` and `with`.

    The node is a definition, the value of an assignment, or an import statement. It is None if the source does not show the
    value, such as for a name that several statements bind.
    """
    bound: dict[str, ast.AST | None] = {}
    for node in statements(body):
        for name, value in _bound_names(node):
            bound[name] = None if name in bound else value
    return bound


def _bound_names(node: ast.stmt) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield (name, node or None) for each name that one statement binds. For the nodes see `bindings`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names if alias.name != "*")
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from ((name, node.value if isinstance(target, ast.Name) else None) for name in _stored_names(target))
    elif isinstance(node, ast.AnnAssign):
        yield from ((name, node.value) for name in _stored_names(node.target) if node.value is not None)
    elif isinstance(node, ast.AugAssign | ast.For | ast.AsyncFor):
        yield from ((name, None) for name in _stored_names(node.target))
    elif isinstance(node, ast.With | ast.AsyncWith):
        yield from ((name, None) for item in node.items if item.optional_vars for name in _stored_names(item.optional_vars))


def may_bind(body: Sequence[ast.stmt], name: str) -> bool:
    """Return whether a module may bind `name` in a way that `bindings` does not see.

    Such ways are `:=`, `global` in a function, `case ... as`, globals(), vars(), exec and sys.modules.
    """
    for node in (node for statement in body for node in ast.walk(statement)):
        if getattr(node, "id", None) in MAKE_NAMES or getattr(node, "attr", None) == "modules":  # of sys
            return True
        if isinstance(node, ast.NamedExpr) and node.target.id == name:
            return True
        if (isinstance(node, ast.Global) and name in node.names) or (isinstance(node, ast.MatchAs) and node.name == name):
            return True
    return False


def statements(body: Sequence[ast.stmt], always: bool = False) -> Iterator[ast.stmt]:
    """Yield the statements of a block and of the blocks inside it, but not of functions and classes.

    always: whether to yield only statements that certainly run, those of the outermost block.
    """
    for node in body:
        yield node
        if not always and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, inner, ()))
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from statements(part.body)


def _stored_names(target: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
