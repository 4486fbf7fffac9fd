"""See inside: how well Online Normalization does its job in a model while it trains."""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from onlinenorm.torch.advice import advice
from onlinenorm.torch.layers import OnlineNorm, online_norm_layers
from onlinenorm.torch.observation import Call, Sums

if TYPE_CHECKING:
    from rich.console import Group


class Writer(Protocol):
    """What `to_tensorboard` needs: `torch.utils.tensorboard.SummaryWriter` and all that looks like it."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...  # noqa: D102


@contextmanager
def diagnose(model: nn.Module) -> Iterator["Diagnosis"]:
    """Watch every OnlineNorm layer of a model while the context is open.

        with diagnose(model) as diagnosis:
            ...  # some hundred training steps
        print(diagnosis)

    Outputs, gradients and state are bit for bit those without it, and nothing is left in the model when the context
    is closed, also by an exception. While it is open a layer takes ten to a hundred times as long, and its input stays
    in memory until its backward, also where activation checkpointing would have dropped it.

    Calls by code from `torch.compile` are not seen: run that under `torch.compiler.set_stance("force_eager")`.
    """
    layers = {name or type(layer).__name__: layer for layer, name in online_norm_layers(model).items()}
    diagnosis = Diagnosis(layers)
    handles = []
    try:
        for layer in layers.values():
            handles.append(layer.register_forward_pre_hook(diagnosis._before_call, with_kwargs=True))
            # First, as another hook may change the output in place, or the state.
            handles.append(layer.register_forward_hook(diagnosis._after_call, with_kwargs=True, prepend=True))
        yield diagnosis
    finally:
        diagnosis._open = False  # for calls whose backward is still to come
        diagnosis._calls.clear()  # of those that failed
        for handle in handles:
            handle.remove()


class Diagnosis:
    """What `diagnose` has seen so far: print it, take `as_dict()`, or write it `to_tensorboard`.

    Numbers are per layer and mode, over all samples seen in the context. A layer that ran in training and in eval has
    both; a frozen one counts as in eval. Planes, one channel of one sample, that are not finite are left out.
    """

    def __init__(self, layers: dict[str, OnlineNorm]) -> None:
        self._layers = layers
        self._open = True
        self._seen: dict[OnlineNorm, dict[str, Sums]] = {layer: {} for layer in layers.values()}
        self._calls: dict[OnlineNorm, tuple[Tensor, ...]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model that is being watched (deepcopy, pickle) is not watched."""
        return Diagnosis, ({},)

    # ---- the hooks

    def _before_call(self, layer: OnlineNorm, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._open or layer not in self._seen:
            return None
        x = args[0] if args else kwargs.get("x")
        if not isinstance(x, Tensor):
            return None  # the layer will say so
        # The gradient with respect to x itself may have other sources; that of a view for this layer alone has not.
        x = x.view_as(x)
        state = layer.running_mean, layer.running_var, layer.num_samples_tracked
        self._calls[layer] = x, *(t.clone() for t in state)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "x": x})

    @torch.no_grad()
    def _after_call(self, layer: OnlineNorm, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or layer not in self._calls:
            return
        x, *state = self._calls.pop(layer)
        if x.numel() == 0 or not x.is_set_to(
            args[0] if args else kwargs["x"]
        ):  # another hook has put in something else
            return
        training = layer.training and not layer.freeze_statistics
        modes, mode = self._seen[layer], "train" if training else "eval"
        if mode not in modes:
            with torch.inference_mode(False):  # or a sum that begins inside could not be continued outside
                modes[mode] = Sums(layer)
        sums = modes[mode]
        call = Call(layer, training, x.detach(), *state)
        # Activation checkpointing repeats a forward inside the backward.
        if torch._C._current_graph_task_id() == -1:
            sums.add_forward(call)
        if x.requires_grad:

            def after_backward(grad: Tensor) -> None:
                if self._open:
                    with torch.no_grad():
                        sums.add_backward(call, grad.detach())

            x.register_hook(after_backward)  # type: ignore[no-untyped-call]

    # ---- what came of it

    def as_dict(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Plain numbers by layer and mode, ready for JSON: `{"bn1": {"train": {"mean_rms": 0.01, ...}}, ...}`.

        A layer that was never called has no mode; a number that does not apply, or is not known, is None.

        Forward, of yhat, the normalised input before affine and guard; a sample weighs the same whatever its size:
            calls, samples: how many were seen.
            skipped_samples: samples with a value that is not finite.
            mean_rms, mean_worst: the channels' means: their root mean square, and the largest absolute one. Ideal 0.
            mean_by_chance: the standard error of mean_rms, were the samples independent.
            variance, variance_min, variance_max: the channels' variances: their mean and extremes. Ideal 1.
            dead_channels: channels with a variance below 0.01.
            zeta_mean, zeta_min, zeta_max: layer scaling's divisor over samples.
            clamped: the fraction of outputs that the guard "clamp" clipped.

        Backward, of x', the gradient returned for the input; x' and yhat are as long as all samples together:
            backward_samples: how many were seen; 0 if no backward ran, or the input needs no gradient.
            skipped_gradients: samples whose x' has a value that is not finite.
            cos_1, cos_1_worst: cosine of x' with 1, over channels: root mean square, and the largest absolute one.
            cos_y, cos_y_worst: the same with yhat. Exact normalisation has 0 for both; in eval
                it is not attempted.
            control_1, control_y: root mean square over channels of the control errors after the last backward.
            control_1_bound, control_y_bound: what these would be had no sample's error cancelled another's.
            overshoot: the fraction of updates of control_y, over samples and channels, that more than undo it:
                (1 - alpha_bwd) mean(yhat^2) > 1.

        And advice: a sentence for each thing that is alarming, by a word for it.
        """
        results: dict[str, dict[str, dict[str, Any]]] = {}
        for name, layer in self._layers.items():
            results[name] = {mode: sums.result() for mode, sums in self._seen[layer].items()}
            for mode, result in results[name].items():
                result["advice"] = dict(advice(layer, mode, result))
        return results

    def to_tensorboard(self, writer: Writer, step: int) -> None:
        """Write every number as `onlinenorm/<layer>/<mode>/<number>` by the writer's `add_scalar`."""
        for name, modes in self.as_dict().items():
            for mode, result in modes.items():
                for key, value in result.items():
                    if isinstance(value, int | float):
                        writer.add_scalar(f"onlinenorm/{name}/{mode}/{key}", value, step)

    def __repr__(self) -> str:
        return f"<Diagnosis of {len(self._layers)} layers, {'open' if self._open else 'closed'}>"

    def __str__(self) -> str:
        table = self.__rich__()
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=shutil.get_terminal_size((120, 24)).columns).print(table)
        return text.getvalue()

    def __rich__(self) -> "Group":
        try:
            from rich import box
            from rich.console import Group
            from rich.markup import escape
            from rich.table import Table
            from rich.text import Text
        except ImportError as error:
            raise ImportError(
                'the table needs Rich: pip install "onlinenorm[cli]"; as_dict() gives the numbers without it'
            ) from error
        table = Table(
            box=box.SIMPLE, padding=(0, 1, 0, 0), title="Online Normalization, from inside", title_justify="left"
        )
        results = self.as_dict()
        rows = [(name, mode, row) for name, modes in results.items() for mode, row in modes.items()]
        columns = {header: cell for header, cell in _COLUMNS.items() if any(cell(row) for *_, row in rows)}
        table.add_column("layer", overflow="fold")
        table.add_column("mode")
        for header in columns:
            table.add_column(header, justify="right", no_wrap=True)
        for name, modes in results.items():
            for mode, row in modes.items():
                table.add_row(escape(name), mode, *(cell(row) for cell in columns.values()))
            if not modes:
                table.add_row(escape(name), "never called")
        alarms: dict[str, list[str]] = {}
        for name, mode, row in rows:
            for kind, sentence in row["advice"].items():
                alarms.setdefault(kind, []).append(f"{name}, {mode}: {sentence}")
        notes = [first + f" So {len(more)} more." * bool(more) for first, *more in alarms.values()]
        uncalled = [name for name, modes in results.items() if not modes]
        if uncalled:
            notes.append(f"Never called: {', '.join(uncalled)}. Calls by code from torch.compile are not seen.")
        return Group(table, *map(Text, notes or ["Nothing alarming."]))


def _short(key: str) -> Any:
    return lambda row: "" if row[key] is None else f"{row[key]:.2g}"


def _of_bound(key: str) -> Any:
    return lambda row: f"{row[key] / row[f'{key}_bound']:.2g}" if row[f"{key}_bound"] else ""


def _zeta(row: dict[str, Any]) -> str:
    return "" if row["zeta_mean"] is None else f"{row['zeta_mean']:.2g} ({row['zeta_min']:.2g}-{row['zeta_max']:.2g})"


_COLUMNS: dict[str, Any] = {
    "samples": lambda row: f"{row['samples']:,}",
    "mean": _short("mean_rms"),
    "variance": _short("variance"),
    "cos 1": _short("cos_1"),
    "cos y": _short("cos_y"),
    "control 1\nof bound": _of_bound("control_1"),
    "control y\nof bound": _of_bound("control_y"),
    "zeta": _zeta,
    "clamped": lambda row: "" if row["clamped"] is None else f"{row['clamped']:.1%}",
    "skipped": lambda row: str(row["skipped_samples"]) if row["skipped_samples"] else "",
}
