"""The benchmark's structure and arithmetic. Nothing here depends on how long anything takes."""

import json
import math
import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from typer.testing import CliRunner, Result

from onlinenorm.bench import allocator, measure, peers, run, steps
from onlinenorm.bench.cases import GROUPS, MODES, LayerCase, layer_cases, parse_names, parse_shapes
from onlinenorm.bench.goals import Goal, judge, layer_goals
from onlinenorm.bench.measure import Samples, Times
from onlinenorm.bench.memory import measure_memory
from onlinenorm.cli import app
from onlinenorm.experiments.memory import count_saved
from onlinenorm.experiments.resnet import resnet20


def bench(*options: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, ["bench", *map(str, options)])


@pytest.fixture(autouse=True)
def _own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process's malloc and number of threads as they are."""
    monkeypatch.setattr(allocator, "keep_mapped", lambda reserve: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr(measure, "MIN_SECONDS", 1e-9)


class Recorded:
    """A contestant that only notes its turns."""

    def __init__(self, name: str, log: list[str], every: int = 1) -> None:
        self.name, self.log, self.every = name, log, every

    def run(self, passes: int) -> Times:
        self.log.append(self.name)
        return Times(1.0, 1.0)


# the command


def test_every_peer_on_a_tiny_map(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = bench("--shapes", "2x32x4x4", "--rounds", 2, "--allocator", "default", "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["schema"] == run.SCHEMA
    assert report["finished"] is True
    assert {"command", "date", "machine", "versions", "commit", "settings", "goals"} < set(report)
    assert {"cpu", "cores", "caches", "threads"} < set(report["machine"])
    assert [r["mode"] for r in report["results"]] == list(MODES)
    for r in report["results"]:
        assert r["name"] == "2x32x4x4"
        assert list(r["peers"]) == list(peers.PEERS)
        assert r["default_allocator"] is None
        for name, peer in r["peers"].items():
            assert set(peer["seconds"]) == {"total", "forward", "backward"}
            assert set(peer["online_over_it"]) == (set() if name == "online" else set(peer["seconds"]))
            for ratio in peer["online_over_it"].values():
                assert 0 < ratio["q1"] <= ratio["median"] <= ratio["q3"]
            assert (peer["memory"] is None) == (name == "floor")
            assert peer["rounds"] == (1 if name in peers.SELDOM else 2)
    for word in ("2x32x4x4", "bfloat16-cl", "Goals", "bytes", "÷ floor, no sample fits the cache"):
        assert word in result.output


def test_vectors_have_no_instance_norm_and_no_channels_last(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = bench("--shapes", "4x20", "--rounds", 1, "--allocator", "default", "--no-memory", "--json", file)
    assert result.exit_code == 0, result.output
    (r,) = json.loads(file.read_text())["results"]
    assert r["mode"] == "float32"
    assert list(r["peers"]) == ["online", "batch", "layer", "portable", "floor"]  # no GroupNorm: 20 is not 8 n
    assert r["peers"]["batch"]["memory"] is None


@pytest.mark.skipif(not allocator.can_keep_mapped(), reason="needs glibc")
def test_the_default_allocator_is_measured_beside(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = bench("--shapes", "2x8x4x4", "--modes", "float32", "--peers", "batch", "--rounds", 1, "--json", file)
    assert result.exit_code == 0, result.output
    (r,) = json.loads(file.read_text())["results"]
    assert list(r["peers"]) == ["online", "batch"]
    assert set(r["default_allocator"]) == {"total", "forward", "backward"}
    assert "malloc" in result.output


def test_training_steps(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = bench("--step", "mlp,rnn", "--rounds", 1, "--allocator", "default", "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [(r["name"], list(r["peers"])) for r in report["results"]] == [
        ("mlp, batch 32", ["online", "batch"]),  # no GroupNorm: 500 is not 8 n
        ("rnn, batch 20", ["online", "batch", "group"]),
    ]
    assert [goal["title"] for goal in report["goals"]] == ["÷ BatchNorm, mlp, batch 32", "÷ BatchNorm, rnn, batch 20"]


def test_compiled_training_steps(tmp_path: Path) -> None:
    torch.compiler.reset()
    counters.clear()
    file = tmp_path / "bench.json"
    options = ("--step", "mlp", "--compile", "--peers", "batch", "--rounds", 1, "--allocator", "default")
    result = bench(*options, "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [(r["name"], list(r["peers"])) for r in report["results"]] == [
        ("mlp, batch 32, compiled", ["online", "batch"])
    ]
    assert [goal["title"] for goal in report["goals"]] == ["÷ BatchNorm, mlp, batch 32, compiled"]
    assert counters["stats"]["unique_graphs"] == 2, "one graph of each peer"


def test_an_interrupt_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race, done = run.race, []

    def interrupted_race(*args: object) -> dict[str, Samples]:
        if done:
            signal.raise_signal(signal.SIGINT)
        done.append(args)
        return race(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "race", interrupted_race)
    file = tmp_path / "bench.json"
    result = bench("--shapes", "4x20,4x21,4x22", "--rounds", 1, "--json", file)
    assert result.exit_code == 130
    report = json.loads(file.read_text())
    assert report["finished"] is False
    assert [r["name"] for r in report["results"]] == ["4x20"]
    assert "4x20" in result.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--shapes", "resnet"], ["--shapes", "'resnet'", "cifar", "volume", "8x64x56x56"]),
        (["--shapes", "8x0x4"], ["'8x0x4'", "positive"]),
        (["--shapes", "7"], ["'7'", "2 to 5"]),
        (["--modes", "float16"], ["--modes", "'float16'", *MODES]),
        (["--peers", "batch,bach"], ["--peers", "'bach'", *peers.PEERS]),
        (["--step", "vgg"], ["--step", "'vgg'", "resnet20", "unet", "mlp"]),
        (["--step", "mlp", "--peers", "floor"], ["'floor'", *steps.STEP_PEERS]),
        (["--step", "mlp", "--shapes", "4x20"], ["--shapes", "--step"]),
        (["--compile"], ["--compile", "--step resnet20"]),
        (["--shapes", "4x20", "--modes", "float32-cl"], ["--modes", "float32"]),
        (["--allocator", "jemalloc"], ["both", "mapped", "default"]),
        (["--rounds", "0"], ["--rounds"]),
        (["--json", "/no/such/folder/x.json"], ["--json", "/no/such/folder"]),
    ],
)
def test_a_wrong_value_is_told_what_is_allowed(options: list[str], says: list[str]) -> None:
    result = bench(*options)
    assert result.exit_code == 2
    message = " ".join(result.output.replace("│", " ").split())
    for words in says:
        assert words in message


def test_help_lists_the_options() -> None:
    result = bench("--help")
    assert result.exit_code == 0
    for option in ("--shapes", "--modes", "--rounds", "--threads", "--json", "--step", "--allocator", "--quick"):
        assert option in result.output


# cases


def test_shapes_are_read_once_each_and_in_order() -> None:
    assert parse_shapes("vector, 1x2x3,32x500") == [*GROUPS["vector"], (1, 2, 3)]
    assert len(parse_shapes("all")) == sum(len(shapes) for name, shapes in GROUPS.items() if name != "quick")


def test_names_come_in_the_allowed_order() -> None:
    assert parse_names("c, a", ("a", "b", "c")) == ["a", "c"]
    assert parse_names("all", ("a", "b")) == ["a", "b"]


def test_case_sizes() -> None:
    case = LayerCase((32, 64, 112, 112), MODES["bfloat16-cl"])
    assert case.name == "32x64x112x112"
    assert case.activation_bytes == 32 * 64 * 112 * 112 * 2
    assert case.sample_bytes == 64 * 112 * 112 * 2
    assert [c.mode.name for c in layer_cases([(2, 8), (2, 8, 4), (2, 8, 4, 4)], list(MODES.values()))] == [
        "float32", "float32", "float32", "float32-cl", "bfloat16-cl",
    ]  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 8), (2, 8, 4), (2, 8, 4, 4), (2, 8, 4, 4, 4)])
@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_peers_share_one_input_in_the_modes_layout(shape: tuple[int, ...], mode: object) -> None:
    for case in layer_cases([shape], [mode]):  # type: ignore[list-item]
        found = peers.contestants(case, list(peers.PEERS), threads=1)
        x, grad = found[0].x, found[0].grad  # type: ignore[attr-defined]
        assert all(peer.x is x and peer.grad is grad for peer in found)  # type: ignore[attr-defined]
        assert x.is_contiguous(memory_format=peers.layout(case.mode, len(shape)))
        assert x.dtype == grad.dtype == getattr(torch, case.mode.dtype)
        for peer in found:
            if isinstance(peer, peers.Normaliser):
                assert all(p.dtype == torch.float32 for p in peer.module.parameters())
                peer.run(1)
                assert x.grad is None


def test_a_single_value_per_channel_leaves_batch_norm_out() -> None:
    found = peers.contestants(LayerCase((1, 8), MODES["float32"]), ["online", "batch"], threads=1)
    assert [peer.name for peer in found] == ["online"]


def test_groups() -> None:
    groups = {c: peers.make_norm("group", c, 4) for c in (16, 32, 64, 100, 200)}
    assert {c: norm and norm.num_groups for c, norm in groups.items()} == {16: 8, 32: 8, 64: 32, 100: None, 200: 8}


# rounds and their statistics


def test_rounds_rotate_and_some_sit_out() -> None:
    log: list[str] = []
    field = [Recorded("a", log), Recorded("b", log), Recorded("c", log, every=3)]
    turns = [[c.name for c in measure.order(field, number)] for number in range(4)]
    assert turns == [["a", "b", "c"], ["b", "a"], ["a", "b"], ["a", "b", "c"]]


def test_a_race_measures_in_that_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "page_faults", lambda: 0)
    log: list[str] = []
    field = [Recorded("a", log), Recorded("b", log), Recorded("c", log, every=3)]
    ticks: list[int] = []
    samples = measure.race(field, 4, lambda: ticks.append(len(log)))
    assert "".join(log[-10:]) == "abc" + "ba" + "ab" + "abc"
    assert len(ticks) == 4
    assert [t is not None for t in samples["a"].times] == [True] * 4
    assert [t is not None for t in samples["c"].times] == [True, False, False, True]


