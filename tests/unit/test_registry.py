"""Plugins of throw-away distributions: folders with metadata, put on sys.path."""

from __future__ import annotations

import shutil
import subprocess
import sys
from textwrap import dedent
from typing import Any

import pytest
import torch
from distributions import GOOD, Install
from trivet import registry
from trivet.capabilities import resolve
from trivet.errors import ConfigurationError, PlanError, PluginBroken, PluginConflict, PluginInvalid, PluginNotFound
from trivet.plugins import Policy, Precision


def test_listing_names_distribution_version_and_target() -> None:
    assert registry.Entry("precision", "fp64", "trivet", "0.1.0", "trivet.precision.full:FP64") in registry.entries(
        "precision"
    )
    names = [entry.name for entry in registry.entries("precision") if entry.distribution == "trivet"]
    assert names == [
        "bf16-mixed", "bf16-true", "bnb-int8", "bnb-nf4", "fp16-mixed", "fp16-true", "fp32", "fp64", "fp8-mixed",
        "transformer-engine",
    ]  # fmt: skip


def test_listing_and_finding_import_neither_torch_nor_a_plugin() -> None:
    code = (
        "import sys; from trivet import capabilities, registry\n"
        "registry.entries('strategy'); registry.find('precision', 16)\n"
        "assert not {'torch', 'trivet.plugins', 'trivet.precision'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_not_found_names_the_nearest_and_the_available() -> None:
    with pytest.raises(PluginNotFound) as caught:
        registry.find("strategy", "singel")
    assert str(caught.value).startswith("no strategy is named 'singel'. Did you mean 'single'? Available: auto, ddp, ")
    with pytest.raises(PluginNotFound, match=r"no precision is named 'zzz'. Available: bf16-mixed"):
        registry.find("precision", "zzz")
    with pytest.raises(ConfigurationError, match=r"no kind of plugin is named 'colour'. Kinds: strategy"):
        registry.entries("colour")


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("fp8", "fp8-mixed"),
        ("bf16", "bf16-mixed"),
        ("fp16", "fp16-mixed"),
        (16, "fp16-mixed"),
        ("16", "fp16-mixed"),
        ("16-mixed", "fp16-mixed"),
        ("16-true", "fp16-true"),
        (32, "fp32"),
        ("32-true", "fp32"),
        (64, "fp64"),
        ("64-true", "fp64"),
        ("trivet:bf16", "bf16-mixed"),
    ],
)
def test_aliases(given: str | int, name: str) -> None:
    assert registry.find("precision", given).name == name
    assert registry.canonical("precision", given).rpartition(":")[2] == name


def test_alias_of_an_accelerator() -> None:
    assert registry.find("accelerator", "gpu").name == "cuda"
    assert registry.canonical("accelerator", "tpu") == "xla"


def test_what_is_installed_or_removed_while_a_process_runs_is_seen(install: Install) -> None:
    folder = install("acme_one", "one = acme_one:Good")
    assert registry.find("precision", "one").distribution == "acme_one"
    info = folder / "acme_two-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme_two\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[trivet.precision]\ntwo = acme_two:Good\n")
    assert registry.find("precision", "two").distribution == "acme_two"
    shutil.rmtree(info)
    with pytest.raises(PluginNotFound):
        registry.find("precision", "two")
    registry.entries("precision").clear()  # what is given out is the caller's own
    assert registry.find("precision", "one").name == "one"


def test_two_distributions_with_one_name(install: Install) -> None:
    install("acme_one", "sharp = acme_one:Good")
    install("acme_two", "sharp = acme_two:Good", version="3.0")
    assert [entry.qualified for entry in registry.entries("precision") if entry.name == "sharp"] == [
        "acme_one:sharp",
        "acme_two:sharp",
    ]
    with pytest.raises(PluginConflict) as caught:
        registry.make("precision", "sharp")
    assert "Say which one you mean: 'acme_one:sharp' (acme_one 1.2), 'acme_two:sharp' (acme_two 3.0)." in str(
        caught.value
    )
    selected = registry.make("precision", "acme-two:sharp")
    assert (selected.distribution, selected.version, selected.name) == ("acme_two", "3.0", "sharp")
    assert "acme_one" not in sys.modules
    with pytest.raises(PluginNotFound, match=r"Available: acme_one:sharp, acme_two:sharp, bf16-mixed"):
        registry.find("precision", "nothing:zzz")


def test_an_alias_of_ours_cannot_be_taken_silently(install: Install) -> None:
    install("acme_taker", "bf16 = acme_taker:Good")
    with pytest.raises(PluginConflict, match=r"'acme_taker:bf16' .*, 'trivet:bf16-mixed'"):
        registry.find("precision", "bf16")
    assert registry.find("precision", "bf16-mixed").distribution == "trivet"


