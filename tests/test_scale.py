"""The calculator `onlinenorm scale`."""

import pytest
import typer
from typer.testing import CliRunner

from onlinenorm.scale import scale

app = typer.Typer()
app.command()(scale)


def run(*arguments: str):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})


def row(output: str, name: str) -> list[str]:
    line = next(line for line in output.splitlines() if name in line)
    return [cell.strip() for cell in line.strip("│ ").split("│")][1:]


def test_the_papers_example():
    ran = run("256", "32", "--rate", "0.1", "--momentum", "0.9")
    assert ran.exit_code == 0, ran.output
    assert row(ran.output, "(PyTorch)") == ["0.1", "0.001635", "0.01308"]
    assert row(ran.output, "(1 − μ)g") == ["1", "0.125", "1"]
    assert row(ran.output, "momentum μ") == ["0.9", "0.98692", "0.98692"]
    assert row(ran.output, "per update") == ["1", "0.125", "1"]
    assert row(ran.output, "per sample") == ["1", "1", "8"]
    assert row(ran.output, "alpha_fwd, same horizon in samples") == ["0.999"] * 3
    assert row(ran.output, "alpha_fwd, same horizon in updates") == ["0.999", "0.992028", "0.992028"]
    assert "follow from their source (256, 0.1, 0.9)" in " ".join(ran.output.split())


def test_the_rate_may_be_given_in_either_convention():
    pytorch = run("256", "32", "--rate", "0.1", "--momentum", "0.9")
    damped = run("256", "32", "--rate", "1", "--momentum", "0.9", "--convention", "damped")
    assert pytorch.output == damped.output


def test_decays_may_be_fractions():
    output = run("128", "128", "--rate", "0.1", "--alpha-fwd", "1023/1024", "--alpha-bwd", "0").output
    assert row(output, "alpha_fwd, same horizon in samples")[0] == "0.9990234"
    assert row(output, "alpha_bwd, same horizon in updates") == ["0", "0", "0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("256", "32"), ("--rate",)),
        (("0", "32", "--rate", "0.1"), ("OLD", "0 is not", "at least 1")),
        (("--rate", "0.1", "--", "256", "-2"), ("NEW", "-2 is not", "at least 1")),
        (("256", "32", "--rate", "-1"), ("--rate", "-1.0", "above 0")),
        (("256", "32", "--rate", "nan"), ("--rate", "nan", "above 0")),
        (("256", "32", "--rate", "0.1", "--momentum", "1"), ("--momentum", "1.0", "below 1")),
        (("256", "32", "--rate", "0.1", "--alpha-fwd", "1/0"), ("--alpha-fwd", "1/0", "127/128")),
        (("256", "32", "--rate", "0.1", "--alpha-bwd", "3/2"), ("--alpha-bwd", "3/2", "below 1")),
        (("256", "32", "--rate", "0.1", "--convention", "nesterov"), ("--convention", "nesterov", "damped")),
    ],
)
def test_wrong_option(arguments, said):
    ran = run(*arguments)
    assert ran.exit_code == 2
    for words in said:
        assert words in ran.output
