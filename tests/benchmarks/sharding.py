"""What the sharded strategies hold and send, counted in bytes, and what a step costs beside PyTorch written by hand.

    OMP_NUM_THREADS=1 python tests/benchmarks/sharding.py
    python tests/benchmarks/sharding.py --write docs/sharding.md --json sharding.json

Bytes are exact and the same on each run; a difference to the formula ends the run with an error. Times are those of
one update of Trivet's Trainer, with everything off that can be off, and of one step of a loop written by hand, which
turn by turn train the same model on the same batches in the same processes, and end with the same weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pages
import sharding_runs as runs
import torch
from sharding_model import Body

sys.path.append(str(Path(__file__).resolve().parents[1]))

from ranks import Pool

STRATEGIES = ("single", "ddp", "zero1", "zero2", "zero3", "fsdp")
HELD = ("parameters", "gradients", "optimizer state", "gradients between micro-batches")
SENT = ("all-reduce", "reduce-scatter", "all-gather")
START, END = "<!-- measured: begin -->", "<!-- measured: end -->"
LOW_RANK = {"rank": 3}
EVEN = {"even": True}
Table = list[list[str]]


class Ranks:
    """Runs tasks on pools of processes, which stay."""

    def __init__(self) -> None:
        self.pools: dict[int, Pool] = {}

    def __call__(self, world_size: int, task: Callable[..., Any], strategy: str, *args: Any) -> Any:
        """What rank 0's call returned. The first rank holds the most of what does not divide."""
        if world_size == 1:
            return task(strategy, 1, *args)
        if world_size not in self.pools:
            self.close()  # not more processes than needed
            self.pools[world_size] = Pool(world_size)
        outcomes = self.pools[world_size].run(task, strategy, world_size, *args)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes[0]

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()


def cases(worlds: Iterable[int]) -> list[tuple[str, int]]:
    return [(s, w) for s in STRATEGIES for w in worlds if s != "single" or w == 1]


# ------------------------------------------------------------------------------------------------------------ formulas


