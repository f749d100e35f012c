"""The sizes that images are brought to: one square, or a ladder of aspect ratios, at one or several resolutions."""

import math
from dataclasses import dataclass

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.decode import Size
from ds_flux.data.schedule import SampleKey
from ds_flux.randomness import uniform

RATIOS = (1.0, 5 / 4, 4 / 3, 3 / 2, 16 / 9, 2.0)  # width to height, and the other way round: eleven


@dataclass(frozen=True)
class Buckets:
    """The buckets of each resolution."""

    by_resolution: dict[int, tuple[Size, ...]]

    @property
    def is_one(self) -> bool:
        """Whether all images get the same size."""
        return [len(sizes) for sizes in self.by_resolution.values()] == [1]

    def of(self, size: Size, key: SampleKey, seed: int) -> Size:
        """The bucket of an image of this size at this visit: the nearest in aspect ratio.

        Of several resolutions one that the image is large enough for (else the smallest), drawn anew for each visit.
        """
        enough = [r for r in sorted(self.by_resolution) if r * r <= size[0] * size[1]] or [min(self.by_resolution)]
        drawn = int(uniform(seed, key, "resolution")[0] * len(enough)) if len(enough) > 1 else 0
        return min(
            self.by_resolution[enough[drawn]], key=lambda bucket: abs(math.log(bucket[0] * size[1] / bucket[1] / size[0]))
        )


def make_buckets(config: DataConfig, grid: int) -> Buckets:
    """The buckets that the data flags ask for, in whole tokens of `grid` pixels.

    Raises:
        UserError: a size of --aspect_ratio_buckets is none, or not a multiple of `grid`.
    """
    if config.aspect_ratio_buckets is not None:
        return Buckets({0: tuple(parse_size(text, grid) for text in config.aspect_ratio_buckets.split(";"))})
    if config.use_aspect_ratio_buckets:
        return Buckets({resolution: ladder(resolution, grid) for resolution in config.resolutions})
    return Buckets({resolution: ((resolution, resolution),) for resolution in config.resolutions})


def ladder(resolution: int, grid: int) -> tuple[Size, ...]:
    """Sizes of many aspect ratios that are at most as large as a square of this side."""
    ratios = sorted({ratio for one in RATIOS for ratio in (one, 1 / one)})
    sides = [(resolution * math.sqrt(ratio), resolution / math.sqrt(ratio)) for ratio in ratios]
    whole = [tuple(max(grid, int(side / grid + 1e-6) * grid) for side in pair) for pair in sides]
    return tuple(dict.fromkeys(whole))  # type: ignore[arg-type]


def parse_size(text: str, grid: int) -> Size:
    """ "height,width", as diffusers' scripts write a bucket -> (width, height)."""
    try:
        height, width = (int(side) for side in text.split(","))
    except ValueError:
        raise UserError(f"--aspect_ratio_buckets {text}: expected height,width;height,width;...") from None
    if height < grid or width < grid or height % grid or width % grid:
        raise UserError(f"--aspect_ratio_buckets {text}: both must be multiples of {grid}")
    return width, height
