"""What clusters do to a run: losses that are not finite, signals, requests by file, ranks that fail alone."""

from pathlib import Path

import pytest
import torch

from ds_flux.data.cache import LatentCache
from ds_flux.data.store import Store
from tests.conftest import Assets
from tests.distributed import launch, metrics, run_jobs

STAGES = {"0": (0, False), "1": (1, False), "2": (2, True), "3": (3, False), "3 offload": (3, True)}
BAD = 5  # the sample whose latents are not finite


@pytest.fixture(scope="module")
def poisoned(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which the latents of one image are not finite, and runs at every stage that meet it on one of two ranks."""
    folder = tmp_path_factory.mktemp("poisoned")
    own = dict(cache_latents="true", cache_dir=folder / "cache", center_crop="true", random_flip=None, train_batch_size=4)
    fills = [{"max_train_steps": 1, "mixed_precision": precision} for precision in ("no", "bf16")]
    run_jobs(1, [assets.flags(folder / f"fill {number}", **{**own, **fill}) for number, fill in enumerate(fills)], folder)
    poison(folder / "cache", [BAD])
    runs = {name: assets.ds_config(stage, offload) for name, (stage, offload) in STAGES.items()}
    jobs = [assets.flags(folder / name, **own, deepspeed_config=path) for name, path in runs.items()]
    run_jobs(2, [*jobs, assets.flags(folder / "bf16", **{**own, "mixed_precision": "bf16"})], folder)
    return folder


def poison(cache: Path, samples: list[int]) -> None:
    """Newer records of samples, with the fingerprints that they have, which are not finite."""
    for folder in cache.glob("latents-*"):
        store = Store(folder)
        with store.writer("poison") as writer:
            for sample in samples:
                nan = torch.full_like(LatentCache(store).read((sample, 0))[0][0], torch.nan)
                LatentCache(store).write(writer, (sample, 0), store.fingerprint(str(sample)), [nan], None, None)


@pytest.mark.parametrize("name", [*STAGES, "bf16"])
def test_a_step_that_is_not_finite_is_not_taken(poisoned: Path, name: str) -> None:
    """Twice in two epochs; the others go on with the weights and the learning rate they would have had."""
    rows = metrics(poisoned / name)
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert len(rows) == 6 and len(skipped) == 2 and skipped[0] <= 3 < skipped[1]
    assert [row["loss"] for row in rows if row["skipped"]] == [None, None]
    assert [row["lr"] for row in rows if row["step"] == skipped[0] + 1] == [rows[skipped[0] - 1]["lr"]]
    if name != "bf16":
        for key in ("loss", "grad_norm"):
            expected = [row[key] for row in metrics(poisoned / "0") if not row["skipped"]]
            assert [row[key] for row in rows if not row["skipped"]] == pytest.approx(expected, rel=2e-5), key


def test_steps_that_are_never_finite_end_the_run(poisoned: Path, assets: Assets, tmp_path: Path) -> None:
    own = dict(cache_latents="true", cache_dir=poisoned / "cache", center_crop="true", random_flip=None, max_skipped_steps=2)
    poison(poisoned / "cache", list(range(24)))
    done = launch(2, "ds_flux", "train", *assets.flags(tmp_path / "run", **own))
    lines = [line for line in done.stderr.splitlines() if line.startswith("ds-flux:")]
    assert any("step 1 was not taken: the loss is nan (not finite for row" in line and "and 3 more" in line for line in lines)
    assert (
        "ds-flux: error: 2 steps in a row were not finite (--max_skipped_steps): the weights are those of step 0" in lines[-1]
    )
    assert len(metrics(tmp_path / "run")) == 2