def test_the_same_distribution_found_twice_counts_once(install: Install) -> None:
    install("acme_twice", "sharp = acme_twice:Old", version="1.0")
    install("acme_twice", "sharp = acme_twice:Good", version="2.0")
    assert registry.find("precision", "sharp").version == "2.0"


def test_unreadable_metadata_disturbs_nobody_else(install: Install) -> None:
    install("acme_torn", "this line is no entry point")
    assert registry.make("precision", "fp32").name == "fp32"
    with pytest.raises(PluginNotFound, match=r"could not be read: acme_torn"):
        registry.find("precision", "sharp")


def test_import_that_raises(install: Install) -> None:
    folder = install("acme_raises", "sharp = acme_raises:Good", "raise RuntimeError('no licence')")
    assert registry.make("precision", "fp32").distribution == "trivet"
    with pytest.raises(PluginBroken) as caught:
        registry.load("precision", "sharp")
    assert str(caught.value) == (
        "precision 'sharp' (acme_raises 1.2) cannot be loaded from 'acme_raises:Good': RuntimeError: no licence "
        f"(File '{folder / 'acme_raises.py'}', line 1: raise RuntimeError('no licence'))."
    )
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    ("more", "hint"),
    [
        (
            "Provides-Extra: fast\nRequires-Dist: acme-missing>=2; extra == 'fast'\n",
            r"Install it with: pip install 'acme_extra\[fast\]'",
        ),
        ("Requires-Dist: acme_missing\n", "acme_extra requires 'acme_missing': pip install acme_missing"),
        ("Provides-Extra: fast\n", "has the extras fast; one of them may bring 'acme_missing'"),
        ("", "Install the package that has the module 'acme_missing'; acme_extra does not say which"),
    ],
)
def test_missing_third_package_is_named_with_the_extra_that_brings_it(install: Install, more: str, hint: str) -> None:
    install("acme_extra", "sharp = acme_extra:Good", "import acme_missing", more=more)
    with pytest.raises(PluginBroken, match=hint):
        registry.load("precision", "sharp")


def test_missing_attribute(install: Install) -> None:
    install("acme_bare", "sharp = acme_bare:Absent")
    with pytest.raises(PluginBroken, match=r"has no attribute 'Absent'") as caught:
        registry.load("precision", "sharp")
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("class Bad: pass", "is acme_bad.Bad, which is not a subclass of trivet's Precision"),
        ("class Bad(Precision): pass", "does not define policy, which Precision asks for"),
        (
            "class Bad(Precision):\n    interface = 7\n    policy = Policy()",
            "speaks interface 7; this Trivet .* speaks 1",
        ),
        (
            "class Bad(Precision):\n    policy = Policy()\n    def convert(self): ...",
            r"convert\(self\) cannot be called as convert\(self, module.*too many positional arguments",
        ),
        (
            "class Bad(Precision):\n    policy = Policy()\n    def convert(self, module, *, hard): ...",
            "missing a required argument: 'hard'",
        ),
        ("class Bad(Precision):\n    policy = Policy()\n    convert = 3", "convert must be a method, it is 3"),
        ("class Bad(Precision):\n    def policy(self): ...", "policy must be a property or a value, it is a method"),
        ("Bad = 3", "names 3. Expected a class, or a function annotated to return one"),
        ("def Bad(): ...", "the function Bad has no return annotation. Expected a Precision"),
        ("def Bad() -> int: ...", "annotated to return <class 'int'>"),
        ("def Bad() -> Unknown: ...", "the annotations of Bad cannot be read: name 'Unknown'"),
        ("def Bad() -> type[Precision]: return 3", r"Bad\(\) returned 3, it is annotated to return a class"),
    ],
)
def test_targets_that_are_no_plugins(install: Install, body: str, message: str) -> None:
    code = f"from __future__ import annotations\nfrom trivet.plugins import Policy, Precision\n{body}"
    install("acme_bad", "sharp = acme_bad:Bad", code)
    with pytest.raises(PluginInvalid, match=message):
        registry.load("precision", "sharp")


def test_accelerator_without_device_type(install: Install) -> None:
    code = """
        from trivet.plugins import Accelerator
        class Bad(Accelerator):
            def is_available(self): return True
            def device_count(self): return 1
            def device(self, local_rank): ...
    """
    install("acme_typeless", "odd = acme_typeless:Bad", code, kind="accelerator")
    with pytest.raises(PluginInvalid, match=r"does not define device_type, collective_backend"):
        registry.load("accelerator", "odd")


