"""White shapes on black and a mask for each: the paper's synthetic segmentation task, made on the spot.

Every image holds one each of six shapes, which may overlap: square, filled circle, triangle, ring, mesh
square (every second pixel of every second row; its mask is the filled square) and plus. Centres are uniform
over the middle 80 % of the image, extents uniform in 6 to 12 % of its side, times the shape's own factor.
"""

import torch
from torch import Tensor

CLASSES = ("square", "filled circle", "triangle", "ring", "mesh square", "plus")
AT_ONCE = 100  # images; what drawing holds meanwhile is several times their size
EXTENTS = (0.8, 0.5, 1.0, 0.7, 1.0, 1.2)  # relative: side, radius, leg, radius, side, length of the bars


def make_shapes(count: int, size: int, seed: int, zoom: float = 1.0) -> tuple[Tensor, Tensor]:
    """Draw images and their masks; the same arguments give the same images.

    Args:
        count: how many images.
        size: side of an image in pixels (the paper: 192).
        seed: of the random positions and extents.
        zoom: makes every shape this much larger within the image (the paper: 1).

    Returns:
        Images, float32 (count, 1, size, size), 0 or 1, and masks, bool (count, 6, size, size), as `CLASSES`.
    """
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(3, count, len(CLASSES), 1, 1, generator=generator)
    drawn = [_draw(part, size, zoom) for part in torch.split(uniform, AT_ONCE, dim=1)]
    images, masks = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return images.float(), masks


def _draw(uniform: Tensor, size: int, zoom: float) -> tuple[Tensor, Tensor]:
    """Images and masks, both bool; `uniform` (3, N, 6, 1, 1) places the shapes, two numbers, and sizes them, one."""
    centre = (size * (0.1 + 0.8 * uniform[:2])).floor()
    extent = size * (0.06 + 0.06 * uniform[2]) * zoom * torch.tensor(EXTENTS).view(-1, 1, 1)

    pixel = torch.arange(size)
    down = pixel.view(-1, 1) - centre[0]  # (count, 6, size, 1): rows below the centre
    right = pixel.view(1, -1) - centre[1]  # (count, 6, 1, size): columns right of the centre
    odd = (pixel.view(-1, 1) % 2 == 1) & (pixel.view(1, -1) % 2 == 1)

    def of(shape: str) -> tuple[Tensor, Tensor, Tensor]:
        i = CLASSES.index(shape)
        return down[:, i], right[:, i], extent[:, i]

    def square(y: Tensor, x: Tensor, side: Tensor) -> Tensor:
        return (y.abs() < side / 2) & (x.abs() < side / 2)

    def disc(y: Tensor, x: Tensor, radius: Tensor) -> Tensor:
        return y**2 + x**2 < radius**2

    def triangle(y: Tensor, x: Tensor, leg: Tensor) -> Tensor:
        return square(y, x, leg) & (x <= y)

    def ring(y: Tensor, x: Tensor, radius: Tensor) -> Tensor:
        return disc(y, x, radius) & ~disc(y, x, 0.7 * radius)

    def plus(y: Tensor, x: Tensor, length: Tensor) -> Tensor:
        bar = (x >= -1) & (x < 1) & (y.abs() < length / 2)
        return bar | ((y >= -1) & (y < 1) & (x.abs() < length / 2))

    draw = (square, disc, triangle, ring, square, plus)
    masks = torch.stack([f(*of(shape)) for f, shape in zip(draw, CLASSES, strict=True)], dim=1)
    visible = masks.clone()
    visible[:, CLASSES.index("mesh square")] &= odd
    return visible.any(dim=1, keepdim=True), masks
