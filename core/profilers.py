"""Profilers: where the time of a run goes. A run without one is untouched.

A profiler sees the actions of a run by their names: ``fetch`` (waiting for a window of batches), ``transfer``,
``forward_backward``, ``optimizer_step``, ``validation``, ``validation_step``, each hook that somebody wrote as
``EarlyStopping.on_train_batch_end``, and what the user's own code names with ``with trainer.profiler.profile("name")``.
`attach_hooks` and `attach` put it around what a run calls; nothing in the loop asks whether there is one.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .hooks import Hooks
    from .run import Run


class Profiler:
    """Measures actions. Override `start` and `stop`, and `summary` for what shall be printed in the end.

    Used in every process of a run, between `setup` and `teardown`; before, it must pickle.

    Args:
        dirpath: where files go; the Trainer's ``log_dir`` by default.
        filename: write what `describe` would print to ``<stage>-<filename>-<rank>.txt``, on every rank.
    """

    measures: ClassVar[bool] = True

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        self.dirpath, self.filename = None if dirpath is None else Path(dirpath), filename
        self.stage, self.rank = "", 0
        self._directory = Path()

    def setup(self, stage: str, rank: int, log_dir: str | Path) -> None:
        """A run begins in this process. ``stage`` is ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
        self.stage, self.rank, self._directory = stage, rank, self.dirpath or Path(log_dir)

    def start(self, action: str) -> None:
        """An action begins. Actions may lie within each other."""

    def stop(self, action: str) -> None:
        """The action that began last under this name ends. One that did not begin is ignored."""

    @contextmanager
    def profile(self, action: str) -> Iterator[None]:
        """A context that is an action."""
        self.start(action)
        try:
            yield
        finally:
            self.stop(action)

    def step(self) -> None:
        """An update has ended."""

    def summary(self) -> str:
        """What was measured, as text."""
        return ""

    def describe(self) -> None:
        """Print the summary on rank 0, or write it to a file on every rank where a ``filename`` was given."""
        text = self.summary()
        if not text:
            return
        if self.filename is not None:
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"{self.stage}-{self.filename}-{self.rank}.txt"
            path.write_text(text + "\n")
        elif self.rank == 0 and sys.stdout is not None:
            print(text, flush=True)

    def teardown(self) -> None:
        """The run has ended, also after an exception. Called after `describe`."""


class PassThroughProfiler(Profiler):
    """Measures nothing: what ``trainer.profiler`` is where none was asked for, so that ``profile`` can be called."""

    measures: ClassVar[bool] = False

    @contextmanager
    def profile(self, action: str) -> Iterator[None]:
        yield


