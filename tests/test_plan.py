"""The plan: arithmetic against real engines, the released models, recommendations, bad input."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Assets, Done
from tests.distributed import ROOT, environment, run_jobs
from tests.test_errors import one_line

RunMain = Callable[..., Done]
RELEASED = {"dev": 11_901_408_320, "flux2-dev": 32_223_281_152}
RECIPE = [
    "--config",
    str(ROOT / "launch/recipes/flux1_dev_full.yaml"),
    "--from_scratch",
    "--ds_configs",
    str(ROOT / "ds_configs"),
]
PUBLISHED = Path(__file__).with_name("published")


def plan_of(run_main: RunMain, *flags: object) -> dict:
    """`ds-flux plan --json`."""
    done = run_main("plan", *RECIPE, "--transformer_config", "dev", "--json", *flags)
    assert done.status == 0, done.errors
    return json.loads(done.output)


def test_engines_have_the_tensors_that_are_planned(assets: Assets, tmp_path: Path) -> None:
    """To the byte, on two ranks: weights, optimizer, gradients, host memory; full and LoRA, bf16 and fp32."""
    engines = [
        (dict(mixed_precision=precision, **lora), assets.ds_config(stage, offload))
        for precision, stage, offload, lora in (
            ("bf16", 1, False, {}),
            ("bf16", 2, False, {"rank": 4}),
            ("bf16", 2, True, {}),
            ("bf16", 3, False, {"rank": 4}),
            ("bf16", 3, True, {}),
            ("bf16", 3, True, {"rank": 4}),
            ("no", 2, False, {}),
            ("no", 3, False, {}),
        )
    ]
    jobs = [assets.flags(tmp_path / "run", deepspeed_config=path, **own) for own, path in engines]
    persistent = assets.ds_config(3, stage3_param_persistence_threshold=600)
    jobs.append(assets.flags(tmp_path / "run", deepspeed_config=persistent, mixed_precision="bf16"))
    run_jobs(2, [{"function": "tests.workers:engines_take_what_is_planned", "args": [jobs]}], tmp_path)


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_without_their_weights(name: str) -> None:
    """A process of its own, without a model folder; every variant has a row, and the sums are what they are made of."""
    command = [sys.executable, "-m", "ds_flux", "plan", *RECIPE, "--transformer_config", name]
    bounds = ["--num_gpus", "8", "--gpu_memory_gib", "80", "--host_memory_gib", "1000", "--json"]
    done = subprocess.run([*command, *bounds], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=100)
    plan = json.loads(done.stdout)
    assert plan["num_trainable"] == RELEASED[name]
    assert {row["zero_stage"] for row in plan["rows"]} == {0, 1, 2, 3}
    assert plan["recommended"]["lacks_bytes"] == {} and plan["recommended"]["command"].startswith("deepspeed --num_gpus 8 ")
    for row in plan["rows"]:
        assert row["device_bytes"] >= sum(row["transformer"][part] for part in ("weights", "gradients", "optimizer"))


def test_what_fits_and_what_does_not(run_main: RunMain) -> None:
    """Eight large GPUs, one small one, and one whose node has an NVMe disk; more ranks never take more each."""
    large = plan_of(run_main, "--num_gpus", 8, "--gpu_memory_gib", 80, "--host_memory_gib", 1000)
    assert large["recommended"] and not large["recommended"]["transformer"]["pinned"]
    assert "flux1_dev_full.yaml --deepspeed_config" in large["recommended"]["command"]
    small = plan_of(run_main, "--num_gpus", 1, "--gpu_memory_gib", 24, "--host_memory_gib", 64)
    assert small["recommended"] is None and sum(small["nearest"]["lacks_bytes"].values()) > 2**30
    assert any(row["setting"]["gradient_checkpointing"] for row in small["rows"])
    disk = plan_of(run_main, "--num_gpus", 1, "--gpu_memory_gib", 24, "--host_memory_gib", 128, "--nvme_gib", 400)
    assert disk["recommended"]["setting"]["deepspeed_config"].endswith("zero3_nvme.json")
    by_name = [{row["setting"]["deepspeed_config"]: row["device_bytes"] for row in plan["rows"]} for plan in (large, small)]
    assert all(by_name[0][name] <= by_name[1][name] for name in by_name[0].keys() & by_name[1].keys())


def test_less_memory_by_other_flags(run_main: RunMain) -> None:
    """Where nothing fits as it is: checkpointing, then single images, for the same global batch."""
    flags = ("--gradient_checkpointing", "false", "--train_batch_size", 4, "--gradient_accumulation_steps", 2)
    plan = plan_of(run_main, *flags, "--num_gpus", 8, "--gpu_memory_gib", 30)
    setting = plan["recommended"]["setting"]
    assert setting["gradient_checkpointing"] and "--gradient_checkpointing true" in plan["recommended"]["command"]
    assert setting["train_batch_size"] * setting["gradient_accumulation_steps"] == 8


@pytest.mark.parametrize("published", ["flux1-dev", "flux2-dev", "flux2-klein-9b", "flux3"])
def test_released_shapes_are_those_of_the_folders(published: str) -> None:
    """What is known without a folder has the sizes that the published config files have."""
    from ds_flux import commands, config, outline

    known = {"flux1-dev": "dev", "flux3": "flux3"}.get(published, published)
    ways = {"folder": ["--pretrained_model_name_or_path", str(PUBLISHED / published)], "known": ["--transformer_config", known]}
    found = {}
    for way, flags in ways.items():
        own = ["--from_scratch", *flags] if way == "known" else flags
        shapes = outline.draw(config.load(own, "test", commands.TrainCommand)[0])
        assert shapes.text
        found[way] = (sum(shapes.weights.every), sum(shapes.text.every), sum(shapes.small), shapes.grid)
    assert found["folder"] == found["known"]


BAD: list[tuple[list[object], str]] = [
    (["--gpu_memory_gib", 80], "--num_gpus is missing"),
    (["--num_gpus", 8], "--gpu_memory_gib is missing"),
    (["--num_gpus", 0, "--gpu_memory_gib", 80], "--num_gpus 0 must be more than 0"),
    (["--num_gpus", 8, "--gpu_memory_gib", -1], "--gpu_memory_gib -1 must be more than 0"),
    (["--num_gpus", 8, "--gpu_memory_gib", 80, "--nodes", 0], "--nodes 0 must be more than 0"),
    (["--num_gpus", 8, "--gpu_memory_gib", 1], "--reserve_gib 2 must be between 0 and --gpu_memory_gib"),
    (["--num_gpus", 8, "--gpu_memory_gib", 80, "--ds_configs", "nowhere"], "--ds_configs nowhere: no DeepSpeed configs"),
    (["--num_gpus", 8, "--gpu_memory_gib", 80, "--deepspeed_config", "nowhere.json"], "nowhere.json: no such file"),
    (["--num_gpus", 8, "--gpu_memory_gib", 80, "--from_scratch", "false"], "--transformer_config needs --from_scratch"),
    (
        ["--num_gpus", 6, "--gpu_memory_gib", 80, "--deepspeed_config", "{hpz}"],
        "zero_hpz_partition_size 4 does not divide the 6 processes of a node",
    ),
]


@pytest.mark.parametrize(("flags", "message"), BAD)
def test_bad_input(tmp_path: Path, run_main: RunMain, flags: list[object], message: str) -> None:
    hpz = tmp_path / "hpz.json"
    hpz.write_text('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}')
    flags = [str(flag).format(hpz=hpz) for flag in flags]
    one_line(run_main("plan", *RECIPE, "--transformer_config", "dev", *flags), message)