def test_ratios_are_taken_within_rounds() -> None:
    ours = [Times(1, 1), Times(1, 3), Times(2, 2), None]
    theirs = [Times(2, 2), None, Times(1, 1), Times(9, 9)]
    ratio = measure.ratio(ours, theirs)
    assert ratio == {"median": 1.25, "q1": 0.875, "q3": 1.625, "of_medians": 1.0}
    assert measure.ratio(ours[:1], theirs[:1]) == {"median": 0.5, "q1": 0.5, "q3": 0.5, "of_medians": 0.5}
    assert measure.ratio(ours, theirs, "backward")["of_medians"] == 1.0
    assert measure.medians(ours) == {"total": 4.0, "forward": 1.0, "backward": 2.0}


def test_geometric_mean() -> None:
    assert measure.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert measure.geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10.0)
    assert measure.geometric_mean([0.3]) == pytest.approx(0.3)


def test_the_floor_takes_the_better_stores_for_each_direction() -> None:
    plain = Samples([Times(1, 8), Times(1, 9), Times(2, 9)])
    streaming = Samples([Times(3, 5), Times(3, 6), Times(1, 7)])
    joined = peers.best_floor({"online": plain, "floor, plain": plain, "floor, streaming": streaming})
    assert list(joined) == ["online", "floor"]
    assert joined["floor"].times == [Times(1, 5), Times(1, 6), Times(2, 7)]


