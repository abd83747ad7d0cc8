"""The commands on the pages of `docs/running`: jobs are printed, runs are planned, `trivet env` is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import TRAIN
from trivet.commands import entry

PAGES = Path(__file__).parents[2] / "docs" / "running"
OWN = ("index.md", "local.md", "torchrun.md", "slurm.md", "kubernetes.md", "ray.md", "others.md")


def commands() -> Iterator[str]:
    for page in OWN:
        for block in re.findall(r"^```bash\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL):
            yield from block.splitlines()


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_of_a_page(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "net.py").write_text(TRAIN)
    words = shlex.split(command.partition(" > ")[0])
    words = words[words.index("trivet") + 1 :]  # after what starts it
    if words[0] == "submit":
        words = ["submit", "--dry-run", *(word for word in words[1:] if word != "--dry-run")]
    elif words[0] == "fit":
        words[0] = "plan"
    assert words[0] in ("submit", "plan", "env")
    assert entry.run(words, prog="trivet")[0] == 0, capsys.readouterr().err
    assert capsys.readouterr().out
