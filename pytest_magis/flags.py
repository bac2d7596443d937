# ruff: noqa: RUF009  (`option` returns a field of a dataclass)
"""The options of the gate, each declared once: a field of `Settings` with its kind, default, help and scope.

The command line, the ini file, the arguments of the mark, docs/options.md and the commands that accept a case are
generated from them. A session without gated tests loads only this module; `pytest_magis.options` parses the values.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_magis import option_values as kinds

COMPARED_WITH = "MAGIS_COMPARED_WITH"
"""Environment variable with the settings of a run on another version (`magis.version_run` has the same name)."""
PARTLY: pytest.StashKey[bool] = pytest.StashKey()
"""Stash key: True once tests were deselected, or could not be collected."""
COLLECTED: pytest.StashKey[tuple[set[str], list[pytest.Item]]] = pytest.StashKey()
"""Stash key: node ids of completely collected nodes, and all tests found, including those deselected later."""
RUN, MODELS, CASE, ALWAYS = "run", "models", "case", "always"
"""Scopes of options, which decide whether a command that accepts a case repeats them. RUN: no, since it belongs to one
run or names an output. MODELS: no, since it selects models. CASE: no, since the case implies it. ALWAYS: yes."""


class Option(NamedTuple):
    """Option of the gate: a field of `Settings` with its declaration for pytest and its documentation."""

    field: str
    """Name of the field and of the mark's argument; the flag is "--magis-" and the name with dashes."""
    kind: kinds.Kind
    default: Any
    help: str
    """One line for `pytest --help`."""
    in_words: str = ""
    """Default in words, if its value is not clear by itself."""
    details: str = ""
    """Further sentences for docs/options.md."""
    expert: bool = False
    in_mark: bool = False
    """If True, the mark accepts the option, too."""
    scope: str = ALWAYS

    @property
    def flag(self) -> str:
        return f"--magis-{self.field.replace('_', '-')}"

    @property
    def key(self) -> str:
        """Return the option's name in the ini file and as an attribute of `config.option`."""
        return f"magis_{self.field}"

    @property
    def shown_default(self) -> str:
        if self.in_words or self.default is None:
            return self.in_words or "none"
        words = self.default if isinstance(self.default, (tuple, frozenset)) else (self.default,)
        return ",".join(f"{word:g}" if isinstance(word, float) else str(word).lower() for word in words) or "none"


