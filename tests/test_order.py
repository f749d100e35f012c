"""What a run sees does not depend on how it is run: processes, workers, cached or not, a table or a stream."""

from collections import Counter
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import pytest
from torch import Tensor

from ds_flux.config import DataConfig, FlowConfig
from ds_flux.data.cache import LatentCache
from ds_flux.data.images import Batches, SampleDataset
from ds_flux.data.schedule import Schedule
from ds_flux.data.sources import open_source
from ds_flux.data.store import Store
from ds_flux.data.stream import StreamSchedule, open_stream
from ds_flux.families.flux1 import FLUX1
from ds_flux.objective import Objective
from tests.pairs import dataset_of, rules_of
from tests.tars import write_shards

SEED, BATCH, NUM_STEPS, NUM_SAMPLES = 5, 8, 7, 24  # two epochs, and a third of one
OBJECTIVE = Objective(FLUX1, FlowConfig(weighting_scheme="logit_normal"), SEED, lambda _: 0.0, None, False)
FLAGS = dict(
    image_column="jpg", caption_column="txt", resolution=16, random_flip=True, proportion_empty_prompts=0.2,
    caption_prefix="x", shuffle_tags=True,
)  # fmt: skip
Seen = list[Counter[tuple]]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four archives of six rows."""
    return write_shards(tmp_path_factory.mktemp("shards"), 4, NUM_SAMPLES // 4)


def digest(tensor: Tensor) -> str:
    """Of pixels or latents: of which crop they are, and how flipped."""
    return blake2b(tensor.contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def seen(samples: SampleDataset, num_ranks: int, accumulation: int) -> Seen:
    """Of each global batch all (sample, visit, prompts, image, sigma)."""
    plan = dict(seed=SEED, gradient_accumulation_steps=accumulation, dp_size=num_ranks)
    plan["micro_batch_size"] = BATCH // num_ranks // accumulation
    steps: Seen = [Counter() for _ in range(NUM_STEPS)]
    for rank in range(num_ranks):
        if samples.config.streaming:
            schedule = StreamSchedule(**plan, dp_rank=rank, stream=samples.source)
        else:
            schedule = Schedule(**plan, dp_rank=rank, num_samples=NUM_SAMPLES)
        for number, raw in enumerate(Batches(samples, schedule.micro_batches(0, NUM_STEPS))):
            sigma, _ = OBJECTIVE.draw(raw.keys, raw.images[0])
            prompts = zip(*raw.prompts.values(), strict=True)
            of_batch = zip(raw.keys, prompts, map(digest, raw.images[0]), sigma.tolist(), strict=True)
            steps[number // accumulation].update(of_batch)
    return steps


def cached(samples: SampleDataset, folder: Path) -> SampleDataset:
    """With the pixels of the first visit in the place of latents: any tensor of the sample's own."""
    store = Store(folder)
    with store.writer("test", shard_bytes=20_000) as writer:
        for sample in range(NUM_SAMPLES):
            LatentCache(store).write(writer, (sample, 0), "", list(samples.pixels((sample, 0))), None, None)
    store.refresh()
    return replace(samples, cache=LatentCache(store))


def samples_of(kind: str, shards: str, num_workers: int, folder: Path) -> SampleDataset:
    """The data set as it is read live, from a cache, or as a stream."""
    config = DataConfig(**FLAGS, data_files=shards, dataloader_num_workers=num_workers, streaming=kind == "stream")
    if kind == "stream":
        stream = open_stream(replace(config, shuffle_buffer=8), SEED, ())
        return SampleDataset(stream, config, SEED, rules_of(config, 16), lambda _: ((16, 16),))
    samples = dataset_of(config, SEED, 16)
    return cached(samples, folder) if kind == "cached" else samples


@pytest.mark.parametrize("kind", ["live", "cached", "stream"])
def test_the_same_global_batches(shards: str, tmp_path: Path, kind: str) -> None:
    expected = seen(samples_of(kind, shards, 0, tmp_path / "one"), 1, 1)
    assert sum(map(len, expected)) == NUM_STEPS * BATCH, "no two are alike"
    for num_workers in (0, 2):
        samples = samples_of(kind, shards, num_workers, tmp_path / str(num_workers))
        for num_ranks, accumulation in ((1, 2), (2, 1), (2, 2), (4, 1)):
            assert seen(samples, num_ranks, accumulation) == expected, (num_workers, num_ranks, accumulation)


def test_cached_and_live_differ_in_the_crop_of_later_visits_alone(shards: str, tmp_path: Path) -> None:
    live, stored = (seen(samples_of(kind, shards, 0, tmp_path), 1, 1) for kind in ("live", "cached"))
    without_image = [
        [Counter((key, prompts, sigma) for key, prompts, _, sigma in step) for step in run] for run in (live, stored)
    ]
    assert without_image[0] == without_image[1]
    first_visits = [{row for step in run for row in step if row[0][1] == 0} for run in (live, stored)]
    assert first_visits[0] == first_visits[1] and len(first_visits[0]) == NUM_SAMPLES
    assert live != stored


def test_an_epoch_has_each_sample_once(shards: str, tmp_path: Path) -> None:
    for kind in ("live", "stream"):
        rows = [row for step in seen(samples_of(kind, shards, 0, tmp_path), 1, 1)[:6] for row in step]
        visits = Counter(visit for (_, visit), *_ in rows)
        assert visits == {0: NUM_SAMPLES, 1: NUM_SAMPLES}
        assert len({key for key, *_ in rows}) == 2 * NUM_SAMPLES


def test_a_mixture_by_weight_in_a_table(shards: str, tmp_path: Path) -> None:
    """Three of four samples from the smaller data set, which has epochs of its own meanwhile."""
    few, many = write_shards(tmp_path / "few", 1, 4), shards
    source = open_source(DataConfig(**FLAGS, dataset_name=[str(Path(few).parent), str(Path(many).parent)]))
    assert source.sizes == [4, NUM_SAMPLES]
    plan = dict(seed=SEED, micro_batch_size=4, gradient_accumulation_steps=1, dp_size=1, dp_rank=0)
    batches = Schedule(**plan, num_samples=len(source), sizes=tuple(source.sizes), weights=(3.0, 1.0)).micro_batches(0, 16)
    keys = [key for batch in batches for key in batch]
    for num in (8, 16, 64):
        assert abs(sum(sample < 4 for sample, _ in keys[:num]) - num * 3 / 4) <= 1
    assert len(set(keys)) == 64 and {visit for sample, visit in keys if sample < 4} == set(range(12))
    assert {sample for sample, visit in keys if sample >= 4 and visit == 0} <= set(range(4, 28))
    assert source.name(0).startswith("shard-000.tar") and source.caption(27) == "a handwritten three"
