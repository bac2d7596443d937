"""Plants small mistakes in the core, one at a time, and counts how many the tests notice.

    python tools/mutants.py [--count 200] [--seed 0] [--only PATH ...] [--slice K/N] [--work FOLDER] [--jobs 2] [--list]

A mutant is one changed operator, constant, condition or dropped statement in the simulator, in hazards, liveness and
verification, or in the verdict. It is *killed* if one of the quick tests of its file fails or takes too long; it
*survives* otherwise, and is then either a missing test or a change that means nothing. Exit 1 below 85% killed. Equal
seeds make equal mutants. Everything happens in copies of the working tree under a temporary directory; ``--work`` keeps
them, and what numba compiled in them, for the next slice of the same mutants.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.util
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("magis", "pytest_magis", "tests", "benchmarks", "baselines", "conftest.py", "pyproject.toml")
BAR = 0.85
INTERPRETED = {"NUMBA_DISABLE_JIT": "1"}  # compiling every mutant anew would take longer than its tests

_EVALUATOR = tuple(f"tests/simulate/test_{part}.py" for part in ("problem", "evaluator", "messages"))
_PLANS = (
    "tests/simulate/test_grouping.py",
    "tests/simulate/test_compile.py",
    "tests/simulate/test_made_up_steps.py",
    "tests/rewrite/test_realize.py",
    "tests/rewrite/test_plans.py",
)
TESTS: dict[str, tuple[str, ...]] = {
    "magis/simulate/simulator.py": ("tests/simulate/test_replay.py", "tests/simulate/test_timeline.py"),
    "magis/simulate/compiled_problem.py": _PLANS,
    "magis/simulate/problem.py": _EVALUATOR,
    "magis/simulate/arrays.py": _EVALUATOR,
    "magis/simulate/kernel.py": _EVALUATOR,
    "magis/simulate/evaluator.py": _EVALUATOR,
    "magis/graph/hazards.py": (
        "tests/graph/test_hazards.py",
        "tests/simulate/test_replay.py",
    ),
    "magis/graph/verify.py": ("tests/graph/test_verify.py", "tests/graph/test_loops.py"),
    "magis/graph/loop_rules.py": ("tests/graph/test_in_place_loops.py", "tests/graph/test_loops.py"),
    "pytest_magis/verdict.py": tuple(
        f"tests/plugin/test_verdict{part}.py" for part in ("", "_latency", "_moved", "_strategies", "_properties")
    ),
}
"""Mutated file -> the quick tests that should notice."""


@dataclass(frozen=True)
class Mutant:
    """One changed place: the ``number``-th of its file in the order of ``points``."""

    path: str
    number: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before}  ->  {self.after}"


# --- making mutants ---------------------------------------------------------------------------------------------------

Change = Callable[[ast.AST], ast.AST]
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt), ast.LtE: (ast.Lt, ast.GtE), ast.Gt: (ast.GtE, ast.Lt), ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def changes(node: ast.AST) -> Iterator[Change]:
    """The mistakes that can be made at a node; each takes a copy of it."""
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                for other in _COMPARISONS.get(type(op), ()):
                    yield lambda n, at=at, other=other: _set(n, "ops", [*n.ops[:at], other(), *n.ops[at + 1 :]])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _ARITHMETIC and not _text(node):
            yield lambda n: _set(n, "op", _ARITHMETIC[type(n.op)]())
        case ast.BoolOp(op=op):
            other_op = ast.Or if isinstance(op, ast.And) else ast.And
            yield lambda n: _set(n, "op", other_op())
        case ast.Constant(value=bool(value)):
            yield lambda _: ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield lambda _: ast.Constant(value + 1)
            yield lambda _: ast.Constant(value - 1)
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield lambda n: _set(n, "func", ast.Name(_CALLS[name], ast.Load()))
        case ast.If() | ast.While() | ast.IfExp():
            yield lambda n: _set(n, "test", ast.UnaryOp(ast.Not(), n.test))
        case ast.comprehension(ifs=[_, *_]):
            yield lambda n: _set(n, "ifs", [ast.UnaryOp(ast.Not(), n.ifs[0]), *n.ifs[1:]])
            yield lambda n: _set(n, "ifs", n.ifs[1:])
    if _droppable(node):
        yield lambda _: ast.Pass()


def _set(node: ast.AST, field: str, value: object) -> ast.AST:
    setattr(node, field, value)
    return node


def _text(node: ast.AST) -> bool:
    """Whether an addition or a product glues or formats text."""
    return any(isinstance(part, ast.JoinedStr | ast.Constant) and isinstance(getattr(part, "value", ""), str)
               for part in ast.walk(node))  # fmt: skip


def _droppable(node: ast.AST) -> bool:
    """Statements whose loss leaves a program: effects, not definitions of names."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Subscript | ast.Attribute) for target in node.targets)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Delete)


