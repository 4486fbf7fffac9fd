"""`onlinenorm scale`: the paper's appendix F as a calculator."""

import math
from fractions import Fraction
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from onlinenorm.hyperparameters import (
    ALPHA_BWD,
    ALPHA_FWD,
    Convention,
    Rule,
    scale_decay,
    scale_hyperparameters,
)

RULES: tuple[Rule, Rule] = ("text", "imagenet")


def scale(
    old: Annotated[int, typer.Argument(metavar="OLD", help="Batch size that the values are for.", show_default=False)],
    new: Annotated[int, typer.Argument(metavar="NEW", help="Batch size to find them for.", show_default=False)],
    rate: Annotated[float, typer.Option(metavar="RATE", help="Learning rate at OLD.", show_default=False)],
    momentum: Annotated[float, typer.Option(metavar="μ", help="Momentum at OLD.")] = 0.0,
    convention: Annotated[
        Convention, typer.Option(help="The momentum that RATE is for: v = μv + g, or damped, v = μv + (1 - μ)g.")
    ] = "pytorch",
    alpha_fwd: Annotated[str, typer.Option(metavar="α", help="Decay at OLD, a number or a fraction.")] = str(ALPHA_FWD),
    alpha_bwd: Annotated[str, typer.Option(metavar="α", help="Decay at OLD, a number or a fraction.")] = str(ALPHA_BWD),
) -> None:
    """Hyperparameters for another batch size, by the paper's appendix F.

    The paper's source for ImageNet, from 256 images a batch to 32:

        onlinenorm scale 256 32 --rate 0.1 --momentum 0.9
    """
    decays = {"alpha_fwd": _decay("--alpha-fwd", alpha_fwd), "alpha_bwd": _decay("--alpha-bwd", alpha_bwd)}
    for name, size in (("OLD", old), ("NEW", new)):
        if size < 1:
            raise typer.BadParameter(f"{size} is not a batch size: at least 1 is needed.", param_hint=name)
    if not 0 <= momentum < 1:
        raise typer.BadParameter(f"{momentum} is not at least 0 and below 1.", param_hint="--momentum")
    if not 0 < rate < math.inf:
        raise typer.BadParameter(f"{rate} is not above 0.", param_hint="--rate")

    rates: dict[Convention, float] = {"pytorch": rate, "damped": rate}  # the same steps in both conventions
    if convention == "pytorch":
        rates["damped"] /= 1 - momentum
    else:
        rates["pytorch"] *= 1 - momentum

    console = Console()
    console.print(_table(old, new, rates, momentum, decays))
    console.print(f"\n{_explanation(old, new)}")


def _table(old: int, new: int, rates: dict[Convention, float], momentum: float, decays: dict[str, float]) -> Table:
    scaled = {
        (rule, way): scale_hyperparameters(old, new, rates[way], momentum, way, rule) for rule in RULES for way in rates
    }
    table = Table(title=f"From batch size {old:,} to {new:,}", title_justify="left")
    table.add_column("")
    for heading in (f"at {old:,}", f"at {new:,},\nby the text", f"at {new:,}, by the\nImageNet column"):
        table.add_column(heading, justify="right")

    def rate_row(name: str, way: Convention) -> None:
        table.add_row(name, f"{rates[way]:.4g}", *(f"{scaled[rule, way].learning_rate:.4g}" for rule in RULES))

    rate_row("rate, v = μv + g (PyTorch)", "pytorch")
    rate_row("rate, v = μv + (1 − μ)g", "damped")
    table.add_row("momentum μ", _near_one(momentum), *(_near_one(scaled[r, "damped"].momentum) for r in RULES))
    table.add_row("L2 regularisation", "", "unchanged", "unchanged", end_section=True)
    movement = [scaled[rule, "damped"].learning_rate / rates["damped"] for rule in RULES]
    table.add_row("weights move, per update", "1", *(f"{m:.4g}" for m in movement))
    table.add_row("weights move, per sample", "1", *(f"{m * old / new:.4g}" for m in movement), end_section=True)
    for name, decay in decays.items():
        table.add_row(f"{name}, same horizon in samples", *([_near_one(decay)] * 3))
        table.add_row(f"{name}, same horizon in updates", *map(_near_one, (decay, *[scale_decay(old, new, decay)] * 2)))
    return table


def _explanation(old: int, new: int) -> str:
    return (
        f"[bold]Two columns[/], as the paper does not agree with itself. Its appendix F multiplies the rate by "
        f"{new:,}/{old:,} and, where momentum is not damped, by (1 − new μ)/(1 − μ). Its settings for ImageNet (batch "
        f"size 32, rate 0.01308, μ 0.98692) follow from their source (256, 0.1, 0.9) by the second factor alone; it "
        f"does not say why. Both factors keep the weights' movement per sample, the second alone keeps it per "
        f"update.\n\n"
        f"[bold]Decays[/] are per sample, whatever the batch. The paper has no rule for them and keeps them: the same "
        f"horizon in samples. That fits the text, by which the weights move as far within a horizon as before. By "
        f"the ImageNet column they do so within the same horizon in updates, which holds {new:,}/{old:,} as many "
        f"samples. What is better was not measured: sweep where it matters."
    )


def _near_one(value: float) -> str:
    """As many digits as show four of 1 - value."""
    digits = 3 - math.floor(math.log10(1 - value))
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


def _decay(option: str, text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError) as error:
        raise typer.BadParameter(
            f"{text!r} is not a number or a fraction such as 127/128.", param_hint=option
        ) from error
    if not 0 <= value < 1:
        raise typer.BadParameter(f"{text} is not at least 0 and below 1.", param_hint=option)
    return value
