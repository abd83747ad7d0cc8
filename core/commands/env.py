"""``trivet env``: who started this process, why Trivet thinks so, and what a communication profile would set."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..errors import ConfigurationError, PluginError, TrivetError
from ..launch import environments, profiles
from ..launch.environment import Node
from ..launch.environments import Answer
from ..launch.world import LAUNCH_DIR, World
from ..registry import entries
from .text import fill
from .words import Words


def show_env(argv: Sequence[str], *, prog: str) -> int:
    """Print it; the exit code is 2 where environments contradict one another."""
    parser = Words(prog=prog, description="Show who started this process and why, and what a profile would set.")
    parser.add_argument(
        "--profile", nargs="?", const="auto", metavar="NAME",
        help=f"show what it would set: auto, which is meant without a name, {', '.join(profiles.profiles())}",
    )  # fmt: skip
    parser.add_argument("--devices", type=int, metavar="N", help="with --profile: processes on this machine")
    parser.add_argument("--nodes", type=int, metavar="N", help="with --profile: machines")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(list(argv))
    found = [_asked(entry) for entry in entries("environment")]
    data: dict[str, Any] = {"environments": [row for row, _ in found], "world": None, "node": None}
    try:
        world, node = environments.detect(), environments.node()
        data |= {"world": world and asdict(world), "node": node and asdict(node)}
        told = _told(world, node)
    except TrivetError as error:
        world = node = None
        data["error"] = told = str(error)
    devices = options.devices or (world.local_world_size if world else node.devices if node else None) or 1
    nodes = options.nodes or (world or node or World()).num_nodes
    name = _profile(options.profile or "auto", nodes)
    data["profile"] = _settings(name, devices, asked=options.profile is not None)
    if options.json:
        print(json.dumps(data, indent=2))
    else:
        print(
            "\n".join([*fill("process   ", told), "", *_rows(data["environments"]), "", *_of_profile(data["profile"])])
        )
    return 2 if "error" in data else 0


def _asked(entry: Any) -> tuple[dict[str, Any], Answer | None]:
    row: dict[str, Any] = {"name": entry.name, "distribution": entry.distribution, "version": entry.version}
    try:
        answer = environments.answer(entry, os.environ)
    except (PluginError, ConfigurationError) as error:
        return row | {"found": "error", "reasons": [str(error)]}, None
    verdict = "process" if answer.world else "node" if answer.node else "nothing"
    return row | {"found": verdict, "reasons": list(answer.reasons)}, answer


def _told(world: World | None, node: Node | None) -> str:
    if os.environ.get(LAUNCH_DIR):
        return f"a worker of a launcher of Trivet's ({LAUNCH_DIR} is set), which says itself which one"
    if world is not None:
        where = world.address or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return (
            f"rank {world.rank} of {world.world_size}, started by {world.source}: {world.local_rank} of "
            f"{world.local_world_size} on node {world.node_rank} of {world.num_nodes}; they meet at {where}"
        )
    if node is not None:
        room = f", with room for {node.devices}" if node.devices else ""
        return (
            f"the only one that {node.source} started on node {node.rank} of {node.num_nodes}{room}; Trivet's launcher "
            f"or torchrun starts the others of this node. The nodes meet at {node.address}"
        )
    choice = os.environ.get(environments.CHOICE)
    return f"one process: {f'{environments.CHOICE}={choice}' if choice else 'no launcher started it as one of several'}"


def _rows(rows: list[dict[str, Any]]) -> list[str]:
    verdicts = {"process": "this process", "node": "this node", "nothing": "no", "error": "error"}
    lines = ["environments"]
    for row in rows:
        origin = "" if row["distribution"] == "trivet" else f"({row['distribution']} {row['version']}) "
        lines += fill(f"  {row['name']:<12}{verdicts[row['found']]:<14}", origin + ", ".join(row["reasons"]))
    return lines


def _profile(name: str, nodes: int) -> str | None:
    """The profile that is meant; ``auto`` needs the accelerator, and with it torch."""
    if name != "auto":
        return profiles.find(name).name
    from ..capabilities import auto_accelerator
    from ..registry import make

    device_type = make("accelerator", auto_accelerator()[0]).plugin.device_type
    return profiles.choose(device_type, nodes, profiles.installed())


def _settings(name: str | None, devices: int, *, asked: bool) -> dict[str, Any] | None:
    if name is None:
        return None
    profile = profiles.find(name)
    found: dict[str, Any] = {"name": name, "about": profile.about, "proven": profile.proven or None, "asked": asked}
    found["variables"] = [
        asdict(one.variable) | {"value": one.value, "users_value": one.users}
        for one in profiles.settings(name, os.environ, devices)
    ]
    return found


def _of_profile(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return fill("profile   ", "none is for this device")
    proven = f"run on {found['proven']}" if found["proven"] else "unproven: never run on hardware of its kind"
    if not found["asked"]:
        return fill("profile   ", f"none unless asked for; --comm_profile auto would be {found['name']} ({proven})")
    lines = fill("profile   ", f"{found['name']}: {found['about']}; {proven}")
    for one in found["variables"]:
        state = "" if one["users_value"] is None else f"  (yours stays: {one['users_value']})"
        lines.append(f"  {one['name']}={one['value']}{state}")
        late = " Read while torch is loaded." if one["before_torch"] else ""
        lines += fill("    ", f"{one['why'][0].upper()}{one['why'][1:]}.{late}")
        lines.append(f"    {one['source']}")
    return lines
