"""Describe a user's code: by an import in a process of its own, or from its source alone.

A description is a reply: one of {ok, fields, required}, for a function with a signature also {named}, {wrong, code}, {absent,
importer} and {raised, foreign}. `fields` are the arguments that columns and kwargs can give; None for any. For environments and
rewards {judge} says whether the job's judge is needed, optional or unused.

`python -m launch.preflight.user_source REPLY` reads {folders, asked: {key: [path, role, kwargs]}} as JSON from stdin, imports
the code, and writes key -> reply as JSON into the file REPLY. Given {folders, process: path, records}, it writes what a
processor makes of each record. The caller discards the output of the code.

The source shows a module or a name that does not exist, a syntax error, a package that is not installed, and the parameters of
functions and plain classes. It does not show names that are made at run time or by several statements, nor changes by
decorators and foreign base classes: such code passes.

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
import json
import os
import resource
import sys
import traceback
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.executors.executor import ROOT
from launch.preflight.signatures import absolute, module_spec, signature_of
from pipeline.algorithms import custom_loss
from pipeline.algorithms.algorithm import Needs
from pipeline.data import processors
from pipeline.environments import custom, python_agent
from pipeline.recipe import user_code, user_files
from pipeline.rollout import engine_client

MAX_SOURCE = 4 << 20
"""Largest module, in bytes."""
OURS = ("pipeline.environments.environment", "pipeline.environments.tool", "pipeline.evaluation.questions")
"""Modules with base classes for users. They are part of Hetstep, and are imported."""
MAKE_NAMES = ("globals", "vars", "exec")
"""Functions by which a module binds names that its source does not show."""
MEMORY = 32 << 30
"""Limit of the address space of the process that imports, of which torch for CUDA takes 10 GB."""
KNOWN: dict[str, Any] = {"abc.ABC": abc.ABC, "functools.partial": functools.partial}
"""Objects of the standard library whose effect on a signature the source shows."""
UNKNOWN: Any = object()
"""Stands for an object that the source does not show."""

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class CodeFault(Exception):
    """Raised if the code cannot be used. `reply` says why."""

    def __init__(self, **reply: Any) -> None:
        super().__init__(str(reply))
        self.reply = reply


def describe_imported(
    path: str, role: str, kwargs: Mapping[str, Any], needs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Import the user's object at a path, and return the reply about it. role, kwargs, needs: as in `CodeReference`.

    A loss is called on a tiny batch, if torch is installed.
    """
    try:
        loaded_object = user_code.load(path)
    except user_code.NotFound as error:
        return {"wrong": str(error), "code": "not-importable"}
    except ModuleNotFoundError as error:
        return {"absent": error.name, "importer": _innermost(error)[0]}
    except SyntaxError as error:
        return {"raised": f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})", "foreign": False}
    except BaseException as error:  # SystemExit too
        file, line = _innermost(error)
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({file}:{line})"
        return {"raised": message, "foreign": isinstance(error, ImportError | OSError | RuntimeError | AssertionError)}
    reply = _reply_about(loaded_object, role, kwargs)
    if needs is None or "ok" not in reply or importlib.util.find_spec("torch") is None:
        return reply
    inputs = dict(needs)
    together = inputs.pop("together", 1)
    wrong = custom_loss.dry_call(path, loaded_object, dict(kwargs), Needs(**inputs), together)
    return {"wrong": wrong, "code": "wrong-type"} if wrong else reply


