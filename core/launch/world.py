"""World: the facts about the processes of a run, from one source."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH_DIR = "TRIVET_LAUNCH_DIR"
"""Set in workers of a launcher of Trivet's, so that torch elastic's variables are not taken for torchrun's there."""


@dataclass(frozen=True)
class World:
    """Which process this is, among which. Made by an environment or by the local launcher; flags never overrule it.

    ``source`` names who said so: ``"single"``, a launcher (``"local"``) or an environment (``"torchrun"``). ``address``
    is the ``host:port`` where rank 0 is to be reached, if the variables MASTER_ADDR and MASTER_PORT do not say it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    source: str = "single"
    address: str = ""

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.world_size > 1
