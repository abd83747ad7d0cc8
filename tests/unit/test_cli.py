"""The command line: what it imports, how it reads flags and files, and what it answers to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trivet
from distributions import Install
from trivet.__main__ import main
from trivet.commands import entry, job, parser, selection, text
from trivet.commands.script import Script
from trivet.commands.slots import slots
from trivet.errors import ConfigurationError, RankFailed
from trivet.strategies import single

NET = '''
import trivet, torch

class Backbone(torch.nn.Module): ...
class Small(Backbone):
    def __init__(self, depth: int = 1): super().__init__(); self.depth = depth

class Net(trivet.Module):
    """A net.

    Args:
        width: How wide it is.
    """
    def __init__(self, width: int = 4, lr: float = 0.1, backbone: Backbone | None = None, untyped=None):
        super().__init__()
        self.width, self.lr, self.backbone = width, lr, backbone

class Needy(trivet.Module):
    def __init__(self, name: str): super().__init__(); self.name = name

class Untyped(trivet.Module):
    def __init__(self, name, size: int | None, depth=1): super().__init__(); self.given = (name, size, depth)

class Wrong(trivet.Module):
    def __init__(self): raise trivet.errors.ConfigurationError("from user code")

class Data(trivet.DataModule):
    def __init__(self, batch_size: int = 8): super().__init__(); self.batch_size = batch_size
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a module of its own, which nothing else may remember."""
    (tmp_path / "cli_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "cli_net", raising=False)
    return tmp_path


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every fit is recorded instead of run: (trainer, module, arguments)."""
    calls: list[Any] = []
    monkeypatch.setattr(trivet.Trainer, "fit", lambda self, module, **rest: calls.append((self, module, rest)))
    return calls


def fit(*argv: str) -> tuple[int, Any]:
    return entry.run(["fit", "--max_epochs", "1", "--model", "cli_net.Net", *argv], prog="trivet")


# ---------------------------------------------------------------------------------------------------------- dispatching


@pytest.mark.parametrize("command", ["", "import trivet", "--help", "--version", "plugins", "plugins --json"])
def test_light_commands_import_neither_torch_nor_a_plugin(command: str) -> None:
    program = "import sys, trivet\nfrom trivet.__main__ import main\n"
    if command != "import trivet":
        program += f"main({command.split()!r})\n"
    program += "print('\\nLOADED', *sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    loaded = out.rpartition("LOADED")[2].split()
    assert "trivet" in loaded
    heavy = {"torch", "numpy", "rich", "jsonargparse", "yaml"}
    plugins = ("trivet.strategies", "trivet.accelerators", "trivet.precision")
    assert [name for name in loaded if name.partition(".")[0] in heavy or name.startswith(plugins)] == []


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trivet {trivet.__version__}\n"
    assert main(["--help"]) == 0
    help_text = capsys.readouterr().out
    assert all(command in help_text for command in entry.COMMANDS)
    assert main([]) == 2
    for prog in ("trivet", "python finetune_everything.py"):
        entry.run(["--help"], prog=prog)
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fitt"]) == 2
    assert "there is no command 'fitt'. Did you mean 'fit'?" in capsys.readouterr().err


def test_plugins_lists_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "strategy"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "trivet.strategies"
    assert ["ddp", "trivet", trivet.__version__, "trivet.strategies.ddp:DDP"] in [line.split() for line in lines]
    assert main(["plugins", "accelerator", "--check", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["cpu"]["check"]["status"] == "ok"
    assert "collectives" in rows["cpu"]["check"]["offers"]
    assert main(["plugins", "--check"]) == 0
    shown = capsys.readouterr().out
    assert "    needs       of the strategy: loss_scaling" in shown
    assert "    ok          not this process: none of RANK, WORLD_SIZE" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--matrx"], "--matrx is not known. Did you mean --matrix?"),
        (["strategi"], "there is no kind 'strategi'. Did you mean strategy?"),
        (["new", "precison", "x"], "there is no kind 'precison'. Did you mean precision?"),
        (["new", "precision", "x", "--int=y"], "--int is not known. Did you mean --into?"),
        (["new", "precision"], "the following arguments are required: NAME."),
        (["--matrix", "strategy"], "--matrix shows all kinds"),
    ],
)
def test_mistakes_in_the_words_of_plugins(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"trivet plugins: {message}")
    assert said.count("\n") == 1


def test_plugins_fit_the_terminal_whatever_their_names(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    code = """
        from trivet.plugins import Needs, Policy, Precision
        class Good(Precision):
            policy = Policy()
            needs = Needs(accelerator=frozenset({"dtpye:float32"}))
    """
    name = "acme_enterprise_precision_plugins"
    install(name, f"four-bit-with-stochastic-rounding = {name}:Good\nfp32 = {name}:Good", code, version="12.34.56")
    assert main(["plugins", "precision", "--check"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.count("conflict: another distribution has the name, write") == 2
    assert "write trivet:fp32" in shown
    assert "capability 'dtpye:float32' is none of Trivet's" in " ".join(shown.split())
    assert "did the author mean 'dtype:float32'?" in " ".join(shown.split())


# -------------------------------------------------------------------------------------------------------------- fitting


def test_flags_reach_trainer_model_and_data(fits: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    code, trainer = fit(
        "--strategy.static_graph", "true", "--data.batch_size=16", "--devices", "2", "--strategy", "ddp",
        "--model.lr", "1e-3", "--precision=bf16", "--data", "cli_net.Data", "--limit_train_batches", "0.5",
        "--model.backbone", "cli_net.Small", "--model.backbone.depth", "3", "--accelerator", "cpu",
        "--ckpt_path", "some/where",
    )  # fmt: skip
    assert code == 0
    ((called, module, rest),) = fits
    assert called is trainer
    assert (module.lr, module.width, module.backbone.depth) == (1e-3, 4, 3)
    assert rest["datamodule"].batch_size == 16
    assert rest["ckpt_path"] == "some/where"
    plan = trainer.plan(module)
    assert (plan.strategy, plan.precision, plan.devices) == ("ddp", "bf16-mixed", 2)
    assert plan.options["strategy"]["static_graph"] is True
    assert (trainer.max_epochs, trainer.limit_train_batches) == (1, 0.5)
    assert trainer.config["model"] == {
        "class_path": "cli_net.Net",
        "width": 4,
        "lr": 1e-3,
        "backbone": {"class_path": "cli_net.Small", "init_args": {"depth": 3}},
        "untyped": None,
    }
    assert trainer.config["strategy"]["name"] == "ddp"
    assert capsys.readouterr().out.startswith("fit: 0 epochs, 0 updates")


@pytest.mark.parametrize(
    "strategy",
    [
        "{name: ddp, static_graph: true}",
        "{class_path: ddp, init_args: {static_graph: true}}",
        "{class_path: trivet.strategies.ddp.DDP, init_args: {static_graph: true}}",
    ],
)
@pytest.mark.parametrize(
    "model", ["{class_path: cli_net.Net, init_args: {lr: 1e-3}}", "{class_path: cli_net.Net, lr: 1e-3}"]
)
def test_configuration_files_in_every_form(folder: Path, fits: list[Any], strategy: str, model: str) -> None:
    (folder / "a.yaml").write_text(f"strategy: {strategy}\nmodel: {model}\nmax_epochs: 7\nprecision: 16-true\n")
    (folder / "b.yaml").write_text("max_steps: 5\nprecision: 64\naccelerator: cpu\n")
    argv = ["fit", "--model.width", "9", "--config", "a.yaml", "--config=b.yaml", "--max_epochs", "2"]
    code, trainer = entry.run(argv, prog="trivet")
    assert code == 0
    assert trainer is not None
    module = fits[0][1]
    assert (module.lr, module.width) == (1e-3, 9)
    assert (trainer.max_epochs, trainer.max_steps) == (2, 5)
    plan = trainer.plan()
    assert (plan.strategy, plan.precision) == ("ddp", "fp64")
    assert plan.options["strategy"]["static_graph"] is True


def chosen(*argv: str, command: str = "fit", **environ: str) -> selection.Selection:
    return selection.select(command, argv, Script(), slots(trivet.Trainer), environ)


def test_another_selection_drops_the_options_of_the_first(folder: Path) -> None:
    (folder / "a.yaml").write_text("strategy: {name: ddp, static_graph: true}\nmodel: {class_path: cli_net.Net, lr: 3}")
    found = chosen("--config", "a.yaml", "--strategy", "single", "--model", "cli_net.Needy").settings
    assert found.values == {"strategy": {"name": "single"}, "model": {"class_path": "cli_net.Needy"}}
    found = chosen("--config", "a.yaml", "--strategy", "ddp").settings
    assert found.values["strategy"] == {"name": "ddp", "static_graph": True}
    kept = chosen("--strategy", "ddp", TRIVET_FIT__STRATEGY="ddp", TRIVET_FIT__STRATEGY__STATIC_GRAPH="true")
    assert [flag.key for flag in kept.flags] == ["strategy.static_graph"]
    dropped = chosen("--strategy", "single", TRIVET_FIT__STRATEGY="ddp", TRIVET_FIT__STRATEGY__STATIC_GRAPH="true")
    assert dropped.flags == []


def test_the_stored_configuration_can_be_used_again(folder: Path, fits: list[Any]) -> None:
    _, first = fit("--strategy", "ddp", "--devices", "2", "--accelerator", "cpu", "--model.width", "9")
    (folder / "run.yaml").write_text(json.dumps(first.config))
    code, second = entry.run(["fit", "--config", "run.yaml"], prog="trivet")
    assert code == 0
    assert second is not None
    assert second.config == first.config


def test_only_what_is_selected_is_imported(folder: Path) -> None:
    program = (
        "import sys, trivet\nfrom trivet.commands import script, selection, slots\n"
        "argv = ['--strategy', 'single', '--precision', 'fp32']\n"
        "selection.select('fit', argv, script.Script(), slots.slots(trivet.Trainer), {})\n"
        "print([n for n in ('trivet.strategies.ddp', 'trivet.precision.mixed') if n in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_callbacks_by_class_path(fits: list[Any]) -> None:
    code, trainer = fit("--callbacks+=trivet.callbacks.progress.ProgressBar", "--callbacks.line_interval", "5")
    assert code == 0
    bars = [c.line_interval for c in trainer.callbacks if type(c).__name__ == "ProgressBar"]
    assert bars == [5.0]


def test_help_shows_the_options_of_what_is_selected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fit("--strategy", "ddp", "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--strategy NAME", "--strategy.static_graph", "--model.width", "--max_epochs", "How wide it is."):
        assert flag in shown
    assert max(map(len, shown.splitlines())) <= 80


# -------------------------------------------------------------------------------------------------------------- scripts


def test_a_script_fixes_its_classes_and_defaults(fits: list[Any]) -> None:
    class Net(trivet.Module):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.lr = lr

    defaults = {"max_epochs": 4, "accelerator": "cpu", "strategy": "ddp", "devices": 2}
    trainer = trivet.cli(Net, args=["fit", "--model.lr", "0.2"], trainer_defaults=defaults)
    assert trainer is not None
    assert isinstance(fits[0][1], Net)
    assert fits[0][1].lr == 0.2
    assert trainer.max_epochs == 4
    assert trainer.plan().strategy == "ddp"
    trainer = trivet.cli(Net, args=["fit", "--max_epochs", "5", "--strategy", "auto"], trainer_defaults=defaults)
    assert trainer is not None
    assert trainer.max_epochs == 5
    with pytest.raises(SystemExit) as ended:
        trivet.cli(Net, args=["fit", "--model", "cli_net.Net"])
    assert ended.value.code == 2


def test_defaults_that_the_trainer_does_not_know() -> None:
    script = Script(trainer_defaults={"max_epoch": 3})
    with pytest.raises(ConfigurationError, match=r"trainer_defaults has 'max_epoch'\. Did you mean --max_epochs\?"):
        parser.build_parser("fit", chosen(), script, trivet.Trainer, prog="x")


# ------------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--strategy", "dpd"], "no strategy is named 'dpd'. Did you mean 'ddp'?"),
        (["--max_epoch", "3"], "--max_epoch is not known. Did you mean --max_epochs?"),
        (["--lr", "3"], "--lr is not known. Did you mean --model.lr?"),
        (["--model.with", "3"], "--model.with is not known. Did you mean --model.width?"),
        (["--strategy.static_graph", "true"], "is an option of a strategy, but none is selected. Add --strategy NAME."),
        (["--strategy"], "--strategy was given without a value"),
        (["--model.lr", "high"], "--model.lr 'high'. Expected float."),
        (["--model", "cli_net.Nett"], "module 'cli_net' has no 'Nett'. Did you mean 'cli_net.Net'?"),
        (["--model", "cli_nut.Net"], "there is no module 'cli_nut'"),
        (["--model", "Qqqqq"], "is not an import path"),
        (["--model", "cli_net.Data"], "Expected a subclass of trivet.module.Module"),
        (["--model", "cli_net.Needy"], "model.name must be given: --model.name VALUE, or in a --config file."),
        (["--model", "cli_net.Untyped"], "model.name and model.size must be given: --model.name VALUE, or in a"),
        (["--model", "cli_net.Untyped", "--model.name", "null"], "model.size must be given: --model.size VALUE"),
        (["--config", "missing.yaml"], "--config 'missing.yaml' cannot be read"),
        (["--config", "list.yaml"], "Expected a mapping"),
        (["--config", "torn.yaml"], "is not YAML"),
        (["--config", "typo.yaml"], "typo.yaml: max_epoch is not known. Did you mean max_epochs?"),
        (["--config", "value.yaml"], "Expected a name, or a mapping with 'name' and options"),
        (["stray"], "'stray' belongs to no flag"),
        (["--trainer.max_epoch", "3"], "--trainer.max_epoch is not known. Did you mean --max_epochs?"),
        (["--print_confg"], "--print_confg is not known. Did you mean --print_config?"),
        (["--confg", "a.yaml"], "--confg is not known. Did you mean --config?"),
        (["--print_config=yes"], "--print_config=yes has a value, and --print_config takes none."),
        (["--json"], "--json belongs to `trivet plan`."),
        (["--fast_dev_run"], "--fast_dev_run was given without a value. A switch is given as true or false."),
        (["--strategy", "fsdp", "--strategy.cpu_ofload", "true"], "Did you mean --strategy.cpu_offload?"),
        (["--optimizer", "AdamW", "--optimizer.lrr", "1"], "Did you mean --optimizer.lr?"),
        (["--model.backbone", "cli_net.Small", "--model.backbone.depht", "1"], "Did you mean depth?"),
        (["--optimizer", "SGD", "--lr_scheduler", "ReduceLROnPlateau"], "Add --lr_scheduler.monitor NAME"),
        (
            ["--lr_scheduler", "ConstantLR", "--lr_scheduler.interval", "stepp"],
            "--lr_scheduler.interval 'stepp'. Expected 'epoch', 'update', 'step'.",
        ),
    ],
)
def test_mistakes_get_one_message(folder: Path, capsys: Any, fits: list[Any], argv: list[str], message: str) -> None:
    for name, content in {"list": "[1]", "torn": "a: [", "typo": "max_epoch: 3", "value": "strategy: [ddp]"}.items():
        (folder / f"{name}.yaml").write_text(content)
    code, _ = fit(*argv)
    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert fits == []


def test_a_model_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate"]) == 2
    assert "no model is selected. Add --model package.module.Class" in capsys.readouterr().err


def test_an_import_error_inside_the_users_module_keeps_its_traceback(folder: Path) -> None:
    (folder / "cli_broken.py").write_text("import there_is_no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        entry.run(["fit", "--model", "cli_broken.Net"], prog="trivet")


def test_an_error_of_ours_out_of_user_code_keeps_its_traceback() -> None:
    with pytest.raises(ConfigurationError, match="from user code"):
        entry.run(["fit", "--model", "cli_net.Wrong", "--max_epochs", "1"], prog="trivet")


def test_the_ways_in_which_a_run_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ends_with(error: BaseException) -> int:
        def raises(*args: Any, **rest: Any) -> None:
            raise error

        monkeypatch.setattr(job, "run_job", raises)
        return main(["fit"])

    assert ends_with(RankFailed(1, "ValueError", "boom", "Traceback: the worker's\n")) == 1
    assert capsys.readouterr().err == "Traceback: the worker's\ntrivet fit: rank 1 failed with ValueError: boom\n"
    for module in (entry, single):  # a folder of plugins need not lie in the one of the core
        refused = RankFailed(1, "ConfigurationError", "no data", f'  File "{module.__file__}", line 1\n')
        refused.__cause__ = ConfigurationError("no data")
        assert ends_with(refused) == 2
        assert capsys.readouterr().err == "trivet fit: no data\n"
    assert ends_with(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "trivet fit: interrupted\n"
    with pytest.raises(ZeroDivisionError):
        ends_with(ZeroDivisionError())


# -------------------------------------------------------------------------------------------------------------- plan


def test_plan_prints_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--strategy", "ddp", "--accelerator", "cpu", "--precision", "bf16", "--devices", "2"]
    assert main(["plan", *flags, "--model", "cli_net.Net"]) == 0
    assert "bf16-mixed" in capsys.readouterr().out
    assert main(["plan", *flags, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["strategy"], shown["precision"], shown["world_size"]) == ("ddp", "bf16-mixed", 2)


def test_plan_prints_every_conflict(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--strategy", "single", "--accelerator", "cpu", "--devices", "2"]
    assert main(["plan", *flags]) == 2
    assert "this combination cannot run" in capsys.readouterr().err
    assert main(["plan", *flags, "--json"]) == 2
    conflicts = json.loads(capsys.readouterr().out)["conflicts"]
    assert "strategy 'single'" in " ".join(conflicts[0]["parties"])
    assert main(["plan", "--strategy", "dpd", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "PluginNotFound"


def test_plan_explains_who_wants_what_and_who_offers_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--accelerator", "cpu", "--precision", "fp16", "--devices", "2", "--explain"]
    assert main(["plan", *flags, "--strategy", "ddp", "--gradient_clip_val", "1"]) == 0
    shown = capsys.readouterr().out
    rows = [" ".join(line.split()) for line in shown.splitlines()]
    assert "capability wanted by offered by" in rows
    assert "loss_scaling precision fp16-mixed strategy ddp" in rows
    assert "clipping --gradient_clip_val strategy ddp" in rows
    assert any(row.startswith("accelerator cpu autocast:bfloat16") for row in rows)
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["plan", *flags, "--strategy", "single"]) == 2
    captured = capsys.readouterr()
    assert "several_processes 2 processes MISSING: not offered by strategy single" in " ".join(captured.out.split())
    assert "this combination cannot run" in captured.err
    assert main(["plan", *flags, "--strategy", "single", "--json"]) == 2
    missing = [row for row in json.loads(capsys.readouterr().out)["capabilities"] if not row["offered"]]
    assert missing == [
        {"capability": "several_processes", "wanted_by": "2 processes", "asked": "strategy single", "offered": False}
    ]
    assert main(["plan", *flags, "--strategy", "ddp", "--json"]) == 0
    assert {row["offered"] for row in json.loads(capsys.readouterr().out)["capabilities"]} == {True}


def test_messages_are_folded_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "this combination cannot run:\n  - " + "strategy 'single' and 2 processes " * 5
    assert text.for_terminal(message) == message
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    folded = text.for_terminal(message).splitlines()
    assert max(map(len, folded)) <= 80
    assert [line[:5] for line in folded] == ["this ", "  - s", "    '", "    a"]


def test_validate_prints_the_metrics(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trivet.Trainer, "validate", lambda *args, **rest: [{"val/loss": 0.5, "val/acc": 0.98764}])
    assert main(["validate", "--model", "cli_net.Net"]) == 0
    assert capsys.readouterr().out == "validate: val/acc 0.9876, val/loss 0.5\n"
