"""The gate's options as pytest knows them: names, help texts, ini twins.

An idle plugin loads this module alone; `pytest_magis.options` reads and checks the values once models are asked for.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import pytest

COMPARED_WITH = "MAGIS_COMPARED_WITH"
"""Environment variable with the settings of a run on another version (`magis.version_run` repeats the name)."""
PARTLY: pytest.StashKey[bool] = pytest.StashKey()
"""In a config's stash once tests were left out, or could not be collected."""
COLLECTED: pytest.StashKey[tuple[set[str], list[pytest.Item]]] = pytest.StashKey()
"""Node ids that were collected whole, and all tests that were found, those left out later included."""
DECISIONS = ("update", "prune")
"""Options that are allowed on the command line alone, since they decide about one run."""
FILES = ("report", "benchmark-json", "pareto", "trace", "resume")
"""Options that name files of a run; a run on another version ignores them."""


class Option(NamedTuple):
    """One option: `name` with dashes, without "--magis-"; a list takes commas and repetitions.

    `help` is one line for `pytest --help`, and ends with the default in parentheses; `details` follows it in
    docs/options.md.
    """

    name: str
    metavar: str
    help: str
    is_list: bool = False
    details: str = ""
    is_flag: bool = False
    """True if it takes no value on the command line; in the ini file "true" or "false"."""

    @property
    def flag(self) -> str:
        return f"--magis-{self.name}"

    @property
    def key(self) -> str:
        """Return its name in the ini file and as an attribute of `config.option`."""
        return f"magis_{self.name.replace('-', '_')}"


