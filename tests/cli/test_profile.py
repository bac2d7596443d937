"""The command: what it prints, what it leaves, and one line with exit code 4 for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from magis.cli.main import UNFINISHED, USAGE_ERROR, main
from magis.cost.profile_store import load


def test_profile_measures_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magis.progress.SILENCE_S", 0.0)
    monkeypatch.setattr("magis.progress.LOGGED_S", 0.0)
    path = tmp_path / "deep" / "cpu.json"
    arguments = ["profile", "--device", "cpu", "--models", "mlp", "--no-parts", "--out", str(path)]
    assert main([*arguments, "--seconds", "0.000001"]) == UNFINISHED
    assert "and more to come: run the command again to go on" in capsys.readouterr().out
    assert main(arguments) == 0
    out = capsys.readouterr()
    count = len(load(path).entries)
    assert out.out == f"{path}: {count} operators; {count} asked for, all measured\n"
    assert "magis: profile: mlp: batch 1, 0 operators known (" in out.err
    assert load(path).dtypes >= {"float32"}


def test_several_data_types_and_threads(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    before = torch.get_num_threads()
    arguments = ["--device", "cpu", "--models", "mlp", "--no-parts", "--dtype", "float32,bfloat16", "--threads", "1"]
    try:
        assert main(["profile", *arguments, "--out", str(path)]) == 0
    finally:
        torch.set_num_threads(before)
    assert load(path).dtypes >= {"float32", "bfloat16"}
    assert load(path).device["threads"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND; see magis --help"),
        (["profil"], "invalid choice: 'profil'"),
        (["profile", "--nothing"], "magis profile takes no '--nothing'; choose from --device, --dtype"),
        (["estimate", "mlp", "--devce", "cpu"], "magis estimate takes no '--devce'; did you mean --device?"),
        (["estimate", "v*", "--device", "cpu"], "'v*' stands for 5 models; name one: vit, vgg11"),
        (
            ["estimate", "mlp", "--device", "cpu", "--memory-limit", "24"],
            "a memory limit of 24 bytes; write its unit: 24GiB",
        ),
        (
            ["estimate", "tests.models.factories:meta", "--device", "cpu"],
            "weight is on device meta; build it on the CPU",
        ),
        (["profile", "--device", "sim:h200"], "--device: sim:h200 cannot be measured; use cpu or cuda"),
        (["profile", "--device", "cuda"], "device 'cuda' asked for, but torch finds no GPU; use cpu or sim:<name>"),
        (["profile", "--device", "tpu"], "unknown device 'tpu'"),
        (["profile", "--models", "brt"], "unknown model 'brt'; did you mean bert or btlm"),
        (["profile", "--seconds", "0"], "--seconds: '0' is not a number above 0"),
        (["profile", "--seconds", "nan"], "--seconds: 'nan' is not a number above 0"),
        (["profile", "--threads", "1.5"], "--threads: '1.5' is not a whole number above 0"),
        (["profile", "--threads", "1e30"], "--threads: '1e30' is not a whole number above 0 and below a million"),
        (["profile", "--device", "cpu", "--dtype", "float32,"], "--dtype: empty item in 'float32,'"),
        (["profile", "--models", "mlp", "--device", "cpu", "--dtype", "float31"], "unknown data type 'float31'"),
        (["profile", "--models", "mlp", "--device", "cpu", "--preset", "huge"], "unknown preset 'huge'"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_mistakes_are_one_line_and_leave_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == USAGE_ERROR
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ERROR: ")]
    assert len(said) == 1
    assert message in said[0]
    assert list(tmp_path.iterdir()) == []
