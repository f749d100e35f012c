"""`ds-flux doctor --data`: every image and caption of a run's data, tried as training would.  Needs no model."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from tqdm import tqdm

from ds_flux.config import Config, DataConfig
from ds_flux.data.captions import texts_of
from ds_flux.data.decode import BadSample
from ds_flux.data.images import in_one_line, upright
from ds_flux.data.skipped import Bad
from ds_flux.data.sources import Source, open_source
from ds_flux.data.stream import StreamedRow, open_stream

NUM_SHOWN = 20
SAMPLES_AT_ONCE = 256


@dataclass(frozen=True)
class DataReport:
    """What was found."""

    num_samples: int
    num_references: int
    sizes: Counter[tuple[int, int]]
    bad: list[Bad]


def check_data(config: DataConfig) -> DataReport:
    """Decode every image and reference, read every caption.

    Raises:
        UserError: there is no such data.
    """
    samples, total = every_sample(config)
    sizes: Counter[tuple[int, int]] = Counter()
    bad: list[Bad] = []
    num_references = 0
    with (
        ThreadPoolExecutor(max(1, config.dataloader_num_workers)) as pool,
        tqdm(total=total, desc="look at the data") as bar,
    ):
        while some := list(islice(samples, SAMPLES_AT_ONCE)):
            for (source, index), found in zip(some, pool.map(lambda sample: look(sample[0], config, sample[1]), some)):
                bar.update()
                if isinstance(found, str):
                    bad.append(Bad(index, source.name(index), found))
                else:
                    sizes[found[0]] += 1
                    num_references += len(found) - 1
    return DataReport(sum(sizes.values()) + len(bad), num_references, sizes, bad)


def every_sample(config: DataConfig) -> tuple[Iterator[tuple[Source | StreamedRow, int]], int | None]:
    """What can be asked for a sample, and the sample's number there; and how many there are, if that is known."""
    if config.streaming:
        return ((row, 0) for row in open_stream(config, 0, ()).once()), None
    source = open_source(config)
    return ((source, index) for index in range(len(source))), len(source)


def look(source: Source | StreamedRow, config: DataConfig, index: int) -> list[tuple[int, int]] | str:
    """Sizes of the image and the references of a row, or what is wrong with it."""
    try:
        texts_of(source.caption(index))
        return [upright(image, config).size for image in (*source.images(index), *source.references(index))]
    except (BadSample, OSError, ValueError) as error:
        return in_one_line(error)


def report_of(config: Config) -> tuple[str, bool]:
    """In words, and whether a run would accept it."""
    found = check_data(config.data)
    allowed = 0.0 if config.data.on_bad_sample == "error" else config.data.max_bad_fraction
    is_fine = len(found.bad) <= allowed * found.num_samples
    lines = [f"{found.num_samples} samples, {found.num_references} references, {len(found.bad)} that cannot be used"]
    lines += [f"  {bad}" for bad in found.bad[:NUM_SHOWN]]
    lines += [f"  ... and {len(found.bad) - NUM_SHOWN} more"] if len(found.bad) > NUM_SHOWN else []
    lines += [f"{count:8} x {width}x{height}" for (width, height), count in found.sizes.most_common(NUM_SHOWN)]
    verdict = "a run would leave these out" if found.bad else "all of it can be used"
    lines.append(verdict if is_fine else "too many: mend or remove them, or raise --max_bad_fraction")
    return "\n".join(lines), is_fine