class SimpleProfiler(Profiler):
    """Adds up the time of each action; the device is not waited for.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        extended: show the number of calls and the share of the whole too.

    Attributes:
        durations: action -> ``(calls, seconds)``.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self.durations: dict[str, tuple[int, float]] = {}
        self._running: dict[str, list[float]] = {}
        self._began = 0.0

    def setup(self, stage: str, rank: int, log_dir: str | Path) -> None:
        super().setup(stage, rank, log_dir)
        self.durations, self._running, self._began = {}, {}, time.perf_counter()

    def start(self, action: str) -> None:
        self._running.setdefault(action, []).append(time.perf_counter())

    def stop(self, action: str) -> None:
        began = self._running.get(action)
        if began:
            calls, seconds = self.durations.get(action, (0, 0.0))
            self.durations[action] = calls + 1, seconds + time.perf_counter() - began.pop()

    def summary(self) -> str:
        whole = max(time.perf_counter() - self._began, 1e-9)
        width = max([len("Action"), *map(len, self.durations)])
        head = f"{'Action':<{width}} | {'Mean (s)':>10} | {'Calls':>8} | {'Total (s)':>10} | {'Share':>7}"
        if not self.extended:
            head = f"{'Action':<{width}} | {'Mean (s)':>10} | {'Total (s)':>10}"
        lines = [f"Profile of {self.stage}: {whole:.4g} s. Actions lie within each other.", head, "-" * len(head)]
        for action, (calls, seconds) in sorted(self.durations.items(), key=lambda item: -item[1][1]):
            counted = f" | {calls:>8}" if self.extended else ""
            share = f" | {seconds / whole:>7.1%}" if self.extended else ""
            lines.append(f"{action:<{width}} | {seconds / calls:>10.4g}{counted} | {seconds:>10.4g}{share}")
        return "\n".join(lines)


class AdvancedProfiler(Profiler):
    """Python's cProfile over the whole run: every function, sorted by the time spent in it and what it called.

    Args:
        dirpath: see `Profiler`.
        filename: see `Profiler`.
        line_count_restriction: how many lines to show, or which fraction of them where it is a float.
        dump_stats: write ``<stage>-<filename or profile>-<rank>.prof`` too, for tools such as snakeviz.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: int | float = 50,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self._profile: cProfile.Profile | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_profile": None}

    def setup(self, stage: str, rank: int, log_dir: str | Path) -> None:
        super().setup(stage, rank, log_dir)
        self._profile = cProfile.Profile()
        self._profile.enable()

    def summary(self) -> str:
        if self._profile is None:
            return ""
        self._profile.disable()
        stream = io.StringIO()
        stats = pstats.Stats(self._profile, stream=stream).sort_stats("cumulative")
        stats.print_stats(self.line_count_restriction)
        if self.dump_stats:
            self._directory.mkdir(parents=True, exist_ok=True)
            stats.dump_stats(self._directory / f"{self.stage}-{self.filename or 'profile'}-{self.rank}.prof")
        return f"Profile of {self.stage}:\n{stream.getvalue().strip()}"

    def teardown(self) -> None:
        if self._profile is not None:
            self._profile.disable()
            self._profile = None