def points(tree: ast.AST) -> Iterator[tuple[ast.AST, ast.AST, str, int | None, Change]]:
    """Every possible change: node, parent, the parent's field (and position in it), change; in source order."""
    for parent, field, at, child in _children(tree):
        for change in changes(child):
            yield child, parent, field, at, change
        yield from points(child)


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Children that hold code: no types, decorators, docstrings, messages or imports."""
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for at, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(child, ast.AST) and not _declaration(child):
                yield node, field, at, child


def _declaration(node: ast.AST) -> bool:
    """Type aliases and lists of names, at whose change nobody would look."""
    match node:
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name == "__all__" or (name[:1].isupper() and not name.isupper())
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


def mutants_of(path: str, source: str) -> list[Mutant]:
    """All mutants of a source file."""
    found = []
    for number, (node, _, _, _, change) in enumerate(points(ast.parse(source))):
        line = getattr(node, "lineno", 0) or getattr(getattr(node, "target", None), "lineno", 0)
        found.append(Mutant(path, number, line, _short(node), _short(change(copy.deepcopy(node)))))
    return found


def _short(node: ast.AST) -> str:
    """A node in one line; of compound statements the head."""
    text = (
        ast.unparse(node)
        if not isinstance(node, ast.comprehension)
        else ast.unparse(ast.Tuple([*node.ifs], ast.Load()))
    )
    return " ".join(text.splitlines()[0].split())[:90] if text else "(nothing)"


def mutate(source: str, number: int) -> str:
    """The source with its ``number``-th change made."""
    tree = ast.parse(source)
    for index, (node, parent, field, at, change) in enumerate(points(tree)):
        if index == number:
            if at is None:
                setattr(parent, field, change(node))
            else:
                getattr(parent, field)[at] = change(node)
            return ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    raise ValueError(f"there is no change {number}")


def choose(paths: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """``count`` mutants, as many of each file as there are turns; those of a file in random order."""
    decks = []
    for path in paths:
        deck = mutants_of(path, (ROOT / path).read_text(encoding="utf-8"))
        random.Random(f"{seed} {path}").shuffle(deck)
        decks.append(deck[::-1])
    chosen: list[Mutant] = []
    while len(chosen) < count and any(decks):
        chosen += [deck.pop() for deck in decks if deck]
    return sorted(chosen[:count], key=lambda mutant: paths.index(mutant.path))


def part(mutants: Sequence[Mutant], which: str) -> list[Mutant]:
    """Slice "K/N" of the mutants: the K-th of N pieces, as equal as can be; all pieces together are all of them."""
    try:
        number, pieces = map(int, which.split("/"))
    except ValueError:
        number, pieces = 0, 0
    if not 1 <= number <= pieces:
        sys.exit(f"--slice {which}: K/N with 1 <= K <= N is needed, as in 3/10")
    return list(mutants[(number - 1) * len(mutants) // pieces : number * len(mutants) // pieces])


# --- running tests ----------------------------------------------------------------------------------------------------


def copy_tree(folder: Path) -> None:
    """What the tests need, without caches; caches of an earlier copy stay, files that are gone go."""
    wanted = set()
    for name in COPIED:
        for source in [ROOT / name, *(ROOT / name).rglob("*")]:
            place = source.relative_to(ROOT)
            if source.is_file() and "__pycache__" not in place.parts:
                wanted.add(folder / place)
                (folder / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder / place)  # with its age, by which caches know it
    for old in [old for name in COPIED for old in (folder / name).rglob("*")]:
        if old.is_file() and "__pycache__" not in old.parts and old not in wanted:
            old.unlink()


def write_source(target: Path, source: str) -> None:
    """Replace a module; its byte code goes, since two mutants of one second and size look alike."""
    target.write_text(source, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(target))).unlink(missing_ok=True)


@dataclass(frozen=True)
class Bench:
    """Copies of the working tree that are free, and tests under way."""

    folders: queue.Queue[Path]
    running: set[subprocess.Popen[str]]
    timeout: float

    def run_tests(self, folder: Path, path: str) -> tuple[str, str]:
        """The tests of a file in a copy: "passed", "failed" or "timeout"; and the last lines they printed."""
        interpreted = INTERPRETED if TESTS[path] is _EVALUATOR else {}
        environment = {**os.environ, **interpreted, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS[path]]
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.running.add(process)
        try:
            output, _ = process.communicate(timeout=self.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "timeout", ""
        finally:
            self.running.discard(process)
        tail = "\n".join(output.splitlines()[-5:])
        return "passed" if process.returncode == 0 else "failed", tail

    def stop(self) -> None:
        """End all tests, with whatever they started."""
        for process in tuple(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def check_unchanged(bench: Bench, folder: Path, paths: Sequence[str]) -> str:
    """Why mutants would be killed for nothing: the tests fail anyway, or import another tree. Empty if all is well."""
    place = subprocess.run(
        [sys.executable, "-c", "import magis, pytest_magis; print(magis.__file__, pytest_magis.__file__)"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    if not all(Path(found).is_relative_to(folder) for found in place):
        return "the copy is not what tests would import"
    for tests in dict.fromkeys(TESTS[path] for path in paths):
        path = next(path for path in paths if TESTS[path] is tests)
        outcome, tail = bench.run_tests(folder, path)
        if outcome != "passed":
            return f"without any mutant, {' '.join(tests)} {outcome}:\n{tail}"
    return ""


def judge(mutant: Mutant, bench: Bench) -> tuple[Mutant, str, float]:
    """Plant a mutant in a free copy, test, and take it out again."""
    folder = bench.folders.get()
    target = folder / mutant.path
    source = target.read_text(encoding="utf-8")
    begin = time.monotonic()
    try:
        write_source(target, mutate(source, mutant.number))
        outcome, _ = bench.run_tests(folder, mutant.path)
    finally:
        write_source(target, source)
        bench.folders.put(folder)
    return mutant, outcome, time.monotonic() - begin


def survey(mutants: Sequence[Mutant], work: str, jobs: int, timeout: float) -> list[tuple[Mutant, str]]:
    """Judge all mutants, a line each; stops with a message if the tests fail without them.

    The copies lie in the folder ``work`` and stay there, or, if that is empty, in a temporary one.
    """
    results = []
    place = contextlib.nullcontext(work) if work else tempfile.TemporaryDirectory(prefix="mutants-")
    with place as name:
        bench = Bench(queue.Queue(), set(), timeout)
        for job in range(jobs):
            folder = Path(name).resolve() / str(job)
            folder.mkdir(parents=True, exist_ok=True)
            copy_tree(folder)
            bench.folders.put(folder)
        problem = check_unchanged(bench, folder, list(dict.fromkeys(m.path for m in mutants)))
        if problem:
            sys.exit(problem)
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for mutant, outcome, seconds in pool.map(lambda m: judge(m, bench), mutants):
                    verdict = "SURVIVED" if outcome == "passed" else "killed"
                    print(f"{verdict:8} {seconds:6.1f} s  {mutant}{' (timeout)' * (outcome == 'timeout')}", flush=True)
                    results.append((mutant, verdict))
            except BaseException:  # interrupted or terminated: no test may outlive this program
                pool.shutdown(wait=False, cancel_futures=True)
                bench.stop()
                raise
    return results


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Plant mistakes in the core and count those that the tests notice.")
    parser.add_argument("--count", type=int, default=200, help="mutants to plant (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="which mutants (default: 0)")
    parser.add_argument("--only", action="append", choices=[*TESTS], metavar="PATH", help="mutate this file only")
    parser.add_argument("--slice", default="1/1", metavar="K/N", help="only the K-th of N pieces of these mutants")
    parser.add_argument("--work", default="", metavar="FOLDER", help="keep the copies of the working tree here")
    parser.add_argument("--jobs", type=int, default=2, help="copies tested at once (default: 2)")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds per mutant (default: 180)")
    parser.add_argument("--list", action="store_true", help="print the mutants instead of planting them")
    options = parser.parse_args()
    mutants = part(choose(options.only or list(TESTS), options.count, options.seed), options.slice)
    if options.list:
        print("\n".join(map(str, mutants)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = survey(mutants, options.work, options.jobs, options.timeout)
    killed = sum(verdict == "killed" for _, verdict in results)
    for path in dict.fromkeys(mutant.path for mutant in mutants):
        own = [verdict for mutant, verdict in results if mutant.path == path]
        print(f"{path:34} {own.count('killed'):3} of {len(own):3} killed")
    survivors = [str(mutant) for mutant, verdict in results if verdict == "SURVIVED"]
    print("\n".join(["survivors:", *(f"  {line}" for line in survivors)] if survivors else ["no survivors"]))
    print(f"{killed} of {len(results)} killed ({killed / max(len(results), 1):.1%}); at least {BAR:.0%} are wanted")
    return 0 if killed >= BAR * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
