"""Online Normalization: normalise by streaming statistics, one sample at a time.

Chiley et al., "Online Normalization for Training Neural Networks", NeurIPS 2019. The layers live in one module
for each framework (`onlinenorm.torch`); `onlinenorm.reference` is the paper in NumPy.
"""

from importlib.metadata import version

__version__ = version("onlinenorm")
