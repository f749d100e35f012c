"""A run goes on from a checkpoint of any other number of processes and ZeRO stage, with the optimizer on the CPU or not."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import Assets
from tests.distributed import run_jobs

STEP, LAST = 2, 4
KINDS: dict[str, dict[str, Any]] = {"full": {}, "LoRA": {"rank": 4, "lora_alpha": 8, "learning_rate": 1e-2}}
SIZES, STAGES = (1, 2, 4), (1, 2, 3)


def arguments(assets: Assets, output_dir: Path, kind: str, size: int, stage: int, offload: bool = False, **zero: Any) -> list[str]:
    """A run of eight images a step."""
    return assets.flags(
        output_dir, deepspeed_config=assets.ds_config(stage, offload, **zero), train_batch_size=8 // size, **KINDS[kind]
    )


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All checkpoints, one launch for each number of processes; then all of them in each layout, in as many launches."""
    folder = tmp_path_factory.mktemp("elastic")
    for size in SIZES:
        jobs = []
        for kind in KINDS:
            for stage in STAGES:
                output_dir = folder / f"{kind}, {size}, {stage}"
                argv = arguments(assets, output_dir, kind, size, stage)
                jobs.append({"function": "tests.workers:make_checkpoint", "args": [argv, str(output_dir), STEP, LAST]})
        run_jobs(size, jobs, folder)
    for size in SIZES:
        jobs = []
        for kind in KINDS:
            for stage in STAGES:
                name = f"{kind}, {size}, {stage}"
                argv = arguments(assets, folder / "unused", kind, size, stage)
                sources = [
                    str(folder / f"{kind}, {a}, {b}" / f"checkpoint-{STEP}") for a in SIZES for b in STAGES if (a, b) != (size, stage)
                ]
                jobs.append({"function": "tests.workers:go_on_from", "args": [argv, sources, str(folder / f"{name}.pt"), LAST]})
        run_jobs(size, jobs, folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_goes_on_from_every_layout(folder: Path, kind: str, size: int, stage: int) -> None:
    found = torch.load(folder / f"{kind}, {size}, {stage}.pt")
    assert len(found) == 8
    for source, row in found.items():
        assert row["first"] == STEP
        assert all(row["equal"].values()), (source, row["equal"])
        for key in ("loss", "grad_norm", "lr"):
            assert [f[key] for f in row["figures"]] == pytest.approx([f[key] for f in row["kept"]], rel=1e-5), (source, key)