def test_functions_that_return_an_instance_or_a_class(install: Install) -> None:
    code = dedent(GOOD) + dedent("""
        def deep(width: int = 1) -> Good:
            return Good(width=width, depth=99)

        def chosen() -> type[Good]:
            return Good
    """)
    install("acme_made", "deep = acme_made:deep\nchosen = acme_made:chosen", code)
    assert registry.make("precision", {"name": "deep", "width": 5}).options == {"width": 5, "depth": 99}
    assert registry.make("precision", {"name": "chosen", "depth": 3}).options == {"width": 8, "depth": 3}
    with pytest.raises(ConfigurationError, match=r"has no option 'depth'.*Its options: width"):
        registry.make("precision", {"name": "deep", "depth": 5})


def test_mappings() -> None:
    by_name = registry.make("precision", {"name": "fp16", "interval": 3})
    by_path = registry.make(
        "precision", {"class_path": "trivet.precision.mixed.FP16Mixed", "init_args": {"interval": 3}}
    )
    assert (by_name.name, by_name.options) == (by_path.name, by_path.options)
    assert by_path.name == "fp16-mixed"
    assert by_path.plugin.interval == 3
    assert registry.make("precision", {"class_path": "fp16", "init_args": {"interval": 3}}).options == by_name.options
    with pytest.raises(ConfigurationError, match=r"either 'name' or 'class_path'"):
        registry.make("precision", {"interval": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"widht": 3}, "has no option 'widht'. Did you mean 'width'\\? Its options: width, depth."),
        ({"zzz": 3}, "has no option 'zzz'. Its options: width, depth."),
    ],
)
def test_unknown_options(install: Install, options: dict[str, Any], message: str) -> None:
    install("acme_good", "sharp = acme_good:Good")
    with pytest.raises(ConfigurationError, match=message):
        registry.make("precision", {"name": "sharp", **options})


def test_constructor_that_refuses(install: Install) -> None:
    code = """
        from trivet.plugins import Policy, Precision
        class Picky(Precision):
            policy = Policy()
            def __init__(self, size, kind=1):
                if kind == 2: import acme_missing
                raise ValueError("size is odd")
    """
    install("acme_picky", "sharp = acme_picky:Picky", code)
    with pytest.raises(ConfigurationError, match=r"\(acme_picky 1.2\) needs 'size'. Its options: size, kind"):
        registry.make("precision", "sharp")
    with pytest.raises(ConfigurationError, match=r"refused its options {'size': 3}: ValueError: size is odd"):
        registry.make("precision", {"name": "sharp", "size": 3})
    with pytest.raises(PluginBroken, match=r"cannot be made: ModuleNotFoundError"):
        registry.make("precision", {"name": "sharp", "size": 3, "kind": 2})


class Mine(Precision):
    """Comes from no distribution."""

    @property
    def policy(self) -> Policy:
        return Policy(compute=torch.bfloat16)


def test_instances_tell_where_they_come_from(install: Install) -> None:
    mine = Mine()
    selected = registry.make("precision", mine)
    assert selected.plugin is mine
    assert str(selected) == "precision 'Mine' (local)"
    assert registry.make("precision", Mine).distribution == "local"
    from trivet.precision.full import FP64

    assert str(registry.make("precision", FP64())).startswith("precision 'fp64' (trivet ")
    install("acme_good", "sharp = acme_good:Good")
    plugin = registry.make("precision", "sharp").plugin
    assert str(registry.make("precision", plugin)) == "precision 'sharp' (acme_good 1.2)"


FAKE = """
    import torch
    from trivet.plugins import Accelerator

    class Fake(Accelerator):
        device_type = "cpu"
        collective_backend = None
        offers = frozenset({"dtype:float32", "dtype:bfloat16", "autocast:bfloat16"})

        def is_available(self) -> bool:
            return True

        def device_count(self) -> int:
            return 1

        def device(self, local_rank: int) -> torch.device:
            return torch.device("cpu")
"""


def test_accelerator_of_another_distribution(install: Install) -> None:
    install("acme_fake", "fake = acme_fake:Fake", FAKE, kind="accelerator")
    plan = resolve(accelerator="fake", devices=1, precision="bf16").plan
    assert (plan.accelerator, plan.distributions["accelerator"], plan.versions["accelerator"]) == (
        "fake",
        "acme_fake",
        "1.2",
    )
    assert plan.notes == ("strategy auto: single, for one process",)
    install("acme_rival", "fake = acme_rival:Fake", FAKE, kind="accelerator")
    with pytest.raises(
        PluginConflict, match=r"'acme_fake:fake' \(acme_fake 1.2\), 'acme_rival:fake' \(acme_rival 1.2\)"
    ):
        resolve(accelerator="fake")
    with pytest.raises(PlanError, match=r"accelerator 'fake' \(acme_rival 1.2\)"):
        resolve(accelerator="acme_rival:fake", devices=2)


