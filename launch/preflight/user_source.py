"""Describe a user's code from its source alone, without importing it.

The source shows most errors that an import would show: a module or a name that does not exist, a syntax error, a package that
is not installed, a class that lacks methods, parameters that do not fit. It does not show other exceptions, names that are made
at run time or by several statements, or changes by decorators and foreign base classes. Code with such errors passes.

Sources may be long and deeply nested, so callers bound the time (`launch/preflight/bounded.py`).
"""

from __future__ import annotations

import abc
import ast
import builtins
import difflib
import functools
import importlib.util
import inspect
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from launch.executors.executor import ROOT
from launch.preflight.stand_ins import UNKNOWN, bindings, class_of, function_of, may_bind, statements
from launch.preflight.user_code_probe import reply_about
from pipeline.recipe import user_code, user_files

MAX_SOURCE = 4 << 20
"""Largest module, in bytes."""
MAX_MODULES = 200
"""Maximum number of modules that are read for one name."""
OURS = ("pipeline.environments.environment", "pipeline.environments.tool", "pipeline.evaluation.questions")
"""Modules with base classes for users. They are part of Hetstep, and are imported."""
BASES = {"abc.ABC": abc.ABC, "typing.Protocol": Protocol}


class CodeFault(Exception):
    """Raised if the code cannot be used. `reply` says why, in the form of `launch/preflight/user_code_probe.py`."""

    def __init__(self, **reply: Any) -> None:
        super().__init__(str(reply))
        self.reply = reply


def describe(path: str, role: str, kwargs: Sequence[str], folders: Sequence[Path]) -> dict[str, Any]:
    """Return the reply of `launch/preflight/user_code_probe.py` about code at a dotted path, as far as the source shows it.

    kwargs: names under `env.NAME.kwargs`. folders: searched in this order, after installed packages.
    """
    module, _, name = path.rpartition(".")
    try:
        stand_in = SourceReader(folders).find(module, name)
    except CodeFault as fault:
        return fault.reply
    if stand_in is UNKNOWN:
        return {"ok": True, "fields": None, "required": []}
    return reply_about(stand_in, role, kwargs)


def arguments(path: str, folders: Sequence[Path]) -> list[str] | None:
    """Return `NAME: default VALUE` or `NAME: required` for each argument that kwargs may give to a user's environment.

    Return None if the source does not show them. Raises CodeFault.
    """
    module, _, name = path.rpartition(".")
    stand_in = SourceReader(folders, checks_imports=False).find(module, name)
    if stand_in is UNKNOWN or not callable(stand_in):
        return None
    parameters = list(inspect.signature(stand_in).parameters.values())[0 if isinstance(stand_in, type) else 2 :]
    required = "required" if isinstance(stand_in, type) else "required, here or as a column of the records"
    return [
        f"{parameter.name}: {required if parameter.default is parameter.empty else f'default {parameter.default!r}'}"
        if parameter.kind is not parameter.VAR_KEYWORD
        else "NAME: any other name"
        for parameter in parameters
        if parameter.kind is not parameter.VAR_POSITIONAL
    ]


def lacks(path: str, folders: Sequence[Path]) -> str | None:
    """Return why the module or the name of a dotted path does not exist; None if it exists, or if the source does not tell."""
    module, _, name = path.rpartition(".")
    try:
        SourceReader(folders, checks_imports=False).find(module, name)
    except CodeFault as fault:
        return fault.reply.get("wrong")
    except RecursionError:
        pass
    return None


@dataclass(frozen=True)
class ModuleSource:
    """The source of a module."""

    name: str
    file: Path
    is_package: bool
    body: list[ast.stmt]

    @functools.cached_property
    def bindings(self) -> dict[str, ast.AST | None]:
        """Return name -> node for the names that the module binds, as `stand_ins.bindings` does."""
        return bindings(self.body)

    @functools.cached_property
    def has_stars(self) -> bool:
        """Return whether the module has `from ... import *`."""
        return any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in statements(self.body))

    def absolute(self, node: ast.ImportFrom) -> str:
        """Return the absolute name of the module in a `from ... import` statement."""
        if not node.level:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