def option(kind: kinds.Kind, default: Any, help: str, **about: Any) -> Any:  # noqa: A002  (pytest's own word)
    """Declare a field of `Settings` as an `Option`; `about` are further fields of the `Option`."""
    return field(default=default, metadata={"kind": kind, "default": default, "help": help, **about})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Checked options of a run, followed by values derived from them and from how they were given."""

    models: tuple[str, ...] = option(
        kinds.NAMES,
        (),
        "models to gate: all, seed, names, globs or package.module:factory",
        scope=MODELS,
        details="`all` stands for the seven networks of the paper, `seed` for their simpler variants `seed-*`. Your "
        "own network is `package.module:factory`: a function without arguments that returns `(module, (inputs, "
        "targets), loss_fn)`, followed by a torch optimizer if it is not trained with plain SGD. Plain `pytest` does "
        "not import from the current directory: start `python -m pytest`, or set `pythonpath = .` in the ini file.",
    )
    strategies: tuple[str, ...] = option(
        kinds.NAMES,
        ("eager", "magis"),
        "how to run each model: all, names, globs or package.module:factory",
        in_mark=True,
        scope=CASE,
        details="`eager` is PyTorch as it is, `magis` the optimized step; the others are strategies to compare with, "
        "such as `amp`, `checkpoint`, `compile` and `ddp`: [all of them](strategies.md).",
    )
    device: str = option(
        kinds.text("NAME"),
        "",
        "cpu, cuda or a simulated GPU such as sim:a100",
        in_words="cuda where there is one, else cpu",
        in_mark=True,
        details="On `cpu` and `cuda` the steps run. On a simulated GPU nothing runs: memory and latency are computed, "
        "and they are the same on every machine. There the gate sees a network that got 3% slower without any GPU, "
        "even if its latency ratio stayed the same.",
    )
    preset: str = option(
        kinds.one_of("preset", kinds.PRESETS),
        "",
        "sizes of the built-in models: small or paper",
        in_words="small on cpu, else paper",
    )
    dtype: str | None = option(
        kinds.one_of("dtype", "magis.dtypes:DTYPES"),
        None,
        "data type: float32, tf32, bfloat16, float16, float64, amp-bfloat16 or amp-float16",
        in_words="each model's own",
        in_mark=True,
        details="`amp-bfloat16` and `amp-float16` keep weights in float32 and run forward and loss under "
        "`torch.autocast`, by the rules of the device, simulated ones included; gradients are not scaled (no "
        "`GradScaler`). `tf32` lets matrix products and convolutions of float32 tensors run in tf32 while cases run; "
        "it needs a GPU. `float32` leaves torch's settings alone. A simulated device that has tf32 estimates `float32` "
        "as tf32: both have one price there unless an operator profile tells them apart. The csv counts memory in "
        "items of the weights' type.",
    )
    seed: int = option(kinds.whole(0), 0, "seed of weights, batches and searches", in_mark=True)
    ranks: int = option(
        kinds.whole(1),
        4,
        "number of ranks of distributed strategies",
        expert=True,
        details="The ranks are processes of this machine, those of a `torchrun` or Slurm job, or predicted.",
    )
    accumulate: int = option(
        kinds.whole(1),
        1,
        "micro-batches of which the ranks of distributed strategies add up gradients",
        expert=True,
        details="`ddp`, `oss`, `fsdp` and `tp` run forward and backward on one after another, `pp` has so many. Also "
        "by name: `--magis-strategies=accumulate4+fsdp`. Ranks that run a plan take none: it cuts the batch itself.",
    )
    memory_ratios: tuple[float, ...] = option(
        kinds.MEMORY_RATIOS,
        (0.8, 0.6),
        "memory limits as fractions of the eager peak, above 0 and at most 1",
        in_mark=True,
        scope=CASE,
        details="0.8 means: the optimized step may use 80% of the peak bytes of the eager step. The default holds "
        "only where no latency ratio is given either.",
    )
    memory_limit_of: str = option(
        kinds.one_of("kind of bytes", "magis.strategies.strategy_names:LIMITS_OF", "WHAT"),
        "peak",
        "what memory ratios are fractions of: the eager step's peak or reserved bytes",
        in_mark=True,
        details="`reserved` counts what the caching allocator of a GPU holds, gaps included: that is what runs out. "
        "The plan is checked by simulating its allocator ([how](limits.md#limits-on-reserved-bytes)). On `cpu`, which "
        "has no such allocator, it is refused.",
    )
    latency_ratios: tuple[float, ...] = option(
        kinds.LATENCY_RATIOS,
        (),
        "latency limits as multiples (>= 1) of the eager latency",
        in_mark=True,
        scope=CASE,
        details="1.1 means: the optimized step may take 10% longer, and its memory is then made as small as possible.",
    )
    budget: int | None = option(
        kinds.BUDGET,
        None,
        "work of each search: quick, default, thorough or a number of plans evaluated",
        in_words="default",
        in_mark=True,
        details="[What the named budgets win and cost](ci.md#budgets-by-name). Another budget is another case with a "
        "baseline of its own.",
    )
    seconds: float | None = option(
        kinds.SECONDS,
        None,
        "a further cap on the seconds of each search",
        in_mark=True,
        scope=RUN,
        details="A row whose search was stopped by the cap says so and is not gated. On simulated devices and GPUs "
        "the cap is shared out among the stages of the search. A step that would take longer to run than the cap (at "
        "least a minute; ten minutes without a cap) is simulated instead of run.",
    )
    profile: Path | None = option(
        kinds.FILE,
        None,
        "operator profile that prices latencies, or none",
        in_words="profiles/<device>.json among the baselines",
        details="A profile holds measured times of operators: [profiles](profiles.md). With `none`, or where the "
        "default file does not exist, times are estimated.",
    )
    search: tuple[str, ...] = option(
        kinds.one_of("search", "magis.strategies.strategy_names:SEARCHES", "NAMES", is_list=True),
        ("magis",),
        "which search plans: magis, paper (the published method) or both",
        expert=True,
        scope=CASE,
        details="[The paper's method](paper.md).",
    )
    slack: float = option(
        kinds.SLACK,
        0.2,
        "by how much swaps may be slower than simulated before a step waits for them",
        expert=True,
        in_mark=True,
        details="Plans then stand a link between host and device that is slower by that share, kernels that are "
        "quicker by half of it, and both at once; the latency that is reported is that of the device as it is said to "
        "be. 0 plans for that device alone ([what it costs](search.md#slack)). Nothing is swapped on `cpu`.",
    )
    host_limit: int = option(
        kinds.BYTES,
        0,
        "most optimizer state that a plan keeps in host memory between updates",
        expert=True,
        in_mark=True,
        details="An amount such as `64GiB`. Plans move state where that keeps their limit at less time "
        "([how](optimize.md#optimizer-state-in-host-memory)); they have baselines of their own.",
    )
    allocator: str = option(
        kinds.text("CONF"),
        "",
        "settings of the allocator whose reserved bytes are predicted, as in PYTORCH_ALLOC_CONF",
        in_words="torch's own, whatever the environment says",
        expert=True,
        details="Cases of one device then have [baselines of their own](estimate.md#settings-of-the-allocator).",
    )
    processes: int = option(
        kinds.whole(1),
        1,
        "processes that share each search with fission",
        expert=True,
        details="The result does not depend on it. Each worker of pytest-xdist has processes of its own.",
    )
    resume: Path | None = option(
        kinds.DIR, None, "directory for finished pieces of searches; a run that was cut off goes on there", expert=True
    )
    baselines: Path = option(
        kinds.DIR,
        Path("baselines"),
        "directory of the stored baselines",
        in_words="<rootdir>/baselines",
        details="[The format of the files](formats.md#baselines).",
    )
    against: str = option(
        kinds.text("VERSION"),
        "",
        "compare with a git revision, or with releases (torch==2.12.0), instead of stored baselines",
        in_words="none",
        details="The revision (`origin/main`, say) is checked out beside the working tree and measured first, in the "
        "same run; releases of dependencies are installed into an environment that is kept: [how](against.md).",
    )
    update: frozenset[str] = option(
        kinds.one_of("", kinds.PERMISSIONS, "KINDS", is_list=True),
        frozenset(),
        "which findings to accept and store as baselines: new, moved, better, worse",
        scope=RUN,
        details="What it names is somebody's decision about this run: it counts on the command line alone. In the ini "
        "file, in `addopts`, in `PYTEST_ADDOPTS` and in a file of options (`@options.txt`) it is refused. "
        "[`moved`](report.md#moved-by-the-planner) is what another version of magis planned otherwise.",
    )
    prune: bool = option(
        kinds.FLAG,
        False,
        "remove the baselines of tests that are gone",
        scope=RUN,
        details="A run that collected all tests names them; those of files that it did not collect (`collect_ignore`, "
        "`testpaths`) stay. On the command line alone, as `--magis-update`.",
    )
    strict: bool = option(
        kinds.FLAG,
        False,
        "fail on improvements that are not stored, and on limits that no plan meets",
        details="Without it, a case that needs less than its baseline passes until somebody stores that, so that a "
        "win can be lost again unseen; and a limit that is not met is told (`no plan found`, `infeasible, proven`), "
        "but does not fail. A mark's `required=True` demands the limits of one test.",
    )
    memory_tolerance: float = option(
        kinds.SHARE, 0.0, "share by which memory may exceed its baseline", in_mark=True, details="0.05 allows 5% more."
    )
    latency_tolerance: float | None = option(
        kinds.SHARE,
        None,
        "amount by which latency may exceed its baseline",
        in_words="0.04; 0.01 on simulated devices",
        in_mark=True,
        details="It is compared with the latency ratio; on simulated devices also with the latency of each step.",
    )
    cache: str = option(
        kinds.one_of("cache", kinds.CACHES, "WHAT"),
        "plans",
        "what pytest's cache keeps for the next run: plans, results or none",
        scope=RUN,
        details="`results` keeps plans and whole results: [what is then left out](ci.md).",
    )
    shard: kinds.Shard | None = option(
        kinds.SHARD,
        None,
        "run only the I-th of N shares of the models",
        in_words="all models",
        scope=MODELS,
        details="`1/4` is the first of four shares. `magis merge` joins the results of all machines: "
        "[how](ci.md#many-machines).",
    )
    csv: Path | None = option(
        kinds.FILE,
        None,
        "file for the results, one row per case",
        in_words="results.csv",
        scope=RUN,
        details="A run of marked tests alone, without `--magis-models`, writes no csv unless this option names one.",
    )
    csv_full: bool = option(
        kinds.FLAG,
        False,
        "write all columns of the results, not only those that are needed most",
        scope=RUN,
        details="[What a row holds](formats.md#resultscsv).",
    )
    markdown: Path | None = option(
        kinds.FILE,
        None,
        "file for the table as Markdown",
        in_words="added to $GITHUB_STEP_SUMMARY where that is set",
        scope=RUN,
        details="[On GitHub](github.md).",
    )
    pareto: Path | None = option(
        kinds.DIR,
        None,
        "directory for each model's Pareto front of memory and latency, as .json and .svg",
        scope=RUN,
        details="Of marked tests, too. Some thirty plans come from one search. A case of the gate searches its one "
        "limit longer, and may find a better plan.",
    )
    report: Path | None = option(
        kinds.FILE,
        None,
        "file for the report of the run: one HTML page that opens offline",
        scope=RUN,
        details="[How to read it](report.md).",
    )
    snapshot: Path | None = option(
        kinds.DIR,
        None,
        "directory for each case's predicted steps as memory snapshots, for torch's memory_viz",
        scope=RUN,
        details="A file for the original and one for the optimized step of each case: [how to open "
        "them](estimate.md#memory-snapshots).",
    )
    trace: Path | None = option(
        kinds.DIR, None, "directory for each case's simulated time lines, for Perfetto", scope=RUN
    )
    only_gate: bool = False
    """True if models were given on the command line: without paths, pytest then collects only the gate's cases."""
    adds_markdown: bool = False
    """True if the Markdown table is appended to GitHub's job summary instead of replacing a file."""
    profiles: Path | None = None
    """Folder searched for the device's operator profile; None if a profile is given or switched off."""
    given: tuple[tuple[str, str], ...] = ()
    """Options given on this command line: (flag, value)."""
    memory_limits: tuple[int, ...] = ()
    """Memory limits in bytes, which only a mark or a call of the fixture can give."""
    required: bool | None = None
    """True if a mark requires its limits to be met; None without a mark or its argument."""


