"""What test_ray.py runs in a process of its own: launches in one Ray cluster of two nodes. Prints what each came to."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import trivet
from net import Data, Net
from trivet.errors import RankFailed, Terminated

OUT, DRIVER = Path(sys.argv[1]), os.getpid()
os.environ["OUT"] = str(OUT / "layer.pt")


class Boom(ValueError):
    pass


def ends(how):
    (OUT / "failed").write_text(str(time.time()))
    if how == "asked":
        os.kill(DRIVER, signal.SIGTERM)
        time.sleep(1.0)  # so that word is here before the last update is
        return
    if how == "raise":
        raise Boom("boom 7")
    if how == "exit":
        os._exit(3)
    os.kill(os.getppid() if how == "actor" else os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the actor's end is also this process's


class Ending(trivet.Callback):
    """Ends rank 1 after the third update, unless it did so before; with None nobody."""

    def __init__(self, how=None):
        self.how = how

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        (OUT / f"pid-{trainer.global_rank}").write_text(f"{os.getpid()} {os.getppid()}")
        if self.how and trainer.progress.update == 3 and trainer.global_rank == 1 and not (OUT / "failed").exists():
            ends(self.how)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def fit(name, how=None, **options):
    for file in (*OUT.glob("pid-*"), OUT / "failed"):
        file.unlink(missing_ok=True)
    module = Net()
    trainer = trivet.Trainer(
        accelerator="cpu", precision="fp64", global_batch_size=4, max_epochs=2, enable_progress_bar=False, logger=False,
        enable_model_summary=False, default_root_dir=str(OUT / name),
        callbacks=[Ending(how), trivet.Checkpoint(every_n_updates=1)], **options,
    )  # fmt: skip
    found = {"error": None}
    try:
        trainer.fit(module, datamodule=Data())
    except Terminated as error:
        found["stopped"] = [error.signal, error.update, Path(error.checkpoint).is_dir()]
    except RankFailed as error:
        cause = error.__cause__
        found = {"error": [error.rank, error.type_name], "text": str(error), "cause": type(cause).__name__}
        found["trace"] = error.traceback
        found["seconds"] = time.time() - float((OUT / "failed").read_text())
    found["updates"] = trainer.progress.update
    found["weights"], found["bias"] = module.layer.weight.tolist(), module.layer.bias.tolist()
    time.sleep(1.0)
    ids = [pid for file in OUT.glob("pid-*") for pid in file.read_text().split()]
    found["alive"] = [pid for pid in ids if runs(pid)]
    found["workers"] = len(list(OUT.glob("pid-*")))
    return found


def main():
    import ray
    from ray.cluster_utils import Cluster
    from ray.util import placement_group_table

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, log_to_driver=False)
    two = {"strategy": "ddp", "devices": 2, "launcher": "ray"}
    found = {
        "two": fit("two", **two),
        "nodes": fit("nodes", strategy="ddp", devices=1, num_nodes=2, launcher="ray"),
    }
    for how in ("raise", "exit", "kill", "actor", "asked"):
        found[how] = fit(how, how, **two)
    found["restart"] = fit("restart", "kill", max_restarts=1, **two)
    room = {"name": "ray", "cpus": 9, "wait_s": 1}
    try:
        fit("room", strategy="ddp", devices=2, launcher=room)
    except trivet.errors.LaunchError as error:
        found["room"] = str(error)
    states = {one["state"] for one in placement_group_table().values()}
    found["groups"] = sorted(states)
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(found))


torch.manual_seed(0)
main()