OPTIONS = (
    Option(
        "models",
        "NAMES",
        "models to gate: all, seed, names, globs or package.module:factory (default: none)",
        is_list=True,
        details="`all` stands for the seven networks of the paper, `seed` for their simpler variants `seed-*`. Your "
        "own network is `package.module:factory`: a function without arguments that returns `(module, "
        "(inputs, targets), loss_fn)`, followed by a torch optimizer if it is not trained with plain SGD. "
        "Plain `pytest` does not import from the current directory: start `python -m pytest`, or set "
        "`pythonpath = .` in the ini file.",
    ),
    Option(
        "memory-ratios",
        "R,...",
        "memory limits as fractions of the eager peak, above 0 and at most 1 (default: 0.8,0.6)",
        is_list=True,
        details="0.8 means: the optimized step may use 80% of the peak bytes of the eager step. The default holds "
        "only where no latency ratio is given either.",
    ),
    Option(
        "memory-limit-of",
        "WHAT",
        "what memory ratios are fractions of: the eager step's peak or reserved bytes (default: peak)",
        details="`reserved` counts what the caching allocator of a GPU holds, gaps included: that is what runs out. "
        "The plan is checked by simulating its allocator ([how](limits.md#limits-on-reserved-bytes)). On `cpu`, "
        "which has no such allocator, it is refused.",
    ),
    Option(
        "latency-ratios",
        "R,...",
        "latency limits as multiples (>= 1) of the eager latency (default: none)",
        is_list=True,
        details="1.1 means: the optimized step may take 10% longer, and its memory is then made as small as possible.",
    ),
    Option(
        "strategies",
        "NAMES",
        "how to run each model: all, names, globs or package.module:factory (default: eager,magis)",
        is_list=True,
        details="`eager` is PyTorch as it is, `magis` the optimized step; the others are strategies to compare with, "
        "such as `amp`, `checkpoint`, `compile` and `ddp`: [all of them](strategies.md).",
    ),
    Option(
        "ranks",
        "N",
        "number of ranks of distributed strategies (default: 4)",
        details="The ranks are processes of this machine, those of a `torchrun` or Slurm job, or predicted.",
    ),
    Option(
        "accumulate",
        "N",
        "micro-batches of which the ranks of distributed strategies add up gradients (default: 1)",
        details="`ddp`, `oss`, `fsdp` and `tp` run forward and backward on one after another, `pp` has so many. Also "
        "by name: `--magis-strategies=accumulate4+fsdp`. Ranks that run a plan take none: it cuts the batch itself.",
    ),
    Option(
        "device",
        "NAME",
        "cpu, cuda or a simulated GPU such as sim:a100 (default: cuda where there is one, else cpu)",
        details="On `cpu` and `cuda` the steps run. On a simulated GPU nothing runs: memory and latency are computed,"
        " and they are the same on every machine. There the gate sees a network that got 3% slower without "
        "any GPU, even if its latency ratio stayed the same.",
    ),
    Option(
        "preset",
        "NAME",
        "sizes of the built-in models: small or paper (default: small on cpu, else paper)",
    ),
    Option(
        "dtype",
        "NAME",
        "data type: float32, tf32, bfloat16, float16, float64, amp-bfloat16 or amp-float16 (default: each model's own)",
        details="`amp-bfloat16` and `amp-float16` keep weights in float32 and run forward and loss under "
        "`torch.autocast`, by the rules of the device, simulated ones included; gradients are not scaled (no "
        "`GradScaler`). `tf32` lets matrix products and convolutions of float32 tensors run in tf32 while "
        "cases run; it needs a GPU. `float32` leaves torch's settings alone. A simulated device that has tf32"
        " estimates `float32` as tf32: both have one price there unless an operator profile tells them apart."
        " The csv counts memory in items of the weights' type.",
    ),
    Option(
        "search",
        "NAMES",
        "which search plans: magis, paper (the published method) or both (default: magis)",
        is_list=True,
        details="[The paper's method](paper.md).",
    ),
    Option(
        "budget",
        "PLANS",
        "work of each search: quick, default, thorough or a number of plans evaluated (default: default)",
        details="[What the named budgets win and cost](ci.md#budgets-by-name). Another budget is another case with a "
        "baseline of its own.",
    ),
    Option(
        "seconds",
        "S",
        "a further cap on the seconds of each search (default: none)",
        details="A row whose search was stopped by the cap says so and is not gated. On simulated devices and GPUs "
        "the cap is shared out among the stages of the search. A step that would take longer to run than the "
        "cap (at least a minute; ten minutes without a cap) is simulated instead of run.",
    ),
    Option(
        "slack",
        "SHARE",
        "by how much swaps may be slower than simulated before a step waits for them (default: 0.2)",
        details="Plans then stand a link between host and device that is slower by that share, kernels that are "
        "quicker by half of it, and both at once; the latency that is reported is that of the device as it is said "
        "to be. 0 plans for that device alone ([what it costs](search.md#slack)). Nothing is swapped on `cpu`.",
    ),
    Option("seed", "N", "seed of weights, batches and searches (default: 0)"),
    Option(
        "processes",
        "N",
        "processes that share each search with fission (default: 1)",
        details="The result does not depend on it. Each worker of pytest-xdist has processes of its own.",
    ),
    Option(
        "resume",
        "DIR",
        "directory for finished pieces of searches; an interrupted run continues from there (default: none)",
    ),
    Option(
        "cache",
        "WHAT",
        "what pytest's cache keeps for the next run: plans, results or none (default: plans)",
        details="`results` keeps plans and whole results: [what is then left out](ci.md).",
    ),
    Option(
        "shard",
        "I/N",
        "run only the I-th of N shares of the models (default: all models)",
        details="`1/4` is the first of four shares. `magis merge` joins the results of all machines: "
        "[how](ci.md#many-machines).",
    ),
    Option(
        "profile",
        "FILE",
        "operator profile that prices latencies, or none (default: profiles/<device>.json among the baselines)",
        details="A profile holds measured times of operators: [profiles](profiles.md). With `none`, or where the "
        "default file does not exist, times are estimated.",
    ),
    Option(
        "baselines",
        "DIR",
        "directory of the stored baselines (default: <rootdir>/baselines)",
        details="[The format of the files](formats.md#baselines).",
    ),
    Option(
        "against",
        "VERSION",
        "compare with a git revision, or with releases (torch==2.12.0), instead of stored baselines (default: none)",
        details="The revision (`origin/main`, say) is checked out beside the working tree and measured first, in the "
        "same run; releases of dependencies are installed into an environment that is kept: [how](against.md).",
    ),
    Option(
        "update",
        "KINDS",
        "which findings to accept and store as baselines: new, moved, better, worse (default: none)",
        is_list=True,
        details="What it names is somebody's decision about this run: it counts on the command line alone. In the ini "
        "file, in `addopts`, in `PYTEST_ADDOPTS` and in a file of options (`@options.txt`) it is refused. "
        "[`moved`](report.md#moved-by-the-planner) is what another version of magis planned otherwise.",
    ),
    Option(
        "prune",
        "",
        "remove the baselines of tests that are gone (default: false)",
        details="A run that collected all tests names them; those of files that it did not collect (`collect_ignore`, "
        "`testpaths`) stay. On the command line alone, as `--magis-update`.",
        is_flag=True,
    ),
    Option(
        "strict",
        "",
        "fail on improvements that are not stored, and on limits that no plan meets (default: false)",
        details="Without it, a case that needs less than its baseline passes until somebody stores that, so that a win "
        "can be lost again unseen; and a limit that is not met is told (`no plan found`, `infeasible, proven`), but "
        "does not fail. A mark's `required=True` demands the limits of one test.",
        is_flag=True,
    ),
    Option(
        "csv",
        "FILE",
        "file for the results, one row per case (default: results.csv)",
        details="A run of marked tests alone, without `--magis-models`, writes no csv unless this option names one.",
    ),
    Option(
        "markdown",
        "FILE",
        "file for the table as Markdown (default: added to $GITHUB_STEP_SUMMARY where that is set)",
        details="[On GitHub](github.md).",
    ),
    Option(
        "pareto",
        "DIR",
        "directory for each model's Pareto front of memory and latency, as .json and .svg (default: none)",
        details="Of marked tests, too. Some thirty plans come from one search. A case of the gate searches its one "
        "limit longer, and may find a better plan.",
    ),
    Option(
        "report",
        "FILE",
        "file for the report of the run: one HTML page that opens offline (default: none)",
        details="[How to read it](report.md).",
    ),
    Option(
        "trace",
        "DIR",
        "directory for each case's simulated time lines, for Perfetto (default: none)",
    ),
    Option(
        "benchmark-json",
        "FILE",
        "file for the latencies, as pytest-benchmark's own --benchmark-json (default: none)",
    ),
    Option(
        "memory-tolerance",
        "SHARE",
        "share by which memory may exceed its baseline (default: 0)",
        details="0.05 allows 5% more.",
    ),
    Option(
        "latency-tolerance",
        "SHARE",
        "amount by which latency may exceed its baseline (default: 0.04; 0.01 on simulated devices)",
        details="It is compared with the latency ratio; on simulated devices also with the latency of each step.",
    ),
)
BY_NAME = {option.name: option for option in OPTIONS}


