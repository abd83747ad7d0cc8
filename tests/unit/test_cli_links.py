"""Links on the command line: what one part is made with follows from another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trivet
from trivet.commands import entry
from trivet.commands.links import Link
from trivet.commands.script import Script


class Net(trivet.Module):
    def __init__(self, num_classes: int, batch_size: int = 1, lr: float = 0.1) -> None:
        super().__init__()
        self.num_classes, self.batch_size, self.lr = num_classes, batch_size, lr


class Data(trivet.DataModule):
    made = 0
    calls: list[str] = []  # noqa: RUF012

    def __init__(self, batch_size: int = 8, names: list[str] | None = None) -> None:
        super().__init__()
        self.batch_size, self.names = batch_size, names
        self.width = 2 * batch_size
        type(self).made += 1

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        self.labels = ["a", "b", "c"]
        self.num_classes = 3


class Declaring(Net):
    cli_links = {"data.num_classes": "model.num_classes"}  # noqa: RUF012


@pytest.fixture(autouse=True)
def fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every fit is recorded instead of run: (trainer, module, data)."""
    calls: list[Any] = []
    monkeypatch.setattr(
        trivet.Trainer, "fit", lambda self, module, datamodule, **rest: calls.append((self, module, datamodule))
    )
    monkeypatch.chdir(tmp_path)
    Data.made = 0
    Data.calls.clear()
    return calls


def fit(*argv: str, model: Any = Net, data: Any = Data, **script: Any) -> None:
    trivet.cli(model, data, ["fit", "--max_epochs", "1", *argv], **script)


