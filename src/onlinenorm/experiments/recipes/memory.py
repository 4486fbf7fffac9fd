"""`memory`: what a training step takes, at batch size 1 and at BatchNorm's batch sizes (paper, table 1).

Every tensor of a step of SGD with momentum is counted: those that autograd saves for the backward beside the
parameters (the activations), and all that are alive at the worst moment of the second step (activations, weights,
gradients, momentum, and what comes and goes). Nothing is estimated. A step that takes less than `real_below` runs on
the device; a larger one runs on PyTorch's meta device, whose tensors have shapes and no memory, by the same code. The
two agree to the byte on a processor, as the tests check. What is no tensor comes on top: an operator's scratch
memory, and what the allocator does not give back; on a processor, ResNet-50 at batch size 32 made a process grow by
4.1 GB where 3.0 are counted.

Networks: ResNet-50 on images of 224 x 224; the experiments' U-Net, of width 64, on images; the same in three
dimensions, of width 32, on volumes, as in the 3D U-Net of Cicek et al. (2016) that the paper cites. Three poolings
halve each side, so 150 and 250 voxels are padded to 152 and 256.

The paper does not say what it counts; its U-Nets' numbers come from a model. The difference between its columns for
128 and for 32 images is what 96 images take, so one takes 0.96 and 4.26 GB (1024 and 2048 pixels), 0.90 and 6.14 GB
(150 and 250 voxels). They grow more than the number of pixels or voxels does, as with convolutions that are not
padded, which shave small inputs most, and two bytes for the output of each convolution of these networks as published
come near (0.85 and 3.72, 0.84 and 5.04). Here convolutions are padded, a scalar takes four bytes, and what a
normaliser returns is kept beside what it was given. "ResNet-50, PyTorch" is the row that is like this: 0.10 GB an
image there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from onlinenorm.experiments.analysis import no_data
from onlinenorm.experiments.experiment import Experiment, Scale, Setting, Summary
from onlinenorm.experiments.memory import count_alive, count_saved
from onlinenorm.experiments.normalizers import NORMALIZERS, build
from onlinenorm.experiments.paper import MEMORY
from onlinenorm.experiments.parts import Norm
from onlinenorm.experiments.resnet import resnet50
from onlinenorm.experiments.runs import Record, Run
from onlinenorm.experiments.unet import UNet
from onlinenorm.hyperparameters import ALPHA_BWD, ALPHA_FWD

GB = 1e9


@dataclass(frozen=True)
class Subject:
    """A network and the size of what it is fed: channels, and the length of each side."""

    network: Callable[[Norm], nn.Module]
    channels: int
    side: int
    dims: int

    def shape(self, shrunk: int) -> tuple[int, ...]:
        """Of one sample; each side divided, and padded to a multiple of 8."""
        side = -(-self.side // shrunk // 8) * 8
        return self.channels, *[side] * self.dims


VOLUMES: Callable[[Norm], nn.Module] = partial(UNet, 32, dims=3)
IMAGES: Callable[[Norm], nn.Module] = partial(UNet, 64)
SUBJECTS: Mapping[str, Subject] = {  # named as in the paper's table
    "ResNet-50, PyTorch": Subject(resnet50, 3, 224, 2),
    "U-Net, 150³ voxels": Subject(VOLUMES, 1, 150, 3),
    "U-Net, 250³ voxels": Subject(VOLUMES, 1, 250, 3),
    "U-Net, 1024² pixels": Subject(IMAGES, 1, 1024, 2),
    "U-Net, 2048² pixels": Subject(IMAGES, 1, 2048, 2),
}


@dataclass(frozen=True, kw_only=True)
class Settings(Setting):
    """The paper's sizes."""

    batch_sizes: tuple[int, ...]
    shrunk: int = 1  # divides every image's and volume's sides
    real_below: float = 4.0  # GB at the peak, up to which a step is taken for real


def settings(scale: Scale, norm: str) -> Settings:
    """The same at every scale, but for `smoke`: there, each side is an eighth as long."""
    paper = Settings(norm=norm, batch_sizes=(1,) if norm == "online" else (32, 128))
    return replace(paper, shrunk=8, real_below=0.2) if scale == "smoke" else paper


def train(run: Run[Settings]) -> None:
    """Each network at each batch size: counted on the meta device, and for real if that fits."""
    s = run.settings
    cases = [(name, batch_size) for name in SUBJECTS for batch_size in s.batch_sizes]
    for case in run.each("case", range(1, len(cases) + 1)):
        name, batch_size = cases[case - 1]
        subject = SUBJECTS[name]
        device = torch.device("meta")
        activations, peak = count_step(subject, s, batch_size, device)
        if peak <= s.real_below * GB:
            device = run.fabric.device
            activations, peak = count_step(subject, s, batch_size, device)
        run.log(
            network=name,
            batch_size=batch_size,
            activations=activations / GB,
            peak=peak / GB,
            device=device.type,
        )


def count_step(subject: Subject, s: Settings, batch_size: int, device: torch.device) -> tuple[int, int]:
    """Bytes of the activations that one forward keeps, and at the peak of a step, the network itself among them."""

    def loss_of(output: Tensor) -> Tensor:
        return output.square().mean()

    with torch.device(device):
        with count_alive() as alive:
            model = build(s.norm, subject.network, alpha_fwd=ALPHA_FWD, alpha_bwd=ALPHA_BWD)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
            inputs = torch.randn(batch_size, *subject.shape(s.shrunk))
            for _ in range(2):  # the first step makes the momentum
                loss_of(model(inputs)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        _, activations = count_saved(model, inputs, loss_of)
    return activations, alive.peak


def summary(records: Sequence[Record]) -> Summary:
    """Each network and batch size, beside the paper's number."""
    rows = []
    for name in SUBJECTS:
        for record in records:
            for row in record.rows:
                if row["network"] == name:
                    batch = f"{NORMALIZERS[record.settings['norm']].label}, {row['batch_size']}"
                    numbers = [f"{row[key]:.3g}" for key in ("activations", "peak")]
                    paper = reported(record, name, row["batch_size"])
                    times = f"{row['peak'] / paper:.2f}" if paper else ""
                    rows.append((name, batch, *numbers, str(paper or ""), times, row["device"]))
    columns = ("Network", "Batch", "Kept, GB", "Peak, GB", "Paper, GB", "Peak ÷ paper", "On")
    note = (
        "Kept: activations saved for the backward. Peak: all that lives in a step of SGD with momentum. "
        "float32, 1 GB = 10⁹ bytes; meta: the same code on tensors that have no memory. The paper's U-Nets come from a "
        "model that it does not give; two bytes for each output of unpadded convolutions would come near it."
    )
    return Summary(columns, tuple(rows), note)


def reported(record: Record, name: str, batch_size: int) -> int | None:
    """The paper's number, at the paper's sizes."""
    column = {("online", 1): "online", ("batch", 32): "batch32", ("batch", 128): "batch128"}
    key = column.get((record.settings["norm"], batch_size))
    return getattr(MEMORY[name], key) if key and record.settings["shrunk"] == 1 else None


EXPERIMENT = Experiment(
    name="memory",
    title="Memory for training",
    shows="what a training step takes at batch size 1, and at BatchNorm's batch sizes",
    data="none",
    time={"paper": "2 min", "cpu": "2 min", "smoke": "20 s"},
    norms=("online", "batch"),
    allowed=tuple(NORMALIZERS),
    runs={"paper": 1, "cpu": 1, "smoke": 1},
    settings=settings,
    load=no_data,
    train=train,
    x="case",
    summary=summary,
)