def add_options(parser: pytest.Parser) -> None:
    """Register every option on the command line and in the ini file."""
    group = parser.getgroup("magis", "memory-regression gate (magis)")
    for option in OPTIONS:
        if option.is_flag:
            kind = {"action": "store_const", "const": "true"}
        else:
            kind = {"action": "append" if option.is_list else "store", "metavar": option.metavar}
        group.addoption(option.flag, dest=option.key, default=None, help=option.help, **kind)
        if option.is_list:
            parser.addini(option.key, option.help, type="linelist", default=None)
        else:
            parser.addini(option.key, option.help, type="string", default=None)


def is_active(config: pytest.Config) -> bool:
    """Return True if models were asked for, on the command line or in the ini file."""
    return on_command_line(config, "models") is not None or bool(in_ini(config, "models"))


def any_given(config: pytest.Config) -> bool:
    """Return True if any option of the gate was given, on the command line or in the ini file."""
    return any(given(config, option.name) is not None for option in OPTIONS)


def given(config: pytest.Config, name: str) -> list[str] | None:
    """Return the values given for an option, on the command line or else in the ini file; None without any."""
    if name in FILES and COMPARED_WITH in os.environ:
        return None
    found = on_command_line(config, name)
    return in_ini(config, name) if found is None else found


def on_command_line(config: pytest.Config, name: str) -> list[str] | None:
    """Return the values of an option on the command line, in order; None without any."""
    value = config.getoption(BY_NAME[name].key)
    if value is None:
        return None
    # argparse takes the value of `--magis-against=--` for its separator, and leaves an empty list
    return ["--" if item == [] else str(item) for item in (value if BY_NAME[name].is_list else [value])]


def own_words(config: pytest.Config, option: Option) -> list[str]:
    """The same of what stands on the command line itself: pytest adds words of `addopts`, of the environment and of
    files (`@options.txt`)."""
    found, words = list[str](), iter(config.invocation_params.args)
    for word in map(str, words):
        if word == "--":
            break
        flag, given, value = word.partition("=")
        if flag == option.flag:
            found.append("true" if option.is_flag else value if given else str(next(words, "")))
    return found


def in_ini(config: pytest.Config, name: str) -> list[str] | None:
    """Return the values of an option in the ini file; None without any."""
    value = config.getini(BY_NAME[name].key)
    if value is None or value in ("", []):
        return None
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]
