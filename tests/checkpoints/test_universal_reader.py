"""The reader of docs/checkpoints.md, as somebody without torch would run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy
import torch
from ranks import run
from trivet.checkpoint import directory
from trivet.state import TrainState

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
PROGRAM = """
import sys
{reader}
np.savez({out!r}, **read(Path({path!r})))
assert "torch" not in sys.modules
"""


def write(path: Path) -> None:
    """Task: a checkpoint of sharded, transposed, empty and scalar tensors, of several dtypes."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    try:
        mesh = init_device_mesh("cpu", (2,))
        values = torch.arange(15.0).reshape(5, 3)
        module = {
            "rows": distribute_tensor(values, mesh, [Shard(0)]),
            "columns": distribute_tensor(values.double(), mesh, [Shard(1)]),
            "one.row": distribute_tensor(values[:1].bfloat16(), mesh, [Shard(0)]),
            "transposed": torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
            "none": torch.empty(0, 2),
            "scalar": torch.tensor(True),
        }
        optimizer = {"state": {"rows": {"exp_avg": module["rows"], "step": torch.tensor(3.0)}}, "groups": []}
        state = TrainState(module=module, optimizers=[optimizer])
        directory.write(path, state, rank=dist.get_rank(), world_size=2)
    finally:
        dist.destroy_process_group()


def test_the_reader_on_the_page_reads_every_tensor(tmp_path: Path) -> None:
    path, out = tmp_path / "saved", tmp_path / "read.npz"
    run(2, write, path)
    begin, end = "<!-- reader: begin -->\n\n```python\n", "```\n\n<!-- reader: end -->"
    reader = PAGE.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert reader
    program = PROGRAM.format(reader=reader, path=str(path), out=str(out))
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    found = numpy.load(out)
    stored = directory.read(path)
    expected = {f"module/{name}": tensor for name, tensor in stored.module.items()}
    expected |= {f"optimizer/0/rows/{key}": tensor for key, tensor in stored.optimizers[0]["state"]["rows"].items()}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        value = torch.from_numpy(found[name])
        assert torch.equal(value.view(torch.bfloat16) if tensor.dtype == torch.bfloat16 else value, tensor), name
    assert stored.module["rows"].tolist() == torch.arange(15.0).reshape(5, 3).tolist()
