"""Writes docs/options.md, the reference of the plugin's options, from their declarations in `pytest_magis.flags`.

    .venv/bin/python tools/options_page.py [--check]

With --check nothing is written; exit code 1 if the page is not what would be written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from pages import write_or_check

from magis.cost.devices import device_names
from magis.extensions.models.network_names import GATE_NAMES
from pytest_magis.flags import BY_NAME, OPTIONS, Option
from pytest_magis.options import DECISIONS

HEAD = """# Options of the gate

```console
$ pytest --magis-models=bert,resnet50 --magis-memory-ratios=0.8       # two networks, one limit
$ pytest --magis-models='seed-*' --magis-device=sim:a100              # no GPU needed: simulated
$ pytest --magis-models=my_package.nets:make_net --magis-update=new   # your own network; store its baseline
```

Each option works on the command line and, under its second name, in the ini file (`pytest.ini`, or the table
`[tool.pytest.ini_options]` of `pyproject.toml`). The command line wins. A list takes commas, and on the command line
also repetitions. Memory and latency limits belong together: those of the command line replace all limits of the ini
file.

A wrong value ends the run with one line and exit code 4 before the first case runs, and nothing is written. The same
holds for a network of your own that computes with numbers read off its data, lies on another device, or mixes data
types in a way that eager mode refuses.

A marked test takes some of these options as arguments of its mark: [gate-my-model](gate-my-model.md). This page is
written by `tools/options_page.py` from the code; a test keeps it true.
"""
GROUPS = {
    "What runs": ("models", "strategies", "device", "preset", "dtype", "seed"),
    "Limits": ("memory_ratios", "memory_limit_of", "latency_ratios"),
    "The search": ("budget", "seconds", "profile"),
    "Baselines and verdicts": (
        "baselines",
        "against",
        "update",
        "prune",
        "strict",
        "memory_tolerance",
        "latency_tolerance",
    ),
    "Continuous integration": ("cache", "shard"),
    "Files that a run writes": ("csv", "csv_full", "markdown", "pareto", "report", "snapshot", "trace"),
    "For experts": tuple(option.field for option in OPTIONS if option.expert),
}
VALUES = {
    "models": ("all", "seed", *GATE_NAMES, "seed-*", "package.module:factory"),
    "device": ("cpu", "cuda", *(name for name in device_names() if name != "cpu")),
}
"""What an option takes, where its kind does not say it."""


def page() -> str:
    """The whole page."""
    if sorted(BY_NAME) != sorted(name for names in GROUPS.values() for name in names):
        raise LookupError("every option belongs to one of GROUPS")
    return "".join([HEAD, *(part for title, names in GROUPS.items() for part in _group(title, names))])


def _group(title: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"\n## {title}\n\n| option | in the ini file | values | default | what it means |\n"
    yield "| --- | --- | --- | --- | --- |\n"
    for option in OPTIONS:
        if option.field in names:
            in_ini = "-" if option in DECISIONS else f"`{option.key}`"
            cells = f"`{option.flag}`", in_ini, _values(option), _escaped(option.shown_default), _meaning(option)
            yield f"| {' | '.join(cells)} |\n"


def _values(option: Option) -> str:
    if not option.kind.metavar:  # a flag
        return "none" if option in DECISIONS else "none; in the ini file `true` or `false`"
    words = VALUES.get(option.field) or option.kind.all_words() or (option.kind.metavar,)
    return ", ".join(f"`{word}`" for word in words)


def _meaning(option: Option) -> str:
    text = _escaped(option.help)
    capital = text if option.field == "device" else f"{text[0].upper()}{text[1:]}"
    return f"{capital}. {option.details}".strip()


def _escaped(text: str) -> str:
    """Text of the terminal as Markdown."""
    return re.sub(r"([<>*|$])", r"\\\1", text)


if __name__ == "__main__":
    sys.exit(write_or_check("options.md", page, __doc__))
