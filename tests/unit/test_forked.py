"""What a forked process, such as a loader's worker, leaves alone."""

import gc
import multiprocessing

import torch.distributed as dist
import trivet  # noqa: F401  # its groups are what is inherited
from trivet.launch import group  # noqa: F401


class Held:
    """Garbage that only a collection finds, with a process group that joins its threads when it is freed."""

    def __init__(self):
        self.itself = self
        self.group = dist.group.WORLD


def test_a_collection_does_not_free_an_inherited_process_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    gc.disable()
    try:
        Held()
        dist.destroy_process_group()
        child = multiprocessing.get_context("fork").Process(target=gc.collect)
        child.start()
        child.join(10)
        hangs = child.is_alive()
        child.kill()
        assert not hangs
    finally:
        gc.enable()
