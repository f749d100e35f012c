"""What is left of a precompute that ended early, killed or on a full disk, is complete and used by the next one."""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image

from ds_flux.data.store import Store
from tests.conftest import Assets, Done
from tests.distributed import ROOT, environment, launch, launch_command
from tests.test_errors import RunMain, one_line

NUM_IMAGES, RESOLUTION = 72, 256  # of two ranks one encodes 32, then 8, and the other 32
SHARD_BYTES = 256 << 10  # four of them

pytestmark = pytest.mark.timeout(600)  # several launches of two ranks


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for number in range(NUM_IMAGES):
        Image.effect_noise((RESOLUTION, RESOLUTION), 10 + number).save(folder / f"{number:02d}.png")
    return folder


def flags_of(assets: Assets, images: Path, cache: Path) -> list[str]:
    """Of a run that caches everything."""
    data = dict(dataset_name=None, caption_column=None, instance_data_dir=images, instance_prompt="a handwritten six")
    return assets.flags(cache.parent / "run", **data, cache_dir=cache, resolution=RESOLUTION, train_batch_size=1)


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen]:
    """A command with all its processes, which are killed (SIGKILL) at the end of the block."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for one in everyone:
                one.kill()
            psutil.wait_procs(everyone)


def wait_for(folder: Path, pattern: str, process: subprocess.Popen) -> None:
    """Until there is such a file."""
    deadline = time.monotonic() + 120
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def store_in(cache: Path, kind: str) -> Store:
    return Store(next(cache.glob(f"{kind}-*")))


def test_killed_in_the_middle(assets: Assets, images: Path, tmp_path: Path, run_main: RunMain) -> None:
    """Both ranks and the launcher at once; then again, and once undisturbed."""
    argv = flags_of(assets, images, tmp_path / "killed")
    job = {"function": "tests.workers:precompute_in_small_shards", "args": [argv, SHARD_BYTES]}
    (tmp_path / "jobs.json").write_text(json.dumps([job]))
    with started(launch_command(2, "tests.distributed", str(tmp_path / "jobs.json"))) as process:
        wait_for(tmp_path / "killed", "latents-*/*.index", process)
    complete = store_in(tmp_path / "killed", "latents")
    assert 0 < len(complete) < NUM_IMAGES, "it was not killed in the middle"
    done = launch(2, "tests.distributed", str(tmp_path / "jobs.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(complete)} of {NUM_IMAGES} images are in" in done.stderr and "2 of 2 prompts are in" in done.stderr
    assert run_main("precompute", *flags_of(assets, images, tmp_path / "whole")).status == 0

    again, whole = (store_in(tmp_path / name, "latents") for name in ("killed", "whole"))
    assert again.verify().keys() <= complete.ignored.keys(), "but for what a killed writer left"
    assert len(again.records) == NUM_IMAGES, "none is there twice"
    for key in map(str, range(NUM_IMAGES)):
        # another batch of the autoencoder: other kernels, so other last bits
        torch.testing.assert_close(again.read(key), whole.read(key), rtol=0, atol=1e-4)


def test_the_disk_fills_up(assets: Assets, images: Path, small_disk: Path, run_main: RunMain) -> None:
    """Someone else takes the room after it was looked for."""
    subprocess.run(["mount", "-o", "remount,size=10m", small_disk], check=True)
    flags = flags_of(assets, images, small_disk / "cache")
    filler = small_disk / "of someone else"
    with started(launch_command(2, "ds_flux", "precompute", *flags)) as process:
        assert process.stderr
        said = ""
        while "72 records will take about" not in said:
            said += (line := process.stderr.readline())
            assert line, said
        filler.write_bytes(bytes(8 << 20))
        output, errors = process.communicate(timeout=120)
    one_line(Done(process.returncode, output, said + errors), "is full: 2.5 MiB are to be written")
    assert store_in(small_disk / "cache", "text").verify() == store_in(small_disk / "cache", "latents").verify() == {}

    done = run_main("precompute", *flags)
    one_line(done, "4.5 MiB are needed there, and the disk has")
    filler.unlink()
    done = run_main("precompute", *flags)
    assert done.status == 0, done.errors
    assert "2 of 2 prompts are in" in done.errors and f"0 of {NUM_IMAGES} images are in" in done.errors
    assert len(store_in(small_disk / "cache", "latents")) == NUM_IMAGES