def refused(capsys: pytest.CaptureFixture[str], *argv: str, **script: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        fit(*argv, **script)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


STATIC = {"data.batch_size": "model.batch_size"}
COMPUTED = {"data.num_classes": "model.num_classes"}


@pytest.mark.parametrize(
    "flags",
    [["--data.batch_size", "4", "--model.num_classes", "2"], ["--model.num_classes", "2", "--data.batch_size", "4"]],
)
def test_an_argument_is_linked_in_any_order_of_flags(fits: list[Any], flags: list[str]) -> None:
    fit(*flags, links=STATIC)
    trainer, module, data = fits[0]
    assert module.batch_size == data.batch_size == 4
    assert trainer.config["model"]["batch_size"] == 4
    assert (Data.made, Data.calls) == (1, [])


def test_an_attribute_is_linked_when_the_data_is_set_up(fits: list[Any]) -> None:
    fit("--model.lr", "0.5", links=COMPUTED)
    trainer, module, data = fits[0]
    assert module.num_classes == 3
    assert trainer.config["model"]["num_classes"] == 3
    assert Data.calls == ["prepare_data", "setup fit"]
    assert not hasattr(data, "num_classes")  # a second one was set up: workers set up theirs
    assert Data.made == 2


def test_an_attribute_is_linked_when_the_data_is_made(fits: list[Any]) -> None:
    fit(links={"data.width": "model.num_classes"})
    assert fits[0][1].num_classes == 16
    assert (Data.made, Data.calls) == (1, [])


def test_functions_and_several_targets(fits: list[Any]) -> None:
    fit(links={"data.labels": ("model.num_classes", len), "data.batch_size": ["model.batch_size", "max_steps"]})
    trainer, module, _ = fits[0]
    assert (module.num_classes, module.batch_size, trainer.max_steps) == (3, 8, 8)
    fit(links={("data.batch_size", "model.lr"): ("model.num_classes", lambda size, lr: int(size * lr * 10))})
    assert fits[1][1].num_classes == 8
    fit(
        "--optimizer",
        "AdamW",
        links={"data": ("model.num_classes", lambda data: data.width), "model.lr": "optimizer.lr"},
    )
    assert fits[2][1].num_classes == 16
    assert fits[2][0].config["optimizer"]["lr"] == 0.1


def test_a_link_is_above_files_and_below_flags(fits: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text("model: {num_classes: 7}")
    fit("--config", "a.yaml", links=COMPUTED)
    assert fits[0][1].num_classes == 3
    fit("--config", "a.yaml", "--model.num_classes", "9", links=COMPUTED)
    assert fits[1][1].num_classes == 9
    capsys.readouterr()
    with pytest.raises(SystemExit):
        fit("--data.batch_size", "4", "--explain", "model.batch_size", "--model.num_classes", "1", links=STATIC)
    assert "8  the link" not in (said := capsys.readouterr().out)
    assert "4  the link from data.batch_size to model.batch_size  <- rules" in said
    with pytest.raises(SystemExit):
        fit("--explain", "model.num_classes", links=COMPUTED)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("model.num_classes = (known when its source is made)")
    assert said.endswith("the link from data.num_classes to model.num_classes <- rules")


@pytest.mark.parametrize("backwards", [False, True])
def test_a_link_follows_the_one_that_fills_its_source(fits: list[Any], backwards: bool) -> None:
    chains: dict[str, Any] = {
        "data.num_classes": ("model.num_classes", lambda count: count * 2),
        "model.num_classes": "model.batch_size",
        "model.batch_size": "optimizer.lr",
        "optimizer.lr": ("max_steps", int),
    }
    links = dict(reversed(chains.items())) if backwards else chains
    fit("--optimizer", "SGD", links=links)
    trainer, module, _ = fits[0]
    assert (module.num_classes, module.batch_size, trainer.max_steps) == (6, 6, 6)
    fit("--optimizer", "SGD", "--model.batch_size", "5", links=links)
    trainer, module, _ = fits[1]
    assert (module.num_classes, module.batch_size, trainer.max_steps) == (6, 5, 5)


def test_a_link_from_two_objects(fits: list[Any]) -> None:
    class Wide(Net):
        def __init__(self, num_classes: int = 1) -> None:
            super().__init__(num_classes)
            self.width = 100  # as data has one

    sources = [("data.width", "model.width"), ("model.width", "data.width"), ("model.width", "data.num_classes")]
    for two, expected in zip(sources, (116, 116, 103), strict=True):
        fit(model=Wide, links={two: ("max_steps", lambda a, b: a + b)})
        assert fits[-1][0].max_steps == expected


def test_a_target_in_a_mapping_of_the_command_line(fits: list[Any]) -> None:
    model = f"{{class_path: {__name__}.Net, init_args: {{num_classes: 9}}}}"
    fit("--model", model, model=None, links=COMPUTED)
    assert fits[0][1].num_classes == 9
    assert Data.calls == []  # nobody asks


def test_links_of_files_and_of_the_module_class(fits: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    fit(model=Declaring)
    assert fits[0][1].num_classes == 3
    Path("a.yaml").write_text("links:\n  data.batch_size: model.num_classes\n")
    fit("--config", "a.yaml")
    assert fits[1][1].num_classes == 8
    Path("b.yaml").write_text("links: [data.batch_size]")
    assert "b.yaml: links" in refused(capsys, "--config", "b.yaml")


def test_what_lightnings_link_arguments_says(fits: list[Any]) -> None:
    links = [
        Link(("data.init_args.batch_size",), "model.init_args.batch_size", when="parse"),
        Link(("data.num_classes",), "model.num_classes", compute=lambda count: count + 1, when="instantiate"),
        Link(("data.batch_size",), "trainer.max_steps", when="parse"),
    ]
    script = Script(Net, Data, links=links)
    code, trainer = entry.run(["fit"], prog="x", script=script)
    assert code == 0
    assert trainer is not None
    assert (fits[0][1].num_classes, fits[0][1].batch_size, trainer.max_steps) == (4, 8, 8)


def test_links_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no 'model.classes'. Did you mean model.num_classes?" in refused(
        capsys, links={"data.batch_size": "model.classes"}
    )
    said = refused(capsys, links={"data.nothing": "model.num_classes"})
    assert "Data has no 'nothing', also after setup. Set it as an attribute, or give --model.num_classes." in said
    assert "no data is selected" in refused(capsys, data=None, links=COMPUTED)
    assert "links" in refused(capsys, links={"num_classes": "model.num_classes"})
    circle: dict[str, Any] = {"model.batch_size": "data.batch_size", "data.batch_size": "model.batch_size"}
    assert "links go in a circle" in refused(capsys, "--model.num_classes", "1", links=circle | COMPUTED)
    assert "model would have to be made before" in refused(capsys, links={"model.depth": "model.num_classes"})
    assert "there is no 'optimizer.l'" in refused(
        capsys, "--model.num_classes", "1", "--optimizer", "SGD", links={"optimizer.l": "max_steps"}
    )


def test_several_processes_of_an_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert "Data has a prepare_data, which one of the 2 processes" in refused(capsys, links=COMPUTED)


def test_a_plan_needs_no_data_for_its_links(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["plan", "--accelerator", "cpu", "--json", "--model", f"{__name__}.Declaring", "--model.num_classes", "2"]
    assert entry.run(args, prog="trivet")[0] == 0
    assert json.loads(capsys.readouterr().out)["accelerator"] == "cpu"
    assert entry.run([*args, "--data", f"{__name__}.Data"], prog="trivet")[0] == 0
