"""CSVLogger: metrics as a table in a file, hyperparameters beside it."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from ..errors import ConfigurationError
from .places import FileLogger, write_hparams

METRICS = "metrics.csv"


class CSVLogger(FileLogger):
    """Append metrics to ``save_dir/name/version_N/metrics.csv``, one row per call, at once visible to others.

    Args:
        save_dir: The directory that holds all experiments.
        name: A directory below it, for runs that belong together.
        version: Which run this is: a number, or the name of a directory. None takes the first number above those that
            exist, so that no run, a resumed one included, writes into another's directory. A version that is given is
            continued where it exists, never overwritten.
        prefix: put before the name of each metric, with a hyphen between.
        flush_logs_every_n_steps: for Lightning's sake. Rows are visible to others at once, which one of 100 updates
            needs no longer for, so any positive number will do.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        name: str | None = "",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ConfigurationError(
                f"CSVLogger(flush_logs_every_n_steps={flush_logs_every_n_steps!r}): expected a positive number."
            )
        self.save_dir = os.fspath(save_dir)
        self.prefix, self.flush_logs_every_n_steps = prefix, flush_logs_every_n_steps
        self._name = name or ""
        self._version = version
        self._columns: list[str] = []
        self._file: TextIO | None = None
        self._written: list[dict[str, str]] = []  # rows of the update of the checkpoint that a run goes on from

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # an open file stays in its process

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one row. Columns are ``epoch``, ``step`` and then the metrics in the order of first appearance."""
        named = {self.prefixed(name): float(value) for name, value in metrics.items() if name != "epoch"}
        row: dict[str, Any] = {**named, "step": step}
        if "epoch" in metrics:
            row["epoch"] = int(metrics["epoch"])
        if self._file is None:
            self._open()
        if self._written and self._is_written(row):
            return
        new = [key for key in row if key not in self._columns]
        if new:
            self._add_columns(new)
        assert self._file is not None
        csv.writer(self._file).writerow([row.get(column, "") for column in self._columns])

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write ``hparams.yaml``; keys of an earlier call are kept. Values unknown to YAML are written as repr."""
        write_hparams(Path(self.log_dir), params)

    def save(self) -> None:
        if self._file is not None:
            self._file.flush()

    def finalize(self, status: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _directory(self) -> Path:
        directory = Path(self.log_dir)
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def _open(self) -> None:
        """Open for appending; a file that is there already (a restarted worker, a given version) is continued."""
        path = self._directory() / METRICS
        self._columns = []
        if path.exists() and path.stat().st_size > 0:
            with path.open(newline="") as existing:
                self._columns = next(csv.reader(existing), [])
            with path.open("rb+") as raw:
                raw.seek(-1, os.SEEK_END)
                if raw.read(1) != b"\n":  # the last row was torn by a crash: ours must not be glued to it
                    raw.write(b"\r\n")
            if self._goes_on_at is not None:
                self._rewrite(self._columns, until=self._goes_on_at)
                with path.open(newline="") as kept:
                    rows = [{key: text for key, text in row.items() if text} for row in csv.DictReader(kept)]
                self._written = [row for row in rows if row.get("step") == str(self._goes_on_at)]
                self._goes_on_at = None
        self._file = path.open("a", buffering=1, newline="")
        if not self._columns:
            self._columns = ["epoch", "step"]
            csv.writer(self._file).writerow(self._columns)

    def _is_written(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is there since before the end: that of an epoch, say, whose checkpoint is of before it."""
        text = {key: str(value) for key, value in row.items()}
        self._written = [one for one in self._written if one["step"] == text["step"]]
        if text not in self._written:
            return False
        self._written.remove(text)
        return True

    def _add_columns(self, new: list[str]) -> None:
        """Give the file a longer header: old rows are copied once, row by row, into a file that then takes its place.

        A reader sees the old file or the new one, and a crash leaves one of them whole. Copying happens only when a
        metric is logged for the first time, which for most runs is twice: at the first row and at the first validation.
        """
        assert self._file is not None
        self._file.close()
        self._columns = [*self._columns, *new]
        self._rewrite(self._columns)
        path = Path(self.log_dir, METRICS)
        self._file = path.open("a", buffering=1, newline="")

    def _rewrite(self, columns: list[str], until: int | None = None) -> None:
        """Copy the rows, those of later updates than ``until`` left out, below a header that may be longer."""
        path = Path(self.log_dir, METRICS)
        temporary = path.with_name(f".{METRICS}.{os.getpid()}")
        with path.open(newline="") as old, temporary.open("w", newline="") as copy:
            rows, writer = csv.reader(old), csv.writer(copy)
            header = next(rows, [])
            step = header.index("step") if "step" in header else 0
            writer.writerow(columns)
            kept = (row for row in rows if until is None or (row[step:] and _number(row[step]) <= until))
            writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in kept)
        temporary.replace(path)


def _number(text: str) -> float:
    return float(text) if text.isdecimal() else math.inf  # of a row that was torn
