"""ZeRO-Infinity: parameters and optimizer on a disk, with buffers that follow from the model."""

import json
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch import nn

from ds_flux.zero.ds_config import ModelSize, Ranks, nvme_buffers
from tests.conftest import TRANSFORMER, Assets
from tests.distributed import ROOT, metrics, run_jobs


def test_a_buffer_holds_a_share_of_the_largest_tensor() -> None:
    """Which may be more than half of its block, as the fused projection of FLUX.2's single blocks is."""
    block = nn.ModuleDict({"qkv_mlp": nn.Linear(64, 640), "out": nn.Linear(256, 64), "norm": nn.LayerNorm(64)})
    size = ModelSize.of(nn.ModuleDict({"blocks": nn.ModuleList([block] * 2)}))
    assert (size.num_largest_param, size.num_block_tensors) == (64 * 640, 2)
    assert nvme_buffers(size, Ranks(3, 3)) == {"buffer_size": 13654, "buffer_count": 5}


@pytest.mark.skipif(not AsyncIOBuilder().is_compatible(verbose=False), reason="libaio-dev is not installed")
@pytest.mark.timeout(600)
def test_training_on_a_disk_and_resuming(assets: Assets, tmp_path: Path) -> None:
    """The shipped config, on a disk of this machine, with weights and moments large enough for DeepSpeed to swap them."""
    ds_config = json.loads((ROOT / "ds_configs/zero3_nvme.json").read_text())
    zero = ds_config["zero_optimization"] | {"stage3_param_persistence_threshold": 0}
    for section in ("offload_param", "offload_optimizer"):
        zero[section] |= {"nvme_path": str(tmp_path), "pin_memory": False}
    path = tmp_path / "nvme.json"
    path.write_text(json.dumps(ds_config | {"zero_optimization": zero}))
    model = tmp_path / "config.json"
    changes = {"_class_name": "FluxTransformer2DModel", "num_single_layers": 1, "num_attention_heads": 20}
    model.write_text(json.dumps({**TRANSFORMER, **changes}))
    common = {"from_scratch": "true", "transformer_config": model, "checkpointing_steps": 4}
    nvme = {**common, "deepspeed_config": path}
    jobs = [
        assets.flags(tmp_path / "in memory", **common, deepspeed_config=assets.ds_config(3, offload=True)),
        assets.flags(tmp_path / "on disk", **nvme),
        assets.flags(tmp_path / "on disk again", **nvme, resume_from_checkpoint=tmp_path / "on disk/checkpoint-4"),
        assets.flags(tmp_path / "to disk", **nvme, resume_from_checkpoint=tmp_path / "in memory/checkpoint-4"),
    ]
    run_jobs(2, jobs, tmp_path, timeout_s=500)
    back = {**common, "train_batch_size": 8, "deepspeed_config": assets.ds_config(1, offload=True)}
    job = assets.flags(tmp_path / "from disk", **back, resume_from_checkpoint=tmp_path / "on disk/checkpoint-4")
    run_jobs(1, [job], tmp_path)
    assert list(tmp_path.glob("zero_stage_3/optimizer/rank1/*exp_avg*")), "DeepSpeed had moments on the disk"
    assert list(tmp_path.glob("zero_stage_3/*params/rank1/*")), "and weights"
    in_memory, on_disk = (metrics(tmp_path / name) for name in ("in memory", "on disk"))
    check(on_disk, in_memory, 2e-3)  # DeepSpeed's own optimizer on NVMe departs from the one in memory by so much
    check(metrics(tmp_path / "on disk again"), on_disk[4:], 2e-5)
    check(metrics(tmp_path / "to disk")[:1], in_memory[4:5], 2e-5)
    check(metrics(tmp_path / "from disk")[:1], on_disk[4:5], 2e-5)


def check(got: list[dict[str, float]], expected: list[dict[str, float]], rel: float) -> None:
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in got] == pytest.approx([row[key] for row in expected], rel=rel), key
