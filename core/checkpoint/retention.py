"""Which checkpoints of a run are kept: the best, the newest, or all. Books only; nothing here touches a disk."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Retention:
    """The books of one `Checkpoint` callback.

    ``best``: path -> score of the ranked checkpoints that are kept. ``unranked``: those that are kept without a rank,
    oldest first: the newest ``top_k`` where there is no ``monitor``, else the newest one alone, if it isn't among the
    best. ``last``: the newest of all.
    """

    monitor: str | None = None
    mode: str = "min"
    top_k: int = 1
    save_last: bool = False
    best: dict[str, float] = field(default_factory=dict)
    unranked: list[str] = field(default_factory=list)
    last: str = ""
    current_score: float | None = None

    def wants(self, score: float | None) -> bool:
        """Whether a checkpoint with this score is to be written at all; None where it has no score."""
        if self.save_last:
            return True
        return self.top_k != 0 if score is None else self.ranks(score)

    def ranks(self, score: float) -> bool:
        """Whether the score is among the best ``top_k``. NaN never is; of equals the earlier stays."""
        if math.isnan(score) or self.top_k == 0:
            return False
        if self.top_k == -1 or len(self.best) < self.top_k:
            return True
        worst = self.best[self._worst()]
        return score < worst if self.mode == "min" else score > worst

    def add(self, path: str, score: float | None) -> list[str]:
        """Take the newest checkpoint into the books; returns the paths that need not be kept any more."""
        kept = self.paths()
        ranked = score is not None and self.ranks(score)
        if score is not None:
            self.current_score = score
            if ranked:
                self.best[path] = score
                if len(self.best) > self.top_k != -1:
                    del self.best[self._worst()]
        if self.top_k == -1:
            self.unranked += [] if ranked else [path]
        elif self.monitor is None:
            self.unranked = [*self.unranked, path][-max(self.top_k, 1) :]
        else:
            self.unranked = [] if ranked else [path]
        self.last = path
        return [path for path in kept if path not in self.best and path not in self.unranked]

    def forget(self, path: str) -> None:
        """Strike out a checkpoint that is gone."""
        self.best.pop(path, None)
        self.unranked = [kept for kept in self.unranked if kept != path]
        self.last = "" if self.last == path else self.last

    def paths(self) -> list[str]:
        """What is kept, apart from ``last`` where that was saved on an exception."""
        return [*self.best, *self.unranked]

    @property
    def best_path(self) -> str:
        """The best checkpoint; where nothing is monitored, the newest."""
        if self.monitor is None:
            return self.unranked[-1] if self.unranked else ""
        choose = min if self.mode == "min" else max
        return choose(self.best, key=self.best.__getitem__, default="")

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "mode": self.mode,
            "best": dict(self.best),
            "unranked": list(self.unranked),
            "last": self.last,
            "current_score": self.current_score,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the books; scores of another metric or mode are not comparable, and those paths are dropped."""
        same = (state["monitor"], state["mode"]) == (self.monitor, self.mode)
        self.best = dict(state["best"]) if same else {}
        self.current_score = state["current_score"] if same else None
        self.unranked, self.last = list(state["unranked"]), state["last"]

    def clear(self) -> None:
        self.best, self.unranked, self.last, self.current_score = {}, [], "", None

    def _worst(self) -> str:
        choose = max if self.mode == "min" else min
        return choose(reversed(self.best), key=self.best.__getitem__)  # of equals the newest
