"""Names and patterns: what --magis-models accepts, without importing torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from magis.errors import MagisError
from magis.models.model_specs import UnknownModelError, all_names, resolve


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


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("resnet5", "unknown model 'resnet5'; did you mean .*resnet50"),
        ("Bert", "unknown model 'Bert'; did you mean .*bert"),
        ("gpt-neo", "unknown model 'gpt-neo'; did you mean .*gpt_neo"),
        ("seed-brt", "unknown model 'seed-brt'; did you mean .*seed-bert"),
        ("qqqq", r"unknown model 'qqqq'; known are resnet50, bert, .*seed-mlp"),
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
