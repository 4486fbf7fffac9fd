"""What `diagnose` says about its numbers: where they are alarming, and what to do."""

import math
from collections.abc import Iterator
from typing import Any

from onlinenorm.torch.layers import OnlineNorm

# What counts as alarming. Where a cause is named, the advice says which setting answers it.
FEW = 30  # samples: of fewer nothing is concluded. A mean of 30 normal scalars is off by 0.18 by chance alone.
OFF_CENTRE = 0.25  # standard deviations: a ReLU then passes 60 % or 40 % of a normal input in place of a half
VARIANCE_OFF = 1.5  # a factor, either way: the activations are then too large or too small by more than a fifth
COSINE = 0.1  # a hundredth of the gradient's squared length lies where exact normalisation leaves none
OVERSHOOT = 0.01  # of all updates of control_y; the paper's bound on it assumes that there are none
OUTLIER = 10  # times the mean zeta: layer scaling then makes all but a few values of that sample vanish
CLAMPED = 0.01  # of all outputs; of a normal stream a share of 6e-7 lies beyond the default of 5


def advice(layer: OnlineNorm, mode: str, result: dict[str, Any]) -> Iterator[str]:
    """Sentences about what is alarming in a layer's numbers, as `Diagnosis.as_dict` explains them."""
    forward, backward = 1 / (1 - layer.alpha_fwd), 1 / (1 - layer.alpha_bwd)
    tracked = int(layer.num_samples_tracked)
    if result["skipped_samples"]:
        yield f"{result['skipped_samples']} samples were not finite on arrival. Look at the data and the layers before."
    if result["skipped_gradients"]:
        yield (
            f"{result['skipped_gradients']} samples had gradients that are not finite. Now and then that is how a loss "
            "scale finds its level; otherwise lower the learning rate or clip."
        )
    if result["samples"] >= FEW and result["mean_rms"] is not None:
        off = math.sqrt(max(0.0, result["mean_rms"] ** 2 - result["mean_by_chance"] ** 2))
        variance = result["variance"]
        if forward < 20 and variance > VARIANCE_OFF:
            yield (
                f"the outputs' variance is {variance:.2g}: statistics over some {forward:.0f} samples follow each one. "
                "Raise alpha_fwd."
            )
        elif off > OFF_CENTRE or not 1 / VARIANCE_OFF < variance < VARIANCE_OFF:
            what = f"the outputs are {off:.2g} standard deviations off centre, with a variance of {variance:.2g}"
            if tracked < 3 * forward:
                yield (
                    f"{what}: {tracked} samples have passed and the statistics average over some {forward:.0f}. Wait, "
                    "or lower alpha_fwd."
                )
            elif mode == "eval":
                yield f"{what}: these data differ from those that the statistics were taken from."
            else:
                yield (
                    f"{what}: the input moves faster than statistics over some {forward:.0f} samples. Lower alpha_fwd "
                    "or the learning rate."
                )
        if result["dead_channels"]:
            yield (
                f"{result['dead_channels']} of {layer.num_features} channels hardly vary. Nothing may reach them: look "
                "at the layer before."
            )
    if result["zeta_max"] is not None and result["zeta_max"] > OUTLIER * result["zeta_mean"]:
        yield (
            f"one sample was divided by zeta = {result['zeta_max']:.2g}, the average is {result['zeta_mean']:.2g}: an "
            'outlier. Look at the data; guard="clamp" would bound such values and spare the rest of the sample.'
        )
    if result["clamped"] is not None and result["clamped"] > CLAMPED:
        yield (
            f"{result['clamped']:.1%} of the outputs are clamped and return no gradient. Raise clamp_value, or keep "
            "the affine parameters small by weight decay."
        )
    if result["overshoot"] is not None and result["overshoot"] > OVERSHOOT:
        yield (
            f"{result['overshoot']:.1%} of the updates of control_y overshoot: a control over some {backward:.0f} "
            "samples is too quick for samples this uneven. Raise alpha_bwd."
        )
    if mode == "train" and result["backward_samples"] >= max(FEW, 3 * backward):
        for direction, cosine in (("1", result["cos_1"]), ("y", result["cos_y"])):
            if cosine is not None and cosine > COSINE:
                yield (
                    f"the gradient's cosine with {direction} is {cosine:.2g}: it changes faster than a control over "
                    f"some {backward:.0f} samples. Lower alpha_bwd or the learning rate. After a change of loss scale "
                    "the control errors are in the old unit for a while."
                )