@dataclass
class SourceReader:
    """Reads modules, and finds stand-ins for the objects in them.

    checks_imports: whether to check also that the imports of these modules exist
    """

    folders: Sequence[Path]
    checks_imports: bool = True
    _read: dict[str, ModuleSource | None] = field(default_factory=dict)
    _known: dict[str, Any] = field(default_factory=dict)

    def find(self, module: str, name: str) -> Any:
        """Return a stand-in for a module's object of this name, or UNKNOWN. Raises CodeFault."""
        path = f"{module}.{name}"
        if path not in self._known:
            is_first = not self._known
            self._known[path] = UNKNOWN  # for a name that leads back to itself
            self._known[path] = self._find_name(module, name, is_first)
        return self._known[path]

    def _find_name(self, module: str, name: str, is_first: bool) -> Any:
        path = f"{module}.{name}"
        if path in BASES:
            return BASES[path]
        if module in OURS:
            return self._load(path)
        if not is_first and _installed_folders(module.partition(".")[0]):
            return UNKNOWN  # reading the sources of libraries would take seconds
        source = self.source(module)
        if source is None:
            return UNKNOWN
        bound = source.bindings
        if name in bound:
            return self._stand_in(source, name, bound[name])
        if (
            "__getattr__" in bound
            or source.has_stars
            or (source.is_package and self._exists(path))
            or may_bind(source.body, name)
        ):
            return UNKNOWN
        near = difflib.get_close_matches(name, bound, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise CodeFault(wrong=f"{module} ({source.file}) has no {name}{hint}", code="not-importable")

    def _load(self, path: str) -> Any:
        try:
            return user_code.load(path)
        except user_code.NotFound as error:
            raise CodeFault(wrong=str(error), code="not-importable") from None

    def _stand_in(self, source: ModuleSource, name: str, node: ast.AST | None) -> Any:
        """Return a stand-in for the object that a module binds to a name."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return function_of(node)
        if isinstance(node, ast.ClassDef):
            return class_of(node, [self._value(source, base) for base in node.bases])
        if isinstance(node, ast.ImportFrom):
            original = next(alias.name for alias in node.names if name in (alias.asname, alias.name))
            return self.find(source.absolute(node), original)
        if isinstance(node, ast.expr):
            return self._value(source, node)
        return UNKNOWN

    def _value(self, source: ModuleSource, node: ast.expr) -> Any:
        """Return a stand-in for an expression of a module."""
        if isinstance(node, ast.Lambda):
            return function_of(node)
        if isinstance(node, ast.Name):
            if node.id in source.bindings:
                return self.find(source.name, node.id)
            if node.id in ("__name__", "__file__", "__doc__") or source.has_stars or may_bind(source.body, node.id):
                return UNKNOWN
            if hasattr(builtins, node.id):
                return getattr(builtins, node.id)
            raise CodeFault(raised=f"NameError: name '{node.id}' is not defined ({source.file}:{node.lineno})", foreign=False)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            bound = source.bindings.get(node.value.id)
            if isinstance(bound, ast.Import):
                modules = {alias.asname or alias.name: alias.name for alias in bound.names}
                return self.find(modules[node.value.id], node.attr) if node.value.id in modules else UNKNOWN
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return UNKNOWN

    # ---- modules ----------------------------------------------------------------------------------------------------------

    def source(self, module: str) -> ModuleSource | None:
        """Return the source of a module; None if it has no source, or if MAX_MODULES were read before.

        Raises CodeFault if there is no such module.
        """
        if module not in self._read:
            self._read[module] = None
            if len(self._read) <= MAX_MODULES and (file := self._file(module)):
                self._read[module] = source = ModuleSource(module, file, file.name == "__init__.py", _parse(file))
                if self.checks_imports and self._is_theirs(module):
                    self._check_imports(source)
        return self._read[module]

    def _roots(self, top: str) -> list[Path]:
        """Return the folders of a top-level package, or the file of a top-level module.

        An installed package hides a user's package of the same name, as in imports.
        """
        for spec_of in (_installed_folders, self._theirs):
            if roots := spec_of(top):
                return roots
        return []

    def _theirs(self, top: str) -> list[Path]:
        for folder in self.folders:
            if (folder / top / "__init__.py").is_file():
                return [folder / top]
            if (folder / f"{top}.py").is_file():
                return [folder / f"{top}.py"]
        return [folder / top for folder in (*self.folders, ROOT) if (folder / top).is_dir()]

    def _is_theirs(self, module: str) -> bool:
        return not _installed_folders(module.partition(".")[0])

    def _file(self, module: str) -> Path | None:
        top, *inner = module.split(".")
        roots = self._roots(top)
        if not roots:
            folders = ", ".join(dict.fromkeys(["installed packages", *map(str, self.folders)]))
            raise CodeFault(wrong=f"there is no module {top}; looked in {folders}", code="not-importable")
        for root in roots:
            if root.suffix == ".py" and not inner:
                return root
            for file in (root.joinpath(*inner, "__init__.py"), root.joinpath(*inner).with_suffix(".py") if inner else root):
                if file.is_file() and file.suffix == ".py":
                    return file
        if not self._is_theirs(module) or any(root.joinpath(*inner).is_dir() for root in roots):
            return None  # of another kind than Python source, or a folder of packages
        raise CodeFault(wrong=f"there is no module {module}; looked in {', '.join(map(str, roots))}", code="not-importable")

    def _exists(self, module: str) -> bool:
        """Return whether a package contains the module with this dotted name, whatever kind of file or folder it is."""
        top, *inner, last = module.split(".")
        folders = [root.joinpath(*inner) for root in self._roots(top)]
        return any((folder / last).is_dir() or any(folder.glob(f"{last}.*")) for folder in folders)

    def _check_imports(self, source: ModuleSource) -> None:
        """Raise CodeFault if a module always imports another module that is missing or has a syntax error."""
        for node in statements(source.body, always=True):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [source.absolute(node)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                if not name or _installed_folders(name.partition(".")[0]):
                    continue
                try:
                    self.source(name)
                except CodeFault as fault:
                    if "wrong" in fault.reply:
                        raise CodeFault(absent=name, importer=str(source.file)) from None
                    raise


def _installed_folders(top: str) -> list[Path]:
    """Return the folders of an installed top-level package, or [the origin of a module], without importing it.

    The origin is a file, or "built-in" or "frozen". [] if it is not installed, or is a folder without __init__.py.
    """
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return []
    if spec is None or spec.origin is None:  # none, or a folder without __init__.py
        return []
    return [Path(location) for location in spec.submodule_search_locations or [spec.origin]]


def _parse(file: Path) -> list[ast.stmt]:
    try:
        text = user_files.read_bytes(file, MAX_SOURCE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, str(file), "exec", dont_inherit=True)  # it finds errors that parsing does not, and runs nothing
            return ast.parse(text, str(file)).body
    except SyntaxError as error:
        raise CodeFault(raised=f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})", foreign=False) from None
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # ValueError: null bytes
        reason = error.strerror if isinstance(error, OSError) else error
        raise CodeFault(raised=f"{type(error).__name__}: {reason} ({file})", foreign=False) from None
