"""World: the facts about the processes of a run, from one source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class World:
    """Which process this is, among which. Made by an environment or by the local launcher; flags never overrule it.

    ``source`` names who said so: ``"single"``, ``"local"`` or ``"torchrun"``.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    source: str = "single"

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world_size > 1
