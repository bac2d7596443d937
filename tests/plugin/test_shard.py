"""--magis-shard: shares of the models for several machines, and `magis merge`, which joins what they found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from magis.cli.main import main
from pytest_magis.option_values import Shard

NAMES = st.lists(st.text("abcdef", min_size=1, max_size=4), max_size=12)


@given(NAMES, st.integers(1, 9), st.randoms(use_true_random=False))
def test_shares_are_disjoint_complete_balanced_and_blind_to_order(names, count, random):
    shares = [Shard(number, count).of(names) for number in range(1, count + 1)]
    assert sorted(name for share in shares for name in share) == sorted(set(names))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    shuffled = random.sample(names, len(names))
    assert [Shard(number, count).of(shuffled) for number in range(1, count + 1)] == shares


def test_the_shares_of_a_run_make_the_whole(gate, node_ids, workers):
    models = "--magis-models=vit,bert,mlp,unet,seed-bert"
    whole = node_ids(gate(models, "--collect-only", "-q"))
    shares = [node_ids(gate(models, f"--magis-shard={number}/3", "--collect-only", "-q")) for number in (1, 2, 3)]
    assert sorted(node_id for share in shares for node_id in share) == sorted(whole)
    reordered = "--magis-models=seed-bert,unet,vit,mlp,bert"
    other = node_ids(gate(reordered, "--magis-shard=2/3", "--collect-only", "-q"))
    assert sorted(other) == sorted(shares[1])
    gate.accept(models)
    gate(models, "--magis-shard=2/3", workers=workers).assert_outcomes(passed=len(shares[1]))


def test_commands_that_accept_name_the_case_not_the_share(gate):
    result = gate("--magis-models=bert", "--magis-shard=1/2")
    lines = [line for line in result.outlines if line.startswith("create it with")]
    assert len(lines) == 3
    assert not any("shard" in line for line in lines)
    result.stdout.fnmatch_lines(["accept everything that can be: *--magis-shard=1/2 --magis-update=new"])


def test_merged_shares_are_the_results_of_the_whole(gate, capsys):
    models = "--magis-models=vit,bert,mlp"
    gate.accept(models, "--magis-csv=whole.csv", update="new,better")
    for number in (1, 2, 3, 4):
        gate(models, f"--magis-shard={number}/4", f"--magis-csv=part-{number}.csv").assert_outcomes(
            passed=3 if number < 4 else 0
        )
    gate(models, "--magis-csv=whole.csv")
    files = [str(gate.root / f"part-{number}.csv") for number in (3, 1, 2, 4)]
    capsys.readouterr()
    assert main(["merge", *files, "-o", str(gate.root / "all.csv")]) == 0
    assert capsys.readouterr().out == f"{gate.root / 'all.csv'}: 9 cases of 4 files, 9 green, 0 red\n"
    key = lambda row: (row["name"], row["strategy"], row["memory limit ratio"])  # noqa: E731
    assert sorted(gate.rows("all.csv"), key=key) == sorted(gate.rows("whole.csv"), key=key)
    gate.fake(**{"bert[magis-mem0.8]": {"opt_tensor": 1.005}})
    gate(models, "--magis-shard=1/4", "--magis-csv=part-1.csv")
    capsys.readouterr()
    assert main(["merge", *files]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("FAIL worse  bert[magis mem 0.8]: optimized tensor bytes")
    assert out[-1] == "9 cases of 4 files, 8 green, 1 red"
