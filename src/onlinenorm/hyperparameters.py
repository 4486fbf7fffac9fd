"""The layer's default hyperparameters, said once."""

from typing import Final

ALPHA_FWD = 0.999  # decay of the forward statistics: the paper's setting for ImageNet and fully connected networks
ALPHA_BWD = 0.99  # decay of the backward control process, likewise
EPS = 1e-5  # added to the streaming variance, as in BatchNorm
GUARD: Final = "layer_scaling"  # the paper's guard against exponential growth of activations
GUARD_EPS = 1e-5  # added to the second moment under layer scaling's root
WARMUP = False  # the paper's: full weight on the decay from the first sample on
CLAMP_VALUE = 5.0  # the bound of the guard "clamp"
