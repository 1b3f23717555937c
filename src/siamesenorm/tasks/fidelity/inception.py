"""The Inception-v3 that FID is defined by: the network of 2015-12-05, with its pooling, in PyTorch.

Layers and their names are torchvision's ``inception_v3``, so that the published port of the weights loads as it is.
Three things differ from it, as they do in the TensorFlow graph: average pools do not count the padding, the last
block has a max pool in its pool branch, and there are 1008 classes. Images are resized and scaled as in that graph:
bilinear with corners at the origin and no antialiasing, then ``(x - 128) / 128``. (pytorch-fid resizes with half-pixel
centres and scales by 127.5; its figures differ a little from those of the graph.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.tasks.fidelity.features import Features

SIZE = 299
CLASSES = 1008
SPATIAL_CHANNELS = 7


class Convolution(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, size: int | tuple[int, int], stride: int = 1, same: bool = True):
        super().__init__()
        height, width = (size, size) if isinstance(size, int) else size
        padding = (height // 2, width // 2) if same else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return F.relu(self.bn(self.conv(x)), inplace=True)


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


class BlockA(nn.Module):
    """35 × 35: 1×1, 5×5, twice 3×3, pool."""

    def __init__(self, inputs: int, pool: int):
        super().__init__()
        self.branch1x1 = Convolution(inputs, 64, 1)
        self.branch5x5_1 = Convolution(inputs, 48, 1)
        self.branch5x5_2 = Convolution(48, 64, 5)
        self.branch3x3dbl_1 = Convolution(inputs, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3)
        self.branch3x3dbl_3 = Convolution(96, 96, 3)
        self.branch_pool = Convolution(inputs, pool, 1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        pooled = self.branch_pool(_average(x))
        return torch.cat([self.branch1x1(x), self.branch5x5_2(self.branch5x5_1(x)), double, pooled], 1)


class BlockB(nn.Module):
    """35 × 35 to 17 × 17."""

    def __init__(self, inputs: int):
        super().__init__()
        self.branch3x3 = Convolution(inputs, 384, 3, stride=2, same=False)
        self.branch3x3dbl_1 = Convolution(inputs, 64, 1)
        self.branch3x3dbl_2 = Convolution(64, 96, 3)
        self.branch3x3dbl_3 = Convolution(96, 96, 3, stride=2, same=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        double = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), double, F.max_pool2d(x, 3, stride=2)], 1)


class BlockC(nn.Module):
    """17 × 17: 1×1, 7×7 and twice 7×7 in rows and columns, pool."""

    def __init__(self, width: int):
        super().__init__()
        row, column = (1, 7), (7, 1)
        self.branch1x1 = Convolution(768, 192, 1)
        self.branch7x7_1 = Convolution(768, width, 1)
        self.branch7x7_2 = Convolution(width, width, row)
        self.branch7x7_3 = Convolution(width, 192, column)
        self.branch7x7dbl_1 = Convolution(768, width, 1)
        self.branch7x7dbl_2 = Convolution(width, width, column)
        self.branch7x7dbl_3 = Convolution(width, width, row)
        self.branch7x7dbl_4 = Convolution(width, width, column)
        self.branch7x7dbl_5 = Convolution(width, 192, row)
        self.branch_pool = Convolution(768, 192, 1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        single = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        double = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        double = self.branch7x7dbl_5(self.branch7x7dbl_4(double))
        return torch.cat([self.branch1x1(x), single, double, self.branch_pool(_average(x))], 1)


class BlockD(nn.Module):
    """17 × 17 to 8 × 8."""

    def __init__(self) -> None:
        super().__init__()
        self.branch3x3_1 = Convolution(768, 192, 1)
        self.branch3x3_2 = Convolution(192, 320, 3, stride=2, same=False)
        self.branch7x7x3_1 = Convolution(768, 192, 1)
        self.branch7x7x3_2 = Convolution(192, 192, (1, 7))
        self.branch7x7x3_3 = Convolution(192, 192, (7, 1))
        self.branch7x7x3_4 = Convolution(192, 192, 3, stride=2, same=False)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        long = self.branch7x7x3_4(self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x))))
        return torch.cat([self.branch3x3_2(self.branch3x3_1(x)), long, F.max_pool2d(x, 3, stride=2)], 1)


class BlockE(nn.Module):
    """8 × 8: 1×1, and 3×3 split into a row and a column; the last block pools by maximum."""

    def __init__(self, inputs: int, max_pool: bool):
        super().__init__()
        self.max_pool = max_pool
        self.branch1x1 = Convolution(inputs, 320, 1)
        self.branch3x3_1 = Convolution(inputs, 384, 1)
        self.branch3x3_2a = Convolution(384, 384, (1, 3))
        self.branch3x3_2b = Convolution(384, 384, (3, 1))
        self.branch3x3dbl_1 = Convolution(inputs, 448, 1)
        self.branch3x3dbl_2 = Convolution(448, 384, 3)
        self.branch3x3dbl_3a = Convolution(384, 384, (1, 3))
        self.branch3x3dbl_3b = Convolution(384, 384, (3, 1))
        self.branch_pool = Convolution(inputs, 192, 1)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        single = self.branch3x3_1(x)
        double = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        pooled = F.max_pool2d(x, 3, stride=1, padding=1) if self.max_pool else _average(x)
        branches = (
            self.branch1x1(x),
            self.branch3x3_2a(single),
            self.branch3x3_2b(single),
            self.branch3x3dbl_3a(double),
            self.branch3x3dbl_3b(double),
            self.branch_pool(pooled),
        )
        return torch.cat(branches, 1)


class FIDInception(nn.Module):
    """``FIDInception()(images)`` with images of any size as uint8 or float 0…255, (images, 3, height, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = Convolution(3, 32, 3, stride=2, same=False)
        self.Conv2d_2a_3x3 = Convolution(32, 32, 3, same=False)
        self.Conv2d_2b_3x3 = Convolution(32, 64, 3)
        self.Conv2d_3b_1x1 = Convolution(64, 80, 1)
        self.Conv2d_4a_3x3 = Convolution(80, 192, 3, same=False)
        self.Mixed_5b, self.Mixed_5c, self.Mixed_5d = BlockA(192, 32), BlockA(256, 64), BlockA(288, 64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b, self.Mixed_6c, self.Mixed_6d, self.Mixed_6e = map(BlockC, (128, 160, 160, 192))
        self.Mixed_7a = BlockD()
        self.Mixed_7b, self.Mixed_7c = BlockE(1280, max_pool=False), BlockE(2048, max_pool=True)
        self.fc = nn.Linear(2048, CLASSES)
        self.eval()

    def forward(self, images: Tensor) -> Features:  # noqa: D102
        x = (resize(images.to(self.fc.weight.dtype)) - 128) / 128
        x = F.max_pool2d(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))), 3, stride=2)
        x = F.max_pool2d(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)), 3, stride=2)
        x = self.Mixed_6a(self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x))))
        x = self.Mixed_6c(self.Mixed_6b(x))
        x = self.Mixed_6d(x)
        # mixed_6/conv is the first branch of Mixed_6d; channels come last, as in the graph and in ADM's statistics.
        spatial = x[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(self.Mixed_6e(x))))
        pool = x.mean((2, 3))
        logits = F.linear(pool, self.fc.weight)  # Inception scores are taken without the bias
        return Features(pool, spatial, logits)


def resize(images: Tensor, size: int = SIZE) -> Tensor:
    """Bilinear as TensorFlow 1 does it: output pixel i looks at ``i · (length / size)`` of the input."""
    rows, columns = (_bilinear(length, size).to(images) for length in images.shape[-2:])
    return rows @ images @ columns.T


def _bilinear(length: int, size: int) -> Tensor:
    """(size, length) weights of the two neighbours of every output pixel."""
    place = torch.arange(size, dtype=torch.float32) * (length / size)
    low = place.floor().long().clamp(max=length - 1)
    share = (place - low).unsqueeze(1)
    high = (low + 1).clamp(max=length - 1)
    return F.one_hot(low, length) * (1 - share) + F.one_hot(high, length) * share