class PyTorchProfiler(Profiler):
    """`torch.profiler`: operators and kernels, with the run's actions as ranges among them.

    Its steps are updates. A trace for chrome://tracing or Perfetto is written at the end of each cycle of the schedule.

    Args:
        dirpath: see `Profiler`; traces go there too.
        filename: see `Profiler`; traces are ``<filename or trace>-<rank>-<number>.json``.
        group_by_input_shapes: tell operators apart by the shapes of their inputs in the table.
        export_to_chrome: write traces.
        row_limit: lines of the table; -1 for all.
        sort_by_key: the column that it is sorted by; by default the device's or the CPU's total time.
        schedule: what `torch.profiler.schedule` returns; None records one cycle: the first update not, the second to
            warm up, and three.
        options: more for `torch.profiler.profile`, such as ``activities``, ``profile_memory``, ``with_stack``.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        group_by_input_shapes: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        schedule: Callable[[int], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        self.group_by_input_shapes, self.export_to_chrome = group_by_input_shapes, export_to_chrome
        self.row_limit, self.sort_by_key, self.schedule, self.options = row_limit, sort_by_key, schedule, options
        self._torch: Any = None
        self._ranges: list[tuple[str, Any]] = []
        self._table = ""
        self._traces = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_torch": None, "_ranges": []}

    def setup(self, stage: str, rank: int, log_dir: str | Path) -> None:
        from torch import profiler

        super().setup(stage, rank, log_dir)
        self._table, self._traces, self._ranges = "", 0, []
        options = dict(self.options)
        if self.group_by_input_shapes:
            options["record_shapes"] = True
        if stage == "fit":
            options["schedule"] = self.schedule or profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
        try:
            self._torch = profiler.profile(on_trace_ready=self._keep, **options)
        except TypeError as error:
            raise ConfigurationError(
                f"PyTorchProfiler: torch.profiler.profile refused {options!r}: {error}."
            ) from error
        self._torch.start()

    def start(self, action: str) -> None:
        from torch.profiler import record_function

        if self._torch is not None:
            entered: Any = record_function(action)
            entered.__enter__()
            self._ranges.append((action, entered))

    def stop(self, action: str) -> None:
        if any(name == action for name, _ in self._ranges):
            while True:  # ranges are a stack: what began within this action ends with it
                name, entered = self._ranges.pop()
                entered.__exit__(None, None, None)
                if name == action:
                    return

    def step(self) -> None:
        if self._torch is not None:
            self._torch.step()

    def summary(self) -> str:
        self._end()
        return f"Profile of {self.stage}:\n{self._table}" if self._table else ""

    def teardown(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._torch is not None:
            running, self._torch = self._torch, None
            while self._ranges:
                self._ranges.pop()[1].__exit__(None, None, None)
            running.stop()

    def _keep(self, recorded: Any) -> None:
        averages = recorded.key_averages(group_by_input_shape=self.group_by_input_shapes)
        on_device = any(event.device_time_total for event in averages)
        key = self.sort_by_key or ("device_time_total" if on_device else "cpu_time_total")
        self._table = str(averages.table(sort_by=key, row_limit=self.row_limit))
        if self.export_to_chrome:
            self._directory.mkdir(parents=True, exist_ok=True)
            name = f"{self.filename or 'trace'}-{self.rank}-{self._traces}.json"
            recorded.export_chrome_trace(str(self._directory / name))
        self._traces += 1


NAMES: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def make(given: str | Profiler | None) -> Profiler | None:
    """The profiler that a flag names, or the object that it is; None for none."""
    if given is None or isinstance(given, Profiler):
        return given
    if isinstance(given, str) and given in NAMES:
        return NAMES[given]()
    raise ConfigurationError(
        f"profiler={given!r}: expected {', '.join(map(repr, NAMES))}, a trivet.profilers.Profiler, or None."
    )


# ---------------------------------------------------------------------------------------------- around what a run calls


def attach_hooks(profiler: Profiler, hooks: Hooks) -> None:
    """Put the profiler around every hook, before anything reads the tables; and let it know of spans and updates."""
    every: dict[str, Any] = vars(hooks)
    for name, table in list(every.items()):
        if isinstance(table, tuple):
            every[name] = tuple(timed(profiler, _label(name, hook), hook) for hook in table)
    for first, last, action in (
        ("on_validation_start", "on_validation_end", "validation"),
        ("on_validation_batch_start", "on_validation_batch_end", "validation_step"),
        ("on_test_start", "on_test_end", "test"),
        ("on_test_batch_start", "on_test_batch_end", "test_step"),
        ("on_predict_start", "on_predict_end", "predict"),
        ("on_predict_batch_start", "on_predict_batch_end", "predict_step"),
    ):
        start, stop = as_hook(profiler.start, action), as_hook(profiler.stop, action)
        around = not first.endswith("batch_start")  # a step is between the hooks of its batch
        for hook, function, in_front in ((first, start, around), (last, stop, not around)):
            table = every.get(hook)
            if table is not None:
                every[hook] = (function, *table) if in_front else (*table, function)
    every["on_update_end"] = (*every["on_update_end"], as_hook(profiler.step))


def attach(profiler: Profiler, run: Run) -> None:
    """Put the profiler around what a built run calls in each update."""
    for name in ("transfer", "forward_backward", "optimizer_step"):
        function = getattr(run, name)
        if function is not None:
            setattr(run, name, timed(profiler, name, function))
    if run.train_data is not None:
        windows = run.train_data.epoch
        setattr(run.train_data, "epoch", lambda *given: fetched(profiler, windows(*given)))  # noqa: B010  a method


def as_hook(function: Callable[..., None], *args: Any) -> Callable[..., None]:
    """A hook that calls a function with arguments of its own."""
    return lambda *ignored: function(*args)


def timed(profiler: Profiler, action: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as an action."""

    def run(*args: Any, **kwargs: Any) -> Any:
        profiler.start(action)
        try:
            return function(*args, **kwargs)
        finally:
            profiler.stop(action)

    return run


def fetched(profiler: Profiler, windows: Iterator[Any]) -> Iterator[Any]:
    """The windows, with the waiting for each as an action."""
    while True:
        profiler.start("fetch")
        try:
            window = next(windows, None)
        finally:
            profiler.stop("fetch")
        if window is None:
            return
        yield window


def _label(name: str, hook: Callable[..., Any]) -> str:
    """``EarlyStopping.on_train_start``: whose hook it is, and which."""
    inner = hook.func if isinstance(hook, partial) else hook
    owner = getattr(inner, "__self__", None)
    return f"{type(owner).__name__}.{name}" if owner is not None else name