def padded(module: torch.nn.Module, ranks: int) -> int:
    """Bytes of the parameters when each has a multiple of ``ranks`` rows."""
    return sum(-(-p.shape[0] // ranks) * ranks * p[0].numel() * p.element_size() for p in module.parameters())


def expected(strategy: str, ranks: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that the first rank holds, and bytes of the collectives of an update; all is float32, in one bucket."""
    body = Body()
    whole = padded(body, 1)
    flat = -(-whole // 4 // ranks) * 4  # zero cuts one vector
    rows, blocks = padded(body, ranks), padded(body.layers, ranks)
    every = dict.fromkeys(HELD, whole) | {"optimizer state": 2 * whole}
    if ranks == 1 or strategy == "ddp":
        return every, {"all-reduce": whole} if ranks > 1 else {}
    if strategy in ("zero1", "zero2"):
        shared = {"parameters": flat * ranks, "optimizer state": 2 * flat}
        if strategy == "zero2":
            shared |= {"gradients": flat, "gradients between micro-batches": flat}
        flags = len(list(body.parameters()))
        return every | shared, {"all-reduce": flags, "reduce-scatter": flat * ranks, "all-gather": flat * ranks}
    part = rows // ranks
    shared = {"parameters": part, "gradients": part, "optimizer state": 2 * part}
    # a unit is gathered for its forward and for its backward; fsdp keeps the rest of the module in between
    twice = rows if strategy == "zero3" else blocks
    return every | shared, {"reduce-scatter": rows, "all-gather": rows + twice}


def moved(sent: dict[str, int]) -> int:
    """Bytes that all ranks together move: an all-reduce is a reduce-scatter and an all-gather."""
    return 2 * sent.get("all-reduce", 0) + sum(value for kind, value in sent.items() if kind != "all-reduce")


# ---------------------------------------------------------------------------------------------------------- measuring


def measure(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, by the name of the table and of its row."""
    found: dict[str, Any] = {name: {} for name in ("held", "sent", "sent even", "low rank", "norms", "times")}
    for strategy, world in sorted(cases(options.worlds), key=lambda case: case[1]):
        row = f"{strategy} {world}"
        found["held"][row] = ranks(world, runs.held, strategy)
        found["sent"][row] = ranks(world, runs.sent, strategy, {})
        held, sent = expected(strategy, world)
        if (found["held"][row], found["sent"][row]) != (held, sent):
            raise AssertionError(f"{row}: found {found['held'][row]}, {found['sent'][row]}; formula {held}, {sent}")
        if world > 1:
            found["sent even"][row] = ranks(world, runs.sent, strategy, EVEN)
    for strategy in STRATEGIES[1:]:
        found["low rank"][strategy] = {
            name: ranks(2, runs.sent, strategy, LOW_RANK | {"frozen": frozen})
            for name, frozen in (("all", False), ("frozen", True))
        }
    found["norms"]["single"] = ranks(1, runs.norms, "single", options.clip, 2)
    for strategy in STRATEGIES[1:]:
        found["norms"][strategy] = ranks(2, runs.norms, strategy, options.clip, 1)
    for _ in range(options.rounds):
        for strategy in STRATEGIES[1:]:
            found["times"].setdefault(strategy, []).append(ranks(2, runs.race, strategy, options.steps))
    return found


# ------------------------------------------------------------------------------------------------------------- tables


def held_table(found: dict[str, Any]) -> Table:
    table = [["strategy", "ranks", *HELD[:3], "together", "of one process", HELD[3]]]
    for row, held in sorted(found.items(), key=lambda item: STRATEGIES.index(item[0].split()[0])):
        together, whole = (sum(one[kind] for kind in HELD[:3]) for one in (held, found["single 1"]))
        cells = [f"{value:,}" for value in (*(held[kind] for kind in HELD[:3]), together)]
        table.append([*row.split(), *cells, f"{together / whole:.3f}", f"{held[HELD[3]]:,}"])
    return table


def sent_table(found: dict[str, Any], even: dict[str, Any]) -> Table:
    table = [["strategy", "ranks", *SENT, "of ddp", "the same, even rows"]]
    for row, sent in sorted(found.items(), key=lambda item: STRATEGIES.index(item[0].split()[0])):
        strategy, ranks = row.split()
        if ranks == "1":
            continue
        cells = [f"{sent.get(kind, 0):,}" for kind in SENT]
        ratios = (moved(one[row]) / moved(one[f"ddp {ranks}"]) for one in (found, even))
        table.append([strategy, ranks, *cells, *(f"{ratio:.4f}" for ratio in ratios)])
    return table


def low_rank_table(found: dict[str, Any]) -> Table:
    table = [["strategy", "all trained", "frozen", "falls by", *SENT]]
    for strategy, sent in found.items():
        before, after = moved(sent["all"]), moved(sent["frozen"])
        cells = [f"{sent['frozen'].get(kind, 0):,}" for kind in SENT]
        table.append([strategy, f"{before:,}", f"{after:,}", f"{1 - after / before:.2%}", *cells])
    return table


def norm_table(found: dict[str, list[float]]) -> Table:
    table = [["strategy", "update 1", "update 2", "update 3", "furthest from single"]]
    for strategy, norms in found.items():
        off = max(abs(a / b - 1) for a, b in zip(norms, found["single"], strict=True))
        table.append([strategy, *(f"{norm:.6f}" for norm in norms), f"{off:.0e}"])
    return table


def time_table(found: dict[str, list[dict[str, list[float]]]]) -> Table:
    table = [["strategy", "by hand, ms", "trivet / by hand", "rounds", "by hand again / by hand", "CPU time", "again"]]
    for strategy, rounds in found.items():

        def hand(one: Any, clock: int) -> float:
            return (one["by hand"][clock] + one["by hand again"][clock]) / 2

        def ratios(clock: int, rounds: Any = rounds) -> list[float]:
            return [one["trivet"][clock] / hand(one, clock) for one in rounds]

        def again(clock: int, rounds: Any = rounds) -> float:
            return median(one["by hand again"][clock] / one["by hand"][clock] for one in rounds)

        wall = ratios(0)
        table.append([
            strategy, f"{median(hand(one, 0) for one in rounds) * 1e3:.1f}", f"{median(wall):.3f}",
            f"{min(wall):.2f} to {max(wall):.2f}", f"{again(0):.3f}", f"{median(ratios(1)):.3f}", f"{again(1):.3f}",
        ])  # fmt: skip
    return table


def markdown(table: Table) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]])


