"""Names and patterns: what --magis-models accepts, without importing torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from magis.errors import MagisError, UsageError
from magis.extensions.models.network_names import GATE_NAMES, REAL_NAMES, SEED_NAMES
from magis.models.model_specs import UnknownModelError, all_names, is_factory, resolve


def test_groups() -> None:
    assert resolve(["all"]) == ("resnet50", "bert", "vit", "unet", "unetpp", "gpt_neo", "btlm") == GATE_NAMES
    assert resolve(["seed"]) == tuple(f"seed-{name}" for name in GATE_NAMES) == SEED_NAMES
    assert resolve([]) == ()


def test_every_network_has_both_variants_and_one_name() -> None:
    names = all_names()
    assert len(set(names)) == len(names) == 2 * len(REAL_NAMES)
    assert set(names) == {*REAL_NAMES, *(f"seed-{name}" for name in REAL_NAMES)}
    assert set(GATE_NAMES) < set(REAL_NAMES)


def test_order_is_kept_and_repeats_dropped() -> None:
    assert resolve(["vit", "bert", "vit"]) == ("vit", "bert")
    assert resolve(["btlm", "all"])[:2] == ("btlm", "resnet50")
    assert len(resolve(["all", "seed", "all"])) == 14
    assert resolve([" bert "]) == ("bert",)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("densenet*", ("densenet121", "densenet169", "densenet201")),
        ("vgg1[13]", ("vgg11", "vgg13")),
        ("une?", ("unet",)),
        ("seed-unet*", ("seed-unet", "seed-unetpp")),
        ("*bert", ("bert", "seed-bert")),
        ("*", all_names()),
    ],
)
def test_globs(pattern: str, expected: tuple[str, ...]) -> None:
    assert resolve([pattern]) == expected


def test_factories_pass_through() -> None:
    assert resolve(["my.package:make", "bert", "my.package:make"]) == ("my.package:make", "bert")
    assert is_factory("a:b")
    assert not is_factory("bert")


@pytest.mark.parametrize("pattern", [":make", "package:", "a b:c", "a..b:c", "a:b:c", "a/b:c", "bert*:x"])
def test_malformed_factories(pattern: str) -> None:
    meant = {"a..b:c": r"did you mean a\.b:c\?", "a/b:c": r"did you mean a\.b:c\?"}
    way_out = meant.get(pattern, r"write it as package\.module:factory")
    with pytest.raises(UsageError, match=f"not a model factory: .*; {way_out}"):
        resolve([pattern])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("resnet5", "unknown model 'resnet5'; did you mean .*resnet50"),
        ("Bert", "unknown model 'Bert'; did you mean .*bert"),
        ("gpt-neo", "unknown model 'gpt-neo'; did you mean .*gpt_neo"),
        ("seed-brt", "unknown model 'seed-brt'; did you mean .*seed-bert"),
        ("qqqq", r"unknown model 'qqqq'; known are resnet50, bert, .*seed-mlp"),
        ("nets.gpt2", r"unknown model 'nets.gpt2'; did you mean nets:gpt2\?"),
        ("tests/nets.py", r"unknown model 'tests/nets.py'; did you mean tests.nets:FACTORY\?"),
        ("zzz*", r"no model matches 'zzz\*'; known are resnet50"),
        *((other, f"unknown model '{other}'; ") for other in ("", "ALL", "bert,vit")),
    ],
)
def test_what_is_no_name_is_one_line_with_the_closest_or_all(pattern: str, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message) as caught:
        resolve(["bert", pattern])
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, MagisError)


def test_names_and_registry_import_no_torch(fresh_python: Callable[[str], str]) -> None:
    program = (
        "import sys, magis.models as m; m.resolve(['all', 'a.b:c']); m.get('bert');"
        "print([name for name in ('torch', 'numpy', 'pandas', 'numba') if name in sys.modules])"
    )
    assert fresh_python(program).strip() == "[]"