# memory


class Keeps(torch.autograd.Function):
    """Saves three things: its input, a view of it, and 24 bytes of its own."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x[0], weight, torch.zeros(6))  # type: ignore[attr-defined]
        return x * weight


class Keeper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Keeps.apply(x, self.weight)  # type: ignore[no-any-return]


def test_each_saved_storage_is_counted_once_and_exactly() -> None:
    x = torch.randn(7, 5, requires_grad=True)
    assert count_saved(Keeper(), x) == (7 * 5 * 4 + 5 * 4 + 24, 7 * 5 * 4 + 24)


def test_batch_norm_keeps_its_input_and_two_moments() -> None:
    x = torch.randn(4, 6, 8, 8, requires_grad=True)
    _, beside = count_saved(nn.BatchNorm2d(6), x)
    assert beside == x.numel() * 4 + 2 * 6 * 4


def test_held_and_peak_bytes_of_a_known_module() -> None:
    """ReLU allocates its output, which it keeps, and in the backward the input's gradient."""
    x, grad = torch.randn(1000, 100, requires_grad=True), torch.randn(1000, 100)
    memory = measure_memory(peers.Normaliser("relu", nn.ReLU(), x, grad))
    size = x.numel() * 4
    assert memory["saved"] == size
    assert memory["held"] == pytest.approx(size, abs=4096)
    assert memory["peak"] == pytest.approx(2 * size, abs=4096)


# goals


def layer_result(shape: list[int], mode: str, ratios: dict[str, float], kept: float = 1.0) -> object:
    size = math.prod(shape) * 4
    found = {name: {"online_over_it": {"total": {"median": ratio}}} for name, ratio in ratios.items()}
    online = {"memory_over_batch": {"saved": kept, "saved_beside_parameters": kept}}
    return {
        "kind": "layer", "name": "x".join(map(str, shape)), "mode": mode, "shape": shape, "activation_bytes": size,
        "sample_bytes": size // shape[0], "peers": {"online": online, **found}, "default_allocator": None,
    }  # fmt: skip