def test_remedies_import_nobody_elses_plugins(install: Install) -> None:
    for kind in ("strategy", "accelerator", "precision"):
        install(f"acme_{kind}", f"first = acme_{kind}:Good", "raise SystemExit", kind=kind)
    install("acme_ddp", "ddp = acme_ddp:Good", "raise SystemExit", kind="strategy")
    with pytest.raises(PlanError) as caught:
        resolve(accelerator="cpu", strategy="single", devices=2)
    assert caught.value.conflicts[0].remedy == "--strategy trivet:ddp"
    assert resolve(accelerator="cpu", strategy="trivet:ddp", devices=2).plan.strategy == "ddp"
    # "auto" means ours, whoever else has the name.
    assert resolve(accelerator="cpu", devices=2).plan.distributions["strategy"] == "trivet"


@pytest.mark.parametrize("spec", [None, True, 3.5, object(), Precision, int])
def test_specs_that_mean_nothing(spec: object) -> None:
    with pytest.raises((ConfigurationError, PluginInvalid)):
        registry.make("strategy", spec)


# -------------------------------------------------------------------------------------------------- failing well


def test_a_failed_import_is_told_with_file_and_line_and_disturbs_nobody(install: Install) -> None:
    folder = install("acme_deep", "sharp = acme_deep:Good", "import acme_part")
    (folder / "acme_part.py").write_text("x = 1\nraise RuntimeError('no licence')\n")
    with pytest.raises(PluginBroken) as caught:
        registry.load("precision", "sharp")
    where = str(folder / "acme_part.py")
    assert f"RuntimeError: no licence (File {where!r}, line 2: raise RuntimeError('no licence'))." in str(caught.value)
    install("acme_torn_code", "torn = acme_torn_code:Good", "def torn(:\n")
    with pytest.raises(PluginBroken, match=r"SyntaxError: .*\(acme_torn_code.py, line 1\)\.$"):
        registry.load("precision", "torn")
    assert registry.make("precision", "fp32").name == "fp32"
    assert {"sharp", "torn", "fp32"} <= {entry.name for entry in registry.entries("precision")}


def test_a_module_that_its_distribution_did_not_bring(install: Install) -> None:
    install("acme_gone", "sharp = acme_nowhere.part:Good")
    with pytest.raises(PluginBroken, match=r"names a module that acme_gone should have brought; install acme_gone ag"):
        registry.load("precision", "sharp")


@pytest.mark.parametrize(
    ("number", "more", "message"),
    [
        (
            "7",
            "",
            r"this Trivet \(.*\) speaks 1\. Install a later Trivet than .*, or a release of acme_old made",
        ),
        (
            "7",
            "Requires-Dist: trivet>=3,<4\n",
            "later Trivet: pip install 'trivet>=3,<4', or a release of acme_old",
        ),
        ("0", "", "No Trivet ever spoke that: install a release of acme_old that says 1"),
        ("'1'", "", "speaks interface '1'; .* No Trivet ever spoke that"),
    ],
)
def test_another_interface_is_refused_with_the_version_that_speaks_it(
    install: Install, number: str, more: str, message: str
) -> None:
    code = f"""
        from trivet.plugins import Policy, Precision
        class Old(Precision):
            interface = {number}
            policy = Policy()
    """
    install("acme_old", "sharp = acme_old:Old", code, more=more)
    with pytest.raises(PluginInvalid, match=message):
        registry.load("precision", "sharp")


def test_every_interface_number_has_the_version_that_first_spoke_it() -> None:
    from trivet.plugin_checks import SPOKEN_SINCE
    from trivet.plugins import INTERFACE

    assert sorted(SPOKEN_SINCE) == list(range(1, INTERFACE + 1))


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            "offers = ['sharpness']",
            PluginInvalid,
            r"offers is \['sharpness'\]\. Expected a frozenset of capab",
        ),
        ("offers = 'sharpness'", PluginInvalid, "offers is 'sharpness'"),
        (
            "needs = {'accelerator': ()}",
            PluginInvalid,
            r"needs is {'accelerator': \(\)}\. Expected a trivet.plu",
        ),
        ("needs = Needs(accelerator='dtype:float32')", PluginInvalid, "needs.accelerator is 'dtype:float32'"),
        ("policy = None", PluginInvalid, "policy is None. Expected a trivet.plugins.Policy"),
        ("offers = property(lambda self: 1 / 0)", PluginBroken, "asking for its offers raised ZeroDivisionError"),
    ],
)
def test_answers_of_a_wrong_type(install: Install, body: str, error: type[Exception], message: str) -> None:
    code = f"""
        from trivet.plugins import Needs, Policy, Precision
        class Odd(Precision):
            policy = Policy()
            {body}
    """
    install("acme_odd", "sharp = acme_odd:Odd", code)
    with pytest.raises(error, match=message):
        registry.make("precision", "sharp")


def test_the_wrong_case_is_a_near_name() -> None:
    with pytest.raises(PluginNotFound, match=r"no strategy is named 'DDP'\. Did you mean 'ddp'"):
        registry.find("strategy", "DDP")
