"""Who starts the processes, on which machines: whether the flags, an environment and a launcher agree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import ConfigurationError
from .launch.environment import Node

if TYPE_CHECKING:
    from .combination import Request

MAIN_PORT = 29500
"""Where the nodes of a run meet on node 0 if nothing else was asked for; torchrun's, too."""

Found = tuple[tuple[str, ...], str, tuple[str, ...]]
"""The parties, the reason and the axes of a `Problem`."""


@dataclass(frozen=True)
class NodeFlags:
    """What was given of ``--node_rank``, ``--main_address`` and ``--main_port``."""

    node_rank: int | None = None
    main_address: str | None = None
    main_port: int | None = None

    def __str__(self) -> str:
        """As flags."""
        return " ".join(f"--{name} {value}" for name, value in vars(self).items() if value is not None)

    @property
    def without(self) -> str:
        """The flags that take these back."""
        return " ".join(f"--{name} null" for name, value in vars(self).items() if value is not None)

    @property
    def endpoint(self) -> str:
        host = self.main_address or ""
        return f"{f'[{host}]' if ':' in host else host}:{self.main_port or MAIN_PORT}"


def check(node_rank: Any, main_address: Any, main_port: Any) -> NodeFlags:
    """The flags, each of which means something by itself. Raises ConfigurationError."""
    if node_rank is not None and (type(node_rank) is not int or node_rank < 0):
        raise ConfigurationError(f"node_rank={node_rank!r}. Expected a number from 0 up.")
    if main_port is not None and (type(main_port) is not int or not 0 < main_port < 65536):
        raise ConfigurationError(f"main_port={main_port!r}. Expected a number from 1 to 65535.")
    text = main_address if isinstance(main_address, str) else ""
    if main_address is not None and (not text.strip() or text.count(":") == 1 or set(text) & set("/[] ")):
        raise ConfigurationError(
            f"main_address={main_address!r}. Expected the name or the address of node 0 alone; its port is main_port."
        )
    return NodeFlags(node_rank, main_address, main_port)


def node(given: NodeFlags, num_nodes: int) -> Node | None:
    """The node that the flags describe, where they describe one."""
    if num_nodes == 1 or given.node_rank is None or not given.main_address:
        return None
    return Node(given.node_rank, num_nodes, given.endpoint, source="the flags")


def problems(request: Request) -> Iterator[Found]:
    """What contradicts what."""
    if request.world is not None:
        yield from _of_world(request)
    elif request.node is not None and request.node.source != "the flags":
        yield from _of_environments_node(request)
    else:
        yield from _of_flags(request)


def _of_world(request: Request) -> Iterator[Found]:
    world, launcher, given = request.world, request.launcher, request.place
    assert world is not None
    source = f"the environment ({world.source})"
    if launcher is not None:
        yield (str(launcher), source), "it has started the processes already.", ("launcher",)
    if request.devices != world.local_world_size:
        reason = f"it started {world.local_world_size} processes on this node; flags do not overrule that."
        yield (f"--devices {request.devices}", source), reason, ("devices",)
    if request.num_nodes != world.num_nodes:
        reason = f"it started processes on {world.num_nodes} nodes; flags do not overrule that."
        yield (f"--num_nodes {request.num_nodes}", source), reason, ("num_nodes",)
    if given.node_rank not in (None, world.node_rank):
        reason = f"it says that this is node {world.node_rank}; flags do not overrule that."
        yield (f"--node_rank {given.node_rank}", source), reason, ("place",)
    if given.main_address or given.main_port:
        flags = str(NodeFlags(None, given.main_address, given.main_port))
        reason = "it has told the processes where they meet; leave that out."
        yield (flags, source), reason, ("place",)


def _of_environments_node(request: Request) -> Iterator[Found]:
    """An environment started one process on each machine, which is to start the others."""
    node, given = request.node, request.place
    assert node is not None
    source = f"the environment ({node.source})"
    if request.num_nodes != node.num_nodes:
        reason = f"it started a process on each of {node.num_nodes} nodes; leave out the flag, which overrules nothing."
        yield (f"--num_nodes {request.num_nodes}", source), reason, ("num_nodes",)
    elif request.num_nodes > 1 and not _offers(request, "node_by_node"):
        host, port = node.endpoint
        reason = (
            f"it started one process on each of {node.num_nodes} nodes, and this launcher would not connect those of "
            f"this node with the others. Use --launcher local, or let it start `torchrun --nnodes {node.num_nodes} "
            f"--node-rank {node.rank} --nproc-per-node {request.devices} --master-addr {host} --master-port {port} "
            "...`, each its own rank."
        )
        yield (source, str(request.launcher or "no launcher")), reason, ("launcher",)
    host, port = node.endpoint
    told = {"node_rank": node.rank, "main_address": host, "main_port": port}
    for name, value in told.items():
        if (flag := getattr(given, name)) not in (None, value):
            reason = f"it says that {name} is {value}; flags do not overrule that."
            yield (f"--{name} {flag}", source), reason, ("place",)


def _of_flags(request: Request) -> Iterator[Found]:
    """No environment knows of other processes."""
    given, nodes = request.place, request.num_nodes
    several = f"--num_nodes {nodes}"
    if nodes == 1 or _offers(request, "several_nodes"):
        if str(given):
            why = "there is one node; give --num_nodes, too" if nodes == 1 else f"{request.launcher} numbers the nodes"
            yield (str(given), several if nodes > 1 else "one node"), f"{why}, or leave that out.", ("place",)
        return
    if not _offers(request, "node_by_node"):
        yield (several, str(request.launcher or "no launcher")), "it starts processes on one node.", ("num_nodes",)
        return
    lacking = [name for name in ("node_rank", "main_address") if getattr(given, name) in (None, "")]
    if lacking:
        are = "is" if len(lacking) == 1 else "are"
        reason = (
            f"no environment says which node this is, and {' and '.join(lacking)} {are} not given. Start the same "
            "command on every node, with its own --node_rank, from 0 up, and the --main_address of node 0. Or start "
            f"the script on every node with `torchrun --nnodes {nodes} --nproc-per-node {request.devices} ...`."
        )
        yield (several, str(request.launcher)), reason, ("num_nodes",)
    if given.node_rank is not None and given.node_rank >= nodes:
        reason = f"nodes have the numbers 0 to {nodes - 1}."
        yield (f"--node_rank {given.node_rank}", several), reason, ("num_nodes", "place")


def _offers(request: Request, name: str) -> bool:
    return request.launcher is not None and name in request.launcher.offers
