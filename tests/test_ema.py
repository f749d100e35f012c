"""The average of the weights: its definition at every stage, going on in any layout, and an engine that computes with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file

from ds_flux import UserError, runtime
from ds_flux.consolidate import consolidate
from tests import ema
from tests.conftest import Assets
from tests.distributed import run_jobs
from tests.workers import fixed_inputs

LORA = {"rank": 4, "lora_alpha": 8, "learning_rate": 1e-2}
BF16 = {"mixed_precision": "bf16"}
ON_CPU = {"ema_device": "cpu"}
ZERO = {"round_robin_gradients": True}
# name: (ranks, stage, keys of ZeRO, flags, the layout whose checkpoint it goes on from)
RUNS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], str | None]] = {
    "1 at 0": (1, 0, {}, {}, None),
    "1 at 1": (1, 1, {}, ON_CPU, None),
    "2 at 0": (2, 0, {}, {}, "1 at 0"),
    "2 at 0, bf16": (2, 0, {}, BF16, None),
    "2 at 1, bf16": (2, 1, {}, BF16, None),
    "2 at 2, in turn": (2, 2, ZERO, {}, "1 at 1"),
    "2 at 2, offload": (2, 2, {"offload": True}, ON_CPU, None),
    "2 at 3": (2, 3, {"sub_group_size": 5_000}, {}, "2 at 2, in turn"),
    "2 at 3, again": (2, 3, {"sub_group_size": 5_000}, {}, "2 at 3"),
    "2 at 3, offload, bf16": (2, 3, {"offload": True}, BF16, None),
    "2 at 3, LoRA": (2, 3, {"stage3_param_persistence_threshold": 500}, LORA, None),
    "4 at 3": (4, 3, {}, {}, "2 at 2, in turn"),
    "1 at 2, LoRA": (1, 2, {}, LORA, "2 at 3, LoRA"),
    "1 at 3": (1, 3, {"offload": True}, {}, "2 at 3, again"),
}
NUM_STEPS = 3
TOGETHER = [["1 at 0", "1 at 1"], [name for name in RUNS if name[0] == "2"], ["4 at 3"], ["1 at 2, LoRA", "1 at 3"]]
"""runs of one launch, after those whose checkpoints they go on from"""


def checkpoint_of(folder: Path, name: str) -> Path:
    """Where the run of that name has come to."""
    step, source = 0, name
    while source:
        step, source = step + NUM_STEPS, RUNS[source][-1]
    return folder / name / f"checkpoint-{step}"


def job(assets: Assets, folder: Path, name: str) -> dict[str, Any]:
    size, stage, zero, flags, source = RUNS[name]
    resumed = {"resume_from_checkpoint": checkpoint_of(folder, source)} if source else {}
    argv = assets.flags(
        folder / name, deepspeed_config=assets.ds_config(stage, **zero), train_batch_size=8 // size, max_train_steps=20,
        shard_text_encoder="false", ema_decay=0.7, **flags, **resumed,
    )  # fmt: skip
    found = [str(folder / f"{name}.pt"), str(folder / f"{source}.pt") if source else None]
    return {"function": "tests.ema:follow", "args": [argv, *found, NUM_STEPS]}


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs and what they found."""
    folder = tmp_path_factory.mktemp("ema")
    runtime.init()
    for names in TOGETHER:
        jobs = [job(assets, folder, name) for name in names]
        if RUNS[names[0]][0] > 1:
            run_jobs(RUNS[names[0]][0], jobs, folder)
        else:  # no launch: this process is one
            for one in jobs:
                ema.follow(*one["args"])
    return folder


def consolidated(folder: Path, name: str, out: Path) -> dict[str, torch.Tensor]:
    """The averages as `ds-flux consolidate --weights ema` writes them."""
    consolidate(checkpoint_of(folder, name), out, torch.float32, 10**9, weights="ema")
    return {key: value for path in out.glob("*.safetensors") for key, value in load_file(path).items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_average_is_the_recursion(folder: Path, tmp_path: Path, name: str) -> None:
    found = torch.load(folder / f"{name}.pt")
    assert found["is_same"], "does not start as the weights, or as the average it goes on from"
    assert found["skipped"] == [False, True, False]
    torch.testing.assert_close(found["average"], found["expected"], rtol=1e-5, atol=1e-7)
    written, average = consolidated(folder, name, tmp_path / "out"), found["average"]
    if "LoRA" in name:
        average = {f"transformer.{key}".replace(".default.", "."): tensor for key, tensor in average.items()}
        written = {key: tensor for key, tensor in written.items() if not key.endswith(".alpha")}
    assert written.keys() == average.keys()
    assert all(torch.equal(written[key], tensor) for key, tensor in average.items())


@pytest.mark.parametrize("name", [name for name in RUNS if "LoRA" not in name and "bf16" not in name])
def test_swapped_engine_computes_with_the_average(folder: Path, tmp_path: Path, name: str) -> None:
    consolidated(folder, name, tmp_path / "out")
    model = FluxTransformer2DModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        said = model(**fixed_inputs(), return_dict=False)[0]
    torch.testing.assert_close(torch.load(folder / f"{name}.pt")["velocity"], said, rtol=1e-5, atol=1e-5)


def test_with_and_without(assets: Assets, folder: Path, tmp_path: Path, run_main: Any) -> None:
    """Of a checkpoint without an average it starts from the weights, and one that is not kept on is told of."""
    flags = {"train_batch_size": 8, "max_train_steps": 1, "shard_text_encoder": "false"}
    ds_config = assets.ds_config(2)
    done = run_main("train", *assets.flags(tmp_path / "run", deepspeed_config=ds_config, **flags))
    assert done.status == 0, done.errors
    with pytest.raises(UserError, match="has no EMA weights: it was made without --ema_decay"):
        consolidate(tmp_path / "run/checkpoint-1", tmp_path / "out", torch.float32, 10**9, weights="ema")
    assert not (tmp_path / "out").exists()
    flags |= {"resume_from_checkpoint": "latest", "max_train_steps": 2}
    done = run_main("train", *assets.flags(tmp_path / "run", deepspeed_config=ds_config, ema_decay=0.5, **flags))
    assert (done.status, "checkpoint-1 has no EMA weights: they start as its weights" in done.errors) == (0, True)
    assert (tmp_path / "run/checkpoint-2/rank_0_ema.pt").is_file()
    done = run_main("train", *assets.flags(tmp_path / "run", deepspeed_config=ds_config, **flags))
    assert (done.status, "checkpoint-2 has EMA weights, which end here" in done.errors) == (0, True)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "too large": ({"ema_decay": 1.0}, {}, "--ema_decay 1.0 is not between 0 and 1"),
    "device alone": ({"ema_device": "cpu"}, {}, "--ema_device has no effect without --ema_decay"),
    "on NVMe": (
        {"ema_decay": 0.9}, {"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}, "needs the optimizer in memory"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_refuses(assets: Assets, tmp_path: Path, run_main: Any, kind: str) -> None:
    flags, zero, message = REFUSED[kind]
    ds_config = tmp_path / "ds.json"
    ds_config.write_text(json.dumps({"zero_optimization": {"stage": 3, **zero}}))
    done = run_main("train", *assets.flags(tmp_path / "run", deepspeed_config=ds_config, **flags))
    assert (done.status, message in done.errors) == (2, True), done.errors
