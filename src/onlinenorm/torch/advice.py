"""What `diagnose` says about its numbers: where they are alarming, and what to do."""

import math
from collections.abc import Iterator
from typing import Any

from onlinenorm.torch.layers import OnlineNorm

# What counts as alarming. Where a cause is named, the advice says which setting answers it.
FEW = 30  # samples: of fewer nothing is concluded. A mean of 30 normal scalars is off by 0.18 by chance alone.
OFF_CENTRE = 0.25  # standard deviations: a ReLU then passes 60 % or 40 % of a normal input in place of a half
SHORT = 5  # samples: the horizon at which normal scalars come out with a variance of 1.55, with nothing else wrong
VARIANCE_OFF = 1.5  # a factor, either way: the activations are then too large or too small by more than a fifth
COSINE = 0.1  # a hundredth of the gradient's squared length lies where exact normalisation leaves none
OVERSHOOT = 0.01  # of all updates of control_y; the paper's bound on it assumes that there are none
OUTLIER = 10  # times the mean zeta: layer scaling then makes all but a few values of that sample vanish
CLAMPED = 0.01  # of all outputs; of a normal stream a share of 6e-7 lies beyond the default of 5


def advice(layer: OnlineNorm, mode: str, result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is alarming in a layer's numbers, as `Diagnosis.as_dict` explains them: a word for it, and a sentence."""
    forward, backward = 1 / (1 - layer.alpha_fwd), 1 / (1 - layer.alpha_bwd)
    seen_before = max(0, int(layer.num_samples_tracked) - result["samples"])
    if result["skipped_samples"]:
        yield (
            "skipped_samples",
            f"{result['skipped_samples']} samples were not finite on arrival. Look at the data and the layers before.",
        )
    if result["skipped_gradients"]:
        yield (
            "skipped_gradients",
            f"{result['skipped_gradients']} samples had gradients that are not finite. Now and then that is how a loss "
            "scale finds its level; otherwise lower the learning rate or clip.",
        )
    if result["samples"] >= FEW and result["mean_rms"] is not None:
        off = math.sqrt(max(0.0, result["mean_rms"] ** 2 - result["mean_by_chance"] ** 2))
        variance = result["variance"]
        if off > OFF_CENTRE or not 1 / VARIANCE_OFF < variance < VARIANCE_OFF:
            what = f"the outputs are {off:.2g} standard deviations off centre, with a variance of {variance:.2g}"
            if mode == "eval":
                yield "off_centre", f"{what}: these data differ from those that the statistics were taken from."
            elif seen_before < 3 * forward:
                yield (
                    "warm_up",
                    f"{what}: the statistics average over some {forward:.0f} samples and had seen {seen_before} when "
                    "this began. Look again later, or lower alpha_fwd.",
                )
            elif off <= OFF_CENTRE and variance > 1 and forward < SHORT + 0.5:
                yield (
                    "short",
                    f"{what}: statistics over some {forward:.0f} samples follow each single one. Raise alpha_fwd.",
                )
            else:
                yield (
                    "off_centre",
                    f"{what}: the input moves faster than statistics over some {forward:.0f} samples. Lower alpha_fwd "
                    "or the learning rate.",
                )
        if result["dead_channels"]:
            yield (
                "dead_channels",
                f"{result['dead_channels']} of {layer.num_features} channels hardly vary. Nothing may reach them: look "
                "at the layer before.",
            )
    if result["zeta_max"] is not None and result["zeta_max"] > OUTLIER * result["zeta_mean"]:
        yield (
            "zeta",
            f"one sample was divided by zeta = {result['zeta_max']:.2g}, the average is {result['zeta_mean']:.2g}: an "
            'outlier. Look at the data; guard="clamp" would bound such values and spare the rest of the sample.',
        )
    if result["clamped"] is not None and result["clamped"] > CLAMPED:
        yield (
            "clamped",
            f"{result['clamped']:.1%} of the outputs are clamped and return no gradient. Raise clamp_value, or keep "
            "the affine parameters small by weight decay.",
        )
    if result["overshoot"] is not None and result["overshoot"] > OVERSHOOT:
        yield (
            "overshoot",
            f"{result['overshoot']:.1%} of the updates of control_y overshoot: a control over some {backward:.0f} "
            "samples is too quick for samples this uneven. Raise alpha_bwd.",
        )
    if mode == "train" and seen_before >= 3 * backward and result["backward_samples"] >= max(FEW, 3 * backward):
        for direction in ("1", "y"):
            cosine = result[f"cos_{direction}"]
            if cosine is not None and cosine > COSINE:
                yield (
                    f"cos_{direction}",
                    f"the gradient's cosine with {direction} is {cosine:.2g}: it changes faster than a control over "
                    f"some {backward:.0f} samples. Lower alpha_bwd or the learning rate. After a change of loss scale "
                    "the control errors are in the old unit for a while, see follow_scaler.",
                )