def _reply_about(loaded_object: Any, role: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply about an object or its stand-in."""
    if role in ("environment", "reward"):
        if wrong := custom.problem(loaded_object, kwargs, role):
            return {"wrong": wrong, "code": "wrong-type" if custom.problem(loaded_object, (), role) else "unknown-key"}
        if form := custom.form_of(loaded_object):
            reply = {"ok": True, "fields": None if form.takes_any else form.named, "required": form.required}
            reply["judge"] = "needed" if form.asks_judge else "optional" if form.may_ask_judge else "unused"
            return {**reply, "named": form.named} if form.parameters and not inspect.isclass(loaded_object) else reply
        return {"ok": True, "fields": None, "required": [], "judge": "unused"}
    elif role == "loss":
        if found := custom_loss.problem(loaded_object, kwargs):
            return {"wrong": found[1], "code": found[0]}
    elif role == "rollout":
        if wrong := engine_client.problem(loaded_object):
            return {"wrong": wrong, "code": "wrong-type"}
    elif role == "agent":
        if wrong := python_agent.problem(loaded_object, kwargs):
            return {"wrong": wrong, "code": "wrong-type"}
    elif not callable(loaded_object):
        return {"wrong": f"it is a {type(loaded_object).__name__}, which cannot be called", "code": "wrong-type"}
    elif role == "processor" and (wrong := _takes_no_record(loaded_object)):
        return {"wrong": wrong, "code": "wrong-type"}
    return {"ok": True, "fields": None, "required": []}


def _takes_no_record(function: Any) -> str:
    """Return why a processor cannot be called with a record; "" if it can, or if its signature is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    if inspect.isclass(function) or inspect.iscoroutinefunction(function):
        return f"got {'a class' if inspect.isclass(function) else 'an async function'}; expected a function of one record"
    try:
        signature.bind({})
    except TypeError:
        return f"got a function of {signature}; expected one of (record), which returns a record, a list of records or None"
    return ""


def _innermost(error: BaseException) -> tuple[str, int | None]:
    """Return (file, line) of the code that raised an error, without the import system's frames."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    return frames[-1].filename, frames[-1].lineno


def describe(
    path: str, role: str, kwargs: Mapping[str, Any], folders: Sequence[Path], checks_imports: bool = True
) -> dict[str, Any]:
    """Return the reply about code at a dotted path, as far as the source shows it.

    role, kwargs: of a `CodeReference`. folders: searched in this order, after installed packages. checks_imports: whether
    the imports of modules must exist.
    """
    try:
        stand_in = SourceReader(folders, checks_imports).find(path)
    except CodeFault as fault:
        return fault.reply
    return {"ok": True, "fields": None, "required": []} if stand_in is UNKNOWN else _reply_about(stand_in, role, kwargs)


def arguments(path: str, folders: Sequence[Path]) -> list[str] | None:
    """Return `NAME: default VALUE` or `NAME: required` for each argument that kwargs may give to a user's environment.

    Return None if the source does not show them. Raises CodeFault.
    """
    stand_in = SourceReader(folders, checks_imports=False).find(path)
    if stand_in is UNKNOWN:
        return None
    form = None if isinstance(stand_in, type) else custom.form_of(stand_in)
    parameters = [
        parameter
        for parameter in inspect.signature(stand_in).parameters.values()
        if form is None or parameter.name not in form.own
    ]
    required = "required" if form is None else "required, here or as a column of the records"
    return [
        f"{parameter.name}: {required if parameter.default is parameter.empty else f'default {parameter.default!r}'}"
        if parameter.kind is not parameter.VAR_KEYWORD
        else "NAME: any other name"
        for parameter in parameters
        if parameter.kind is not parameter.VAR_POSITIONAL
    ]


class _Module:
    """A module's statements, and for each name that they bind what it stands for, as `_bound_names` has it."""

    def __init__(self, body: list[ast.stmt]) -> None:
        self.body = body
        self.bound: dict[str, list[Any]] = {}
        for statement in _statements(body):
            for name, node in _bound_names(statement):
                self.bound.setdefault(name, []).append(node)


@dataclass
class SourceReader:
    """Finds stand-ins for objects in modules: functions and classes with the same signatures, but no code.

    checks_imports: whether to check also that the imports of these modules exist
    """

    folders: Sequence[Path]
    checks_imports: bool = True
    _known: dict[str, Any] = field(default_factory=dict)
    _modules: dict[Path, _Module] = field(default_factory=dict)

    def find(self, path: str) -> Any:
        """Return a stand-in for the object at a dotted path, or UNKNOWN. Raises CodeFault."""
        if path not in self._known:
            self._known[path] = UNKNOWN  # for a name that leads back to itself
            self._known[path] = self._find(path)
        return self._known[path]

    def _find(self, path: str) -> Any:
        module, name = user_code.split(path)
        if path in KNOWN:
            return KNOWN[path]
        if module in OURS:
            try:
                return user_code.load(path)
            except user_code.NotFound as error:
                raise CodeFault(wrong=str(error), code="not-importable") from None
        if len(self._known) > 1 and not self._is_theirs(module):
            return UNKNOWN  # reading the sources of libraries would take seconds
        file = self._file(module)
        if file is None:
            return UNKNOWN
        if file not in self._modules:
            body = _parse(file)
            if self.checks_imports and self._is_theirs(module):
                self._check_imports(module, file, body)
            self._modules[file] = _Module(body)
        bound = self._modules[file].bound
        if nodes := bound.get(name):
            return self._stand_in(module, file, nodes[0]) if len(nodes) == 1 else UNKNOWN
        is_module = not user_code.is_file(module) and module_spec(path, self.folders)
        if is_module or {"*", "__getattr__"} & bound.keys() or _may_bind(self._modules[file].body, name):
            return UNKNOWN
        near = difflib.get_close_matches(name, bound, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        of = module if user_code.is_file(module) else f"{module} ({file})"
        raise CodeFault(wrong=f"{of} has no {name}{hint}", code="not-importable")

    def _stand_in(self, module: str, file: Path, node: ast.AST | tuple[str, ast.ImportFrom] | None) -> Any:
        """Return a stand-in for what a statement of a module binds to a name."""
        if isinstance(node, tuple):
            return self.find(f"{absolute(module, file.name == '__init__.py', node[1])}.{node[0]}")
        if isinstance(node, Definition):
            return UNKNOWN if getattr(node, "decorator_list", ()) else _function(node)
        if isinstance(node, ast.Name):
            if hasattr(builtins, node.id):
                return getattr(builtins, node.id)
            return self.find(user_code.join(module, node.id))
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Call):
            return self._called(module, node)
        return self._class(module, node) if isinstance(node, ast.ClassDef) else UNKNOWN

    def _called(self, module: str, node: ast.Call) -> Any:
        """Return a stand-in for what a call makes: an object of a class with `__call__`, or a partial function."""
        match node.func:
            case ast.Name(name):
                made = self.find(user_code.join(module, name)) if not hasattr(builtins, name) else UNKNOWN
            case ast.Attribute(ast.Name("functools"), "partial"):
                made = functools.partial
            case _:
                return UNKNOWN
        names = [keyword.arg for keyword in node.keywords]
        if None in names or any(isinstance(argument, ast.Starred) for argument in node.args):
            return UNKNOWN
        if made is functools.partial:
            function, *given = node.args or [None]
            inner = self._stand_in(module, Path(), function) if isinstance(function, ast.Name) else UNKNOWN
            if not callable(inner):
                return UNKNOWN
            return functools.partial(inner, *[None] * len(given), **dict.fromkeys(map(str, names)))
        return object.__new__(made) if isinstance(made, type) and custom.makes_reward(made) else UNKNOWN

    def _class(self, module: str, node: ast.ClassDef) -> Any:
        """Return a class with the methods of a definition; UNKNOWN if a decorator, a base or an attribute may change them."""
        bases = [self.find(user_code.join(module, base.id)) if isinstance(base, ast.Name) else UNKNOWN for base in node.bases]
        methods = {name: item for statement in node.body for name, item in _bound_names(statement)}
        plain = all(isinstance(item, Definition) and not getattr(item, "decorator_list", ()) for item in methods.values())
        special = {name for name in methods if name.startswith("__") and name not in ("__init__", "__call__")}
        if node.decorator_list or node.keywords or special or not plain or not all(isinstance(base, type) for base in bases):
            return UNKNOWN
        members = {name: _function(item) for name, item in methods.items() if isinstance(item, Definition)}
        try:
            return types.new_class(node.name, tuple(bases), {}, lambda namespace: namespace.update(members))
        except TypeError:  # bases that do not go together, which only the import reports
            return UNKNOWN

    # ---- modules ----------------------------------------------------------------------------------------------------------

    def _is_theirs(self, module: str) -> bool:
        if user_code.is_file(module):
            return True
        spec = module_spec(module.partition(".")[0])
        return spec is None or spec.origin is None

    def _file(self, module: str) -> Path | None:
        """Return the source of a module; None if it has none, such as a folder. Raises CodeFault if there is no such module."""
        if user_code.is_file(module):
            if not os.path.isfile(module):
                raise CodeFault(wrong=f"there is no file {module}", code="not-importable")
            return Path(module)
        top = module.partition(".")[0]
        folders = [*self.folders, ROOT]
        spec = module_spec(module, folders)
        if spec is None and (module_spec(top, folders) is None or self._is_theirs(module)):
            places = ", ".join(dict.fromkeys(["installed packages", *map(str, self.folders)]))
            missing = module if module_spec(top, folders) else top
            raise CodeFault(wrong=f"there is no module {missing}; looked in {places}", code="not-importable")
        return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None

    def _check_imports(self, module: str, file: Path, body: list[ast.stmt]) -> None:
        """Raise CodeFault if a module always imports another module that is missing."""
        for node in body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [absolute(module, file.name == "__init__.py", node)] if isinstance(node, ast.ImportFrom) else []
            for name in filter(None, names):
                whole = name if self._is_theirs(name) else name.partition(".")[0]
                if module_spec(whole, [*self.folders, ROOT]) is None and name not in sys.builtin_module_names:
                    raise CodeFault(absent=name, importer=str(file))


def _function(node: Definition) -> Any:
    """Return a function that does nothing and has the signature of a definition."""

    async def coroutine(*args: Any, **kwargs: Any) -> None: ...

    def plain(*args: Any, **kwargs: Any) -> None: ...

    stand_in: Any = coroutine if isinstance(node, ast.AsyncFunctionDef) else plain
    signature = signature_of(node.args)
    unannotated = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    stand_in.__signature__ = signature.replace(parameters=unannotated)
    stand_in.__name__ = stand_in.__qualname__ = getattr(node, "name", "<lambda>")
    return stand_in


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block and of the blocks inside it, but not of functions and classes."""
    for node in body:
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, inner, ()))
            for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _statements(part.body)


def _bound_names(node: ast.stmt) -> Iterator[tuple[str, Any]]:
    """Yield (name, what it stands for) for each name that a statement binds.

    That is a definition, the value of an assignment, or (name, statement) of an import; None if the source does not show it.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name, node
    elif isinstance(node, ast.ImportFrom):
        yield from ((alias.asname or alias.name, (alias.name, node)) for alias in node.names)
    elif isinstance(node, ast.Import):
        yield from ((alias.asname or alias.name.partition(".")[0], None) for alias in node.names)
    elif not isinstance(node, ast.AnnAssign) or node.value is not None:
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        targets += [item.optional_vars for item in getattr(node, "items", ())]
        for target in filter(None, targets):
            value = (
                getattr(node, "value", None) if isinstance(target, ast.Name) and not isinstance(node, ast.AugAssign) else None
            )
            names = (inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store))
            yield from ((name, value) for name in names)


