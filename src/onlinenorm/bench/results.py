"""One case's results, in the form in which they are written to JSON."""

from typing import TypedDict

from onlinenorm.bench.cases import LayerCase
from onlinenorm.bench.measure import PHASES, Ratio, Samples, medians, ratio
from onlinenorm.bench.memory import Memory
from onlinenorm.bench.steps import StepCase


class PeerResult(TypedDict):
    """One contestant; the floor has no memory, and OnlineNorm no ratio over itself."""

    rounds: int
    seconds: dict[str, float]  # medians, by phase
    page_faults: int
    online_over_it: dict[str, Ratio]  # OnlineNorm's time over this one's, by phase
    memory: Memory | None
    memory_over_batch: dict[str, float]  # its bytes over BatchNorm's, by kind; empty where either is unknown


class Result(TypedDict):
    """One case."""

    kind: str  # "layer" or "step"
    name: str
    mode: str
    shape: list[int]  # empty for a step
    activation_bytes: int
    sample_bytes: int
    peers: dict[str, PeerResult]
    default_allocator: dict[str, Ratio] | None  # OnlineNorm over BatchNorm with C's malloc as it comes, by phase


def make_result(case: LayerCase | StepCase, samples: dict[str, Samples], memory: dict[str, Memory]) -> Result:
    """Put a case's measurements together."""
    peers = {
        name: PeerResult(
            rounds=sum(t is not None for t in peer.times),
            seconds=medians(peer.times),
            page_faults=peer.page_faults,
            online_over_it={p: ratio(samples["online"].times, peer.times, p) for p in PHASES if name != "online"},
            memory=memory.get(name),
            memory_over_batch=_over(memory.get(name), memory.get("batch")),
        )
        for name, peer in samples.items()
    }
    layer = case if isinstance(case, LayerCase) else None
    return Result(
        kind="layer" if layer else "step",
        name=case.name,
        mode=case.mode.name,
        shape=list(layer.shape) if layer else [],
        activation_bytes=layer.activation_bytes if layer else 0,
        sample_bytes=layer.sample_bytes if layer else 0,
        peers=peers,
        default_allocator=None,
    )


def time_over(result: Result, peer: str) -> float | None:
    """OnlineNorm's time over a peer's, forward and backward; None where the peer was not measured."""
    return result["peers"][peer]["online_over_it"]["total"]["median"] if peer in result["peers"] else None


def memory_over_batch(result: Result, kind: str) -> float | None:
    """OnlineNorm's bytes over BatchNorm's, `kind` a key of `Memory`; None where either was not measured."""
    return result["peers"]["online"]["memory_over_batch"].get(kind)


def _over(ours: Memory | None, theirs: Memory | None) -> dict[str, float]:
    if ours is None or theirs is None:
        return {}
    return {key: value / theirs[key] for key, value in ours.items()}  # type: ignore[literal-required]
