"""`onlinenorm bench`: how fast the layer is beside PyTorch's normalisers, and what it keeps in memory."""

from enum import Enum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from onlinenorm.bench import cases


class Allocator(str, Enum):
    """How the C library hands out memory while it is measured."""

    both = "both"
    mapped = "mapped"
    default = "default"


def bench(
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help=f"Shapes N x C x ..., as 8x64x56x56, and groups of them: {', '.join(cases.GROUPS)}, or all. "
            "Separate with commas.",
            show_default="all",
        ),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            metavar="LIST", help=f"Element type and memory layout (cl: channels last): {', '.join(cases.MODES)}."
        ),
    ] = "all",
    peers: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Whom to compare with: batch, group, instance, layer (PyTorch's), portable (OnlineNorm without its "
            "engine), floor (the plainest loop over the same bytes). OnlineNorm itself always takes part.",
        ),
    ] = "all",
    step: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Time whole training steps instead of single layers: resnet20, unet (3D), mlp, rnn, or all.",
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compile", help="With --step: every peer's network runs by torch.compile.")
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Rounds; each measures every peer once (slow ones in one of three). A case that takes long ends after "
            "fewer, but not before 5.",
            show_default="15, or 5 with --quick",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of every peer.", show_default="PyTorch's choice")
    ] = None,
    allocator: Annotated[
        Allocator,
        typer.Option(
            help="mapped: large tensors come from memory that is already mapped, as in a tuned training run (glibc "
            "only). default: the C library as it is. both: mapped, and OnlineNorm and BatchNorm once more by default."
        ),
    ] = Allocator.both,
    memory: Annotated[bool, typer.Option(help="Also count bytes, kept and at the peak.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="A few shapes, few rounds: under a minute.")] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write everything to this file as JSON.")
    ] = None,
) -> None:
    """Time OnlineNorm beside PyTorch's normalisers in alternating rounds, and report the ratios of their times.

    A ratio below 1 means that OnlineNorm takes less.

    It is the median over the rounds; ± is half the distance of its quartiles.

    Timed is forward plus backward, or with --step a whole training step.
    """
    # imported here, so that --help and a mistyped option need not wait for PyTorch
    from onlinenorm.bench.allocator import can_keep_mapped

    if step is not None and shapes is not None:
        _refuse("--shapes", "--step times networks, which bring their own shapes; leave one of the two out")
    if compiled and step is None:
        _refuse("--compile", "it compiles networks: name some by --step, as in --step resnet20 --compile")
    if json is not None and not json.parent.is_dir():
        _refuse("--json", f"there is no folder {json.parent}")
    if allocator is not Allocator.default and not can_keep_mapped():
        if allocator is Allocator.mapped:
            _refuse("--allocator", "mapped needs Linux with glibc; choose default")
        typer.echo("Without glibc memory cannot be kept mapped; measuring the default allocator only.", err=True)
        allocator = Allocator.default
    wanted_modes = [cases.MODES[name] for name in _names("--modes", modes, tuple(cases.MODES))]

    import torch

    from onlinenorm.bench import networks, run, steps
    from onlinenorm.bench.peers import PEERS

    names = _names("--peers", f"online,{peers}", PEERS if step is None else steps.STEP_PEERS)
    field: list[run.Case] = []
    if step is not None:
        field += steps.step_cases(_names("--step", step, tuple(networks.NETWORKS)), wanted_modes, quick, compiled)
    else:
        field += cases.layer_cases(_shapes(shapes or ("quick" if quick else "all")), wanted_modes)
    if not field:
        _refuse("--modes", "1d layers have no channels-last layout; choose float32")

    rounds = rounds or (5 if quick else 15)
    threads = threads or torch.get_num_threads()
    again = ["--modes", modes, "--rounds", str(rounds), "--threads", str(threads)]
    again += [
        *(["--shapes", shapes] if shapes else []),
        *(["--step", step] if step else []),
        *["--quick"] * quick,
        *["--compile"] * compiled,
    ]
    settings = run.Settings(field, names, rounds, threads, allocator.value, memory, json, again)
    if not run.run(settings):
        typer.echo("Interrupted: reported is what was done by then.", err=True)
        raise typer.Exit(130)


def _shapes(text: str) -> list[cases.Shape]:
    try:
        return cases.parse_shapes(text)
    except ValueError as error:
        _refuse("--shapes", str(error))


def _names(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    try:
        return cases.parse_names(text, allowed)
    except ValueError as error:
        _refuse(option, str(error))


def _refuse(option: str, why: str) -> NoReturn:
    raise typer.BadParameter(why, param_hint=option)