def _may_bind(body: Sequence[ast.stmt], name: str) -> bool:
    """Return whether a module may bind `name` by `:=`, `global`, `case ... as`, globals(), vars(), exec or sys.modules."""
    for node in (node for statement in body for node in ast.walk(statement)):
        if getattr(node, "id", None) in MAKE_NAMES or getattr(node, "attr", None) == "modules":
            return True
        if isinstance(node, ast.NamedExpr) and node.target.id == name:
            return True
        if (isinstance(node, ast.Global) and name in node.names) or (isinstance(node, ast.MatchAs) and node.name == name):
            return True
    return False


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


def main(reply: str) -> None:
    """Describe every object of the request on stdin, and write the reply."""
    request = json.load(sys.stdin)
    if not 0 <= resource.getrlimit(resource.RLIMIT_AS)[1] < MEMORY:  # -1: no limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    user_code.search_in(request["folders"])
    if "process" in request:
        answer: Any = _process(request["process"], request["records"])
    else:
        answer = {key: describe_imported(*source) for key, source in request["asked"].items()}
    Path(reply).write_text(json.dumps(answer, default=str))


def _process(path: str, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return {made: records} or {fault: text} for each record to which the processor at a dotted path is applied."""
    function, answers = user_code.load(path), []
    for record in records:
        try:
            answers.append({"made": processors.as_records(processors.process(function, path, record))})
        except ValueError as error:
            answers.append({"fault": str(error)})
    return answers


if __name__ == "__main__":
    main(sys.argv[1])