OPTIONS = tuple(Option(each.name, **each.metadata) for each in fields(Settings) if each.metadata)
BY_NAME = {each.field: each for each in OPTIONS}
FILES = ("report", "pareto", "snapshot", "trace", "resume")
"""Options that name files of one run; a run on another version ignores them."""
GONE = {"magis_benchmark_json": "--benchmark-json"}
"""Removed option names, as in the ini file, each with its replacement."""
MARK_ARGUMENTS = (
    *("name", "memory_limit", "required", "optimizer"),
    *(each.field for each in OPTIONS if each.in_mark),
)
"""All arguments of the mark, beginning with those that are not options."""


def is_active(config: pytest.Config) -> bool:
    """Return True if models were asked for, on the command line or in the ini file."""
    return on_command_line(config, "models") is not None or bool(in_ini(config, "models"))


def any_given(config: pytest.Config) -> bool:
    """Return True if any option of the gate was given, on the command line or in the ini file."""
    return any(given(config, each.field) is not None for each in OPTIONS) or bool(gone(config))


def gone(config: pytest.Config) -> list[str]:
    """Return the names in `GONE` that were given, on the command line or in the ini file."""
    return [key for key in GONE if config.getoption(key) is not None or config.getini(key)]


def given(config: pytest.Config, name: str) -> list[str] | None:
    """Return the values of an option from the command line, else from the ini file; None if it is in neither."""
    if name in FILES and COMPARED_WITH in os.environ:
        return None
    found = on_command_line(config, name)
    return in_ini(config, name) if found is None else found


def on_command_line(config: pytest.Config, name: str) -> list[str] | None:
    """Return the values of an option on the command line, in order; None if it was not given."""
    value = config.getoption(BY_NAME[name].key)
    if value is None:
        return None
    # argparse takes the value of `--magis-against=--` for its separator, and leaves an empty list
    return ["--" if item == [] else str(item) for item in (value if BY_NAME[name].kind.is_list else [value])]


def in_ini(config: pytest.Config, name: str) -> list[str] | None:
    """Return the values of an option in the ini file; None if it is not there."""
    value = config.getini(BY_NAME[name].key)
    if value is None or value in ("", []):
        return None
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
