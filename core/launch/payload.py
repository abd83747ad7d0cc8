"""What is handed to worker processes: pickled with cloudpickle, with a name for what cannot be."""

from __future__ import annotations

import functools
import io
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from ..errors import LaunchError

_lock = threading.Lock()  # cloudpickle's list of modules that go by value is global


def dumps(payload: Mapping[str, Any]) -> bytes:
    """Pickle a payload, given by the top-level names that error messages start with (``module``, ``trainer``).

    Classes and functions of modules that a fresh interpreter could not import from the same ``sys.path`` go by value:
    those of ``__main__``, of notebooks, of files that pytest or runpy loaded. Raises LaunchError naming the attribute
    path of the first object that does not pickle.
    """
    with _lock:
        buffer = io.BytesIO()
        pickler = _Pickler(buffer)
        try:
            pickler.dump(dict(payload))
            return buffer.getvalue()
        except Exception as error:
            raise _named(payload, error) from error
        finally:
            pickler.forget()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, which decides by value or by reference anew for each module it meets."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._by_value: list[types.ModuleType] = []
        self._seen: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, types.FunctionType, types.ModuleType)):
            name = obj.__name__ if isinstance(obj, types.ModuleType) else obj.__module__
            if name and name not in self._seen:
                self._seen.add(name)
                module = sys.modules.get(name)
                if isinstance(module, types.ModuleType) and not _importable(name, module):
                    cloudpickle.register_pickle_by_value(module)
                    self._by_value.append(module)
        if isinstance(obj, types.CodeType):
            # cloudpickle drops the file's name, and with it the source lines in tracebacks
            build, arguments = self.dispatch_table[types.CodeType](obj)
            return _code, (obj.co_filename, build, arguments)
        return super().reducer_override(obj)

    def forget(self) -> None:
        for module in self._by_value:
            cloudpickle.unregister_pickle_by_value(module)


def _code(filename: str, build: Any, arguments: tuple[Any, ...]) -> types.CodeType:
    code: types.CodeType = build(*arguments)
    return code.replace(co_filename=filename)


_INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))


def _importable(name: str, module: types.ModuleType) -> bool:
    """Whether a fresh interpreter with this ``sys.path`` would import the same file under this name."""
    parent, _, _ = name.rpartition(".")
    if name.partition(".")[0] in ("trivet", "__main__", *sys.stdlib_module_names):
        return True  # cloudpickle takes __main__ by value itself
    file = getattr(module, "__file__", None)
    if file is None:  # made by code: trust that importing its package makes it again
        return bool(parent) and _importable(parent, sys.modules.get(parent, module))
    if file.startswith(_INSTALLED):
        return True
    package = sys.modules.get(parent)
    if parent and (package is None or not _importable(parent, package)):
        return False
    for finder in sys.meta_path:
        if getattr(finder, "__module__", "").startswith("_pytest"):  # a fresh interpreter has no such finder
            continue
        spec = finder.find_spec(name, package.__path__ if package is not None else None)
        if spec is not None:
            return bool(spec.origin == file)
    return False


def _named(payload: Mapping[str, Any], error: Exception) -> LaunchError:
    path, culprit, reason = "", None, error
    for name, value in payload.items():
        if (failing := _reason(value)) is not None:
            path, culprit, reason = _locate(value, name, failing, set())
            break
    kind = type(culprit)
    noun = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return LaunchError(
        f"{path} (a {noun}) cannot be handed to worker processes: {reason}. "
        "Make it in setup(), or drop it in __getstate__."
    )


def _reason(value: Any) -> Exception | None:
    """Why this does not pickle, or None."""
    pickler = _Pickler(io.BytesIO())
    try:
        pickler.dump(value)
    except Exception as error:
        return error
    finally:
        pickler.forget()
    return None


def _locate(value: Any, path: str, reason: Exception, seen: set[int]) -> tuple[str, Any, Exception]:
    """Go down to the smallest part that does not pickle."""
    seen.add(id(value))
    for suffix, part in _parts(value):
        if id(part) not in seen and (failing := _reason(part)) is not None:
            return _locate(part, path + suffix, failing, seen)
    return path, value, reason


_MODULE_TABLES = ("_parameters", "_buffers", "_modules")  # where nn.Module keeps what its user sees as attributes


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts that pickling would visit, each with what to write behind the path of the whole."""
    if isinstance(value, Mapping) and type(value).__reduce__ is object.__reduce__:
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f" -> {name}", cell.cell_contents) for name, cell in cells)
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        yield from ((f" -> {name}", value.__globals__[name]) for name in names)
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    if isinstance(value, (type, types.FunctionType, types.ModuleType)):
        return
    yield from _attributes(value)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        state = value.__getstate__()
    except Exception:
        return
    tables = [table for table in (state if isinstance(state, tuple) else (state,)) if isinstance(table, dict)]
    for name, part in ((name, part) for table in tables for name, part in table.items()):
        if name in _MODULE_TABLES and isinstance(part, dict):
            yield from ((f"[{key}]" if key.isdecimal() else f".{key}", inner) for key, inner in part.items())
        else:
            yield f".{name}", part