def report(found: dict[str, Any], options: argparse.Namespace, load: str) -> str:
    body = Body()
    whole = padded(body, 1)
    lora = Body(**LOW_RANK, frozen=True)
    trained = sum(p.numel() for p in lora.parameters() if p.requires_grad) / sum(p.numel() for p in lora.parameters())
    parts: list[str | Table] = [
        f"""A model of {whole:,} bytes with odd numbers of rows and columns, float32, AdamW, gloo, torch
        {torch.__version__}, {datetime.date.today()}. Bytes are exact: `tests/benchmarks/sharding.py`, which writes this
        section, ends with an error where one differs from the formula.""",
        """**Held by the first rank** after a backward, in bytes, counted as the memory behind all tensors in the
        process. `fsdp` and `zero3` hold 1/W of each parameter, its rows padded; `zero1` and `zero2` 1/W of one vector.
        The last column is what is there between the micro-batches of an accumulated update: `fsdp` and `zero3` then
        keep whole gradients, since they don't send them.""",
        held_table(found["held"]),
        """**Collectives of one update**, in bytes of the whole vector. In the ratios an all-reduce counts twice, since
        it is a reduce-scatter and an all-gather. The all-reduce of `zero1` and `zero2` is one flag per parameter; their
        reduce-scatter is an all-to-all and a sum here, since gloo has none (torch's sends what an all-reduce does).
        `fsdp` and `zero3` send the padding of rows; the last column is the same model with rows that divide by
        four.""",
        sent_table(found["sent"], found["sent even"]),
        f"""**Low-rank training**, {trained:.2%} of the parameters trained and the rest frozen, beside the same model
        with all trained, at 2 ranks: bytes of an update, an all-reduce counted twice; then by kind, when frozen. `fsdp`
        and `zero3` gather frozen weights, too.""",
        low_rank_table(found["low rank"]),
        f"""**Norms of the gradients** as logged, when clipped to {options.clip:g}, at 2 ranks; `single` takes two
        micro-batches for an update.""",
        norm_table(found["norms"]),
    ]
    if found["times"]:
        parts += [
            f"""**Time of a training step** at 2 ranks, beside a loop by hand with the same sharding, of which there are
            two copies, step by step in turn in the same processes: medians of {options.rounds} rounds of
            {options.steps} steps. Trivet is compared with the mean of the two copies; *by hand again* is one against
            the other, so its ratio is the noise. CPU time is that of all threads of the process.
            {load}""",
            time_table(found["times"]),
        ]
    return "\n\n".join(prose(part) if isinstance(part, str) else markdown(part) for part in parts)


def prose(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False, break_long_words=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 and 2 ranks, and one short round of times")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of times; 0 for none")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables between the markers of this page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    options = parser.parse_args()
    options.worlds, options.clip = (1, 2, 4), 0.01
    if options.quick:
        options.worlds, options.rounds, options.steps = (1, 2), 1, 20
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    ranks, before = Ranks(), os.getloadavg()[0]
    try:
        found = measure(ranks, options)
    finally:
        ranks.close()
    load = f"Load average {before:.1f} before and {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores."
    text = report(found, options, load)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.write:
        pages.put(options.write, text, START, END)


if __name__ == "__main__":
    main()
