"""A notebook cell trains on two processes."""

import textwrap

import nbclient
import nbformat
import pytest


# the client's own event loop and sockets are closed by the garbage collector
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_fit_in_a_cell(tmp_path):
    cells = [
        """
        import torch, trivet
        from torch import nn
        from torch.utils.data import DataLoader

        class Net(trivet.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(1, 1, bias=False)
                nn.init.zeros_(self.layer.weight)
            def training_step(self, batch, batch_idx):
                loss = mean(self.layer(batch))
                self.log("loss", loss)
                return loss
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1.0)
        """,
        """
        def mean(values):
            return values.mean()
        """,
        """
        net = Net()
        trainer = trivet.Trainer(accelerator="cpu", devices=2, max_epochs=1)
        trainer.fit(net, DataLoader(torch.ones(8, 1), 2))
        """,
        """
        print("weight", net.layer.weight.item(), "updates", trainer.progress.update)
        print("metrics", trainer.callback_metrics)
        """,
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(textwrap.dedent(cell)) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    text = "".join(output["text"] for output in notebook.cells[-1].outputs)
    assert "weight -2.0 updates 2" in text
    assert "metrics {'loss': -1.0}" in text