def test_goals_are_judged_over_the_cases_they_are_about() -> None:
    cache = 1000
    results = [
        layer_result([4, 8, 4, 4], "float32", {"batch": 0.25, "group": 0.5, "floor": 1.2}),  # a sample fits
        layer_result([1, 8, 8, 8], "float32", {"batch": 1.0, "group": 2.0, "floor": 1.8}, kept=1.5),  # none fits
        layer_result([4, 2, 4, 4], "float32", {"batch": 0.5, "floor": 9.0}),  # all fits
        layer_result([20, 200], "float32", {"batch": 0.9}),
    ]
    judged = {(g.title, g.mode, g.statistic): judge(g, results) for g in layer_goals(cache)}  # type: ignore[arg-type]

    mean = judged["÷ BatchNorm", "float32", "mean"]
    assert (mean["cases"], mean["mean"], mean["reached"]) == (3, pytest.approx(0.5), False)
    worst = judged["÷ BatchNorm", "float32", "worst"]
    assert (worst["worst"], worst["worst_case"], worst["reached"]) == (1.0, "1x8x8x8", False)
    group = judged["÷ GroupNorm", "float32", "mean"]
    assert (group["cases"], group["mean"]) == (2, pytest.approx(1.0))
    fits = judged["÷ floor, a sample fits the cache", "float32", "mean"]
    assert (fits["cases"], fits["mean"], fits["reached"]) == (1, pytest.approx(1.2), True)
    larger = judged["÷ floor, no sample fits the cache", "float32", "mean"]
    assert (larger["cases"], larger["mean"], larger["reached"]) == (1, pytest.approx(1.8), False)
    assert judged["÷ BatchNorm1d, 20x200", "float32", "worst"]["reached"] is True
    assert judged["÷ BatchNorm1d, 32x500", "float32", "worst"]["reached"] is None
    assert judged["÷ BatchNorm", "float32-cl", "mean"]["cases"] == 0
    kept = judged["bytes kept ÷ BatchNorm", "", "worst"]
    assert (kept["cases"], kept["worst_case"], kept["reached"]) == (4, "1x8x8x8 float32", False)


def test_a_goal_met_exactly_is_reached() -> None:
    assert judge(Goal("", "", "worst", 1.0, lambda r: 1.0), [layer_result([2, 2], "float32", {})])["reached"] is True  # type: ignore[list-item]


# networks and machine


def test_resnet20_is_the_papers() -> None:
    network = resnet20(nn.BatchNorm2d)
    assert sum(p.numel() for p in network.parameters()) == 269_722
    assert sum(isinstance(m, nn.Conv2d) for m in network.modules()) == 19
    x = torch.randn(2, 3, 32, 32).to(memory_format=torch.channels_last)
    features = network[:-3].to(memory_format=torch.channels_last)(x)
    assert features.shape == (2, 64, 8, 8)
    assert features.is_contiguous(memory_format=torch.channels_last)
    assert resnet20(nn.BatchNorm2d, num_classes=100)(x).shape == (2, 100)


@pytest.mark.parametrize("name", ["resnet20", "unet", "mlp", "rnn"])
def test_each_network_takes_a_step(name: str) -> None:
    (case, *_) = steps.step_cases([name], [MODES["float32"]], quick=True)
    (step,) = steps.step_contestants(case, ["online"])
    assert isinstance(step, steps.Step)
    before = [p.detach().clone() for p in step.network.parameters()]
    step.run(1)
    moved = [bool((p != old).any()) for p, old in zip(step.network.parameters(), before, strict=True)]
    assert all(moved)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /sys")
def test_cache_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from onlinenorm import machine

    for index, (level, kind, size) in enumerate(
        [("1", "Data", "48K"), ("1", "Instruction", "32K"), ("3", "Unified", "96M")]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for file, text in (("level", level), ("type", kind), ("size", size)):
            (folder / file).write_text(text + "\n")
    monkeypatch.setattr(machine, "Path", lambda _: tmp_path)
    assert machine.caches() == {"L1": 48 << 10, "L3": 96 << 20}
    assert machine.last_level_cache() == 96 << 20
    monkeypatch.setattr(machine, "caches", dict)
    assert machine.last_level_cache() == 32 << 20


def test_malloc_is_only_asked_where_it_is_glibcs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("musl", "1.2"))
    assert not allocator.can_keep_mapped()
    result = bench("--allocator", "mapped", "--shapes", "4x20")
    assert result.exit_code == 2
    assert "glibc" in result.output
    result = bench("--shapes", "4x20", "--rounds", 1, "--peers", "batch")
    assert result.exit_code == 0
    assert "default allocator only" in result.output
