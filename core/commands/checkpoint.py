"""``trivet checkpoint``: list, look at, check, compare and convert checkpoints, without a process group."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.files import Place, as_path
from .text import aligned, fill

if TYPE_CHECKING:
    from ..checkpoint.contents import Contents
    from ..checkpoint.listing import Found


def run_checkpoint(argv: Sequence[str], *, prog: str) -> int:
    """Run one of the subcommands; 1 where `verify` or `list` found something wrong, or `diff` a difference."""
    options = _parser(prog).parse_args(list(argv))
    return int(options.run(options))


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description="Look at checkpoints and convert them. No training processes are needed."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, run: Any, what: str, more: str = "") -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}. {more}".strip())
        one.set_defaults(run=run)
        return one

    one = add("list", _list, "list the checkpoints below a directory, newest last")
    one.add_argument("directory", metavar="DIR", type=as_path, help="a run's directory, or any above it")
    one.add_argument("--json", action="store_true", help="print JSON")

    one = add("inspect", _inspect, "show what is in a checkpoint", "No tensor is loaded.")
    one.add_argument("path", metavar="PATH", type=as_path)
    one.add_argument("--json", action="store_true", help="print JSON")

    one = add("verify", _verify, "check every file of checkpoints", "Exit code 1 where something is wrong.")
    one.add_argument("paths", metavar="PATH", nargs="+", type=as_path)

    one = add(
        "consolidate", _consolidate, "write the weights as one safetensors file",
        "Tied weights are in it under each of their names, so that a strict load_state_dict finds them all.",
    )  # fmt: skip
    one.add_argument("path", metavar="PATH", type=as_path)
    one.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="for instance model.safetensors")
    one.add_argument("--dtype", help="convert floating-point weights: bfloat16, float16, float32 or float64")
    one.add_argument(
        "--prefix", default="", help="only the weights whose names begin so, without it: `model.` for self.model"
    )

    one = add("diff", _diff, "show what two checkpoints differ in", "Exit code 1 where they differ, as diff's.")
    one.add_argument("a", metavar="A", type=as_path)
    one.add_argument("b", metavar="B", type=as_path)

    one = add(
        "convert", _convert, "make a checkpoint of one of DeepSpeed's or Lightning's",
        "PATH is a checkpoint of strategy deepspeed, whose optimizer state then is any strategy's to read, or a "
        "Lightning .ckpt file. What has no counterpart is listed.",
    )  # fmt: skip
    one.add_argument("path", metavar="PATH", type=as_path)
    one.add_argument("-o", "--output", required=True, type=as_path, metavar="DIR", help="the checkpoint to write")
    one.add_argument(
        "--model", metavar="CLASS", help="of a .ckpt: package.module.Class, whose optimizers tell the parameters' names"
    )
    one.add_argument(
        "--allow", action="append", default=[], metavar="NAME",
        help="of a .ckpt: a class that may be unpickled, as pathlib.PosixPath; only if you trust the file",
    )  # fmt: skip
    return parser


def _list(options: argparse.Namespace) -> int:
    from ..checkpoint.listing import find

    found = find(options.directory)
    if options.json:
        print(json.dumps([_as_data(one) for one in found], indent=2))
    elif not found:
        print(f"no checkpoints below {options.directory}")
    else:
        rows = [(_relative(one.path, options.directory), *_standing(one), _remark(one)) for one in found]
        print("\n".join(line for lines in aligned(rows) for line in lines))
    return 1 if any(one.problems for one in found) else 0


def _relative(path: Place, directory: Place) -> str:
    return path.as_posix().removeprefix(f"{directory.as_posix()}/")


def _standing(found: Found) -> tuple[str, str, str]:
    if found.manifest is None:
        return "-", "-", "-"
    progress = found.manifest["progress"]
    return f"epoch {progress.get('epoch', '?')}", f"update {progress.get('update', '?')}", size_text(found.size)


def _remark(found: Found) -> str:
    if found.problems:
        return f"INCOMPLETE: {'; '.join(found.problems)}"
    assert found.manifest is not None
    metrics = " ".join(f"{name}={value:.4g}" for name, value in found.manifest["metrics"].items())
    marks = f"<- {', '.join(found.marks)}" if found.marks else ""
    return "  ".join(part for part in (metrics, marks) if part)


def _as_data(found: Found) -> dict[str, Any]:
    manifest = found.manifest or {}
    return {
        "path": str(found.path),
        "complete": not found.problems,
        "problems": found.problems,
        "progress": manifest.get("progress"),
        "metrics": manifest.get("metrics"),
        "size": found.size,
        "created": manifest.get("created"),
        "marks": found.marks,
    }


def _inspect(options: argparse.Namespace) -> int:
    from ..checkpoint.contents import open_checkpoint
    from ..checkpoint.parts import errors

    path = _existing(options.path)
    with errors(f"cannot read checkpoint {str(path)!r}"):
        found = open_checkpoint(path)
        state = found.state()
    if options.json:
        tensors = {
            name: {"dtype": entry.dtype, "shape": entry.shape, "size": entry.size, "parts": len(entry.chunks)}
            for name, entry in found.index.items()
        }
        more = {"tensors": tensors, "hparams": state["hparams"], "callbacks": sorted(state["callbacks"])}
        print(json.dumps({"path": str(path), **found.manifest, **more}, indent=2, default=str))
    else:
        print("\n".join(_described(found, state)))
    return 0


def _described(found: Contents, state: dict[str, Any]) -> list[str]:
    values = found.manifest
    files = values["files"]
    written = (
        f"{values.get('created')}, by trivet {values.get('trivet')} with torch {values.get('torch')} on "
        f"{values.get('world_size')} process(es)"
    )
    size = f"{size_text(sum(entry['size'] for entry in files.values()))} in {len(files)} files"
    lines = [str(found.directory), *fill("written: ", written, indent=2), f"size: {size}"]
    for title, items in (
        ("progress", values["progress"]),
        ("metrics", values["metrics"]),
        ("plan", values["plan"]),
        ("hparams", state["hparams"]),
    ):
        text = ", ".join(f"{key}={_brief(value)}" for key, value in items.items() if value not in (None, {}, []))
        lines += fill(f"{title}: ", text or "none", indent=2)
    if state["callbacks"]:
        lines += fill("callbacks: ", ", ".join(sorted(state["callbacks"])), indent=2)
    if own := [one["own_folder"] for one in state["optimizers"] if "own_folder" in one]:
        lines += fill("optimizer: ", f"in the folder {own[0]!r}, which only the strategy reads that wrote it; `trivet "
                      "checkpoint convert` makes it any strategy's", indent=2)  # fmt: skip
    for number, one in enumerate(state["optimizers"]):
        for group in one["groups"]:
            text = ", ".join(f"{key}={_brief(value)}" for key, value in group.items() if key != "params")
            lines += fill(f"optimizer {number}: ", f"{len(group['params'])} parameters, {text}", indent=2)
    for prefix, kind in (
        ("module/", "weights and buffers"),
        ("beside/", "kept by callbacks"),
        ("strategy/", "kept by the strategy"),
        ("optimizer/", "optimizer state"),
    ):
        entries = {name.removeprefix(prefix): one for name, one in found.index.items() if name.startswith(prefix)}
        if entries:
            total = sum(one.size for one in entries.values())
            lines += ["", f"{kind}: {len(entries)} tensors, {size_text(total)}"]
            rows = [(name, one.dtype, "x".join(map(str, one.shape)) or "scalar") for name, one in entries.items()]
            lines += [line for row in aligned(rows, indent="  ") for line in row]
    return lines


def _brief(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _verify(options: argparse.Namespace) -> int:
    from ..checkpoint.verify import verify

    bad = 0
    for path in map(_existing, options.paths):
        found = verify(path)
        bad += bool(found.problems)
        for problem in found.problems:
            print(f"BAD  {path}: {problem}")
        if not found.problems:
            note = f"; {found.unsummed} without a checksum, by size only" if found.unsummed else ""
            print(f"ok   {path} ({found.files} files, {size_text(found.size)}{note})")
    return 1 if bad else 0


def _consolidate(options: argparse.Namespace) -> int:
    from ..checkpoint.consolidate import consolidate, dtype_named

    dtype = dtype_named(options.dtype) if options.dtype else None
    found = consolidate(_existing(options.path), options.output, dtype=dtype, prefix=options.prefix)
    print(f"{options.output}: {found.tensors} tensors, {size_text(found.size)}")
    if found.left_out:
        names = ", ".join(found.left_out[:8]) + (", ..." if len(found.left_out) > 8 else "")
        print("\n".join(fill("left out: ", names, indent=2)))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from ..checkpoint.compare import compare

    found = compare(_existing(options.a), _existing(options.b))
    if found:
        print(f"A: {options.a}\nB: {options.b}")
        print("\n".join(line for lines in aligned(found, indent="  ") for line in lines))
    return 1 if found else 0


def _convert(options: argparse.Namespace) -> int:
    from ..checkpoint.convert import convert

    report = convert(options.path, options.output, model=options.model, allow=options.allow)
    print(f"{options.output}: {report.what}")
    for title, lines in (("taken over", report.taken), ("not taken over", report.left)):
        if lines:
            print(f"{title}:")
            for line in lines:
                print("\n".join(fill("  - ", line)))
    return 0


def _existing(path: Place) -> Place:
    from ..errors import CheckpointError

    if not path.exists():
        raise CheckpointError(f"{str(path)!r} does not exist")
    if path.is_dir() and not (path / "manifest.json").exists() and _holds_some(path):
        raise CheckpointError(f"{str(path)!r} holds checkpoints and is none; see `trivet checkpoint list {path}`")
    return path


def _holds_some(directory: Place) -> bool:
    return any(file.name == "manifest.json" for file in directory.rglob("manifest.json"))


def size_text(size: float) -> str:
    """Bytes as a person says them."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
