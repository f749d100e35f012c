"""Exact resume, consolidation of every stage, and what stock libraries make of the result."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file

from ds_flux import UserError, assemble, commands, config, lora, models, runtime
from ds_flux.consolidate import consolidate
from ds_flux.consolidate import main as consolidate_command
from tests.conftest import Assets
from tests.distributed import metrics, run_jobs
from tests.workers import fixed_inputs

LORA = {"rank": 4, "lora_alpha": 8, "learning_rate": 1e-2}
RUNS: dict[str, dict[str, Any]] = {
    "stage 3, offload": {"stage": 3, "offload": True},
    "stage 3, bf16": {"stage": 3, "mixed_precision": "bf16", "train_batch_size": 2, "gradient_accumulation_steps": 2},
    "stage 3, LoRA": {"stage": 3, "lora_dropout": 0.2, **LORA},
    "stage 2": {"stage": 2, "lr_scheduler": "linear"},
    "stage 1, bf16": {"stage": 1, "mixed_precision": "bf16"},
    "stage 0": {"stage": 0},
    "stage 0, bf16": {"stage": 0, "mixed_precision": "bf16"},
    "stage 0, LoRA": {"stage": 0, **LORA},
    "stage 2, LoRA": {"stage": 2, "offload": True, **LORA},
}


def arguments(assets: Assets, output_dir: Path, stage: int, offload: bool = False, **flags: object) -> list[str]:
    return assets.flags(output_dir, deepspeed_config=assets.ds_config(stage, offload), **flags)


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each run whole, then again from its middle in a folder of its own; and what each trained engine says."""
    folder = tmp_path_factory.mktemp("checkpoints")
    jobs: list[Any] = []
    for name, flags in RUNS.items():
        straight, resumed = folder / name, folder / f"{name}, resumed"
        jobs.append(arguments(assets, straight, checkpointing_steps=3, **flags))
        jobs.append(
            arguments(assets, resumed, checkpointing_steps=3, resume_from_checkpoint=straight / "checkpoint-3", **flags)
        )
        engine = arguments(assets, straight, resume_from_checkpoint="latest", **flags)
        jobs.append({"function": "tests.workers:velocity_of_run", "args": [engine, str(folder / f"{name}.pt")]})
    run_jobs(2, jobs, folder)
    return folder


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", RUNS)
def test_resume_is_exact(folder: Path, name: str) -> None:
    straight, resumed = metrics(folder / name), metrics(folder / f"{name}, resumed")
    assert [row["step"] for row in resumed] == [4, 5, 6]
    for row, expected in zip(resumed, straight[3:]):
        lasting = {name for name in (*row, *expected) if name.startswith(("loss", "lr", "grad_norm", "num_images", "skipped"))}
        assert {name: row.get(name) for name in lasting} == {name: expected.get(name) for name in lasting}
    consolidate(folder / name / "checkpoint-6", folder / f"{name} a", torch.float32, 10**9)
    consolidate(folder / f"{name}, resumed" / "checkpoint-6", folder / f"{name} b", torch.float32, 10**9)
    for path in (folder / f"{name} a").glob("*.safetensors"):
        assert path.read_bytes() == (folder / f"{name} b" / path.name).read_bytes()


@pytest.mark.parametrize("name", [name for name in RUNS if "stage 0" not in name])
def test_consolidated_equals_zero_to_fp32(folder: Path, tmp_path: Path, name: str) -> None:
    is_lora = "LoRA" in name
    expected = get_fp32_state_dict_from_zero_checkpoint(str(folder / name), "checkpoint-6", exclude_frozen_parameters=is_lora)
    consolidate(folder / name / "checkpoint-6", tmp_path / "out", torch.float32, 50_000)
    got = {key: value for path in (tmp_path / "out").glob("*.safetensors") for key, value in load_file(path).items()}
    if is_lora:
        expected = {f"transformer.{key}".replace(".default.", "."): value for key, value in expected.items()}
        assert {key for key in got if key not in expected} == {key for key in got if key.endswith(".alpha")} != set()
    else:
        assert got.keys() == expected.keys()
        assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    for key, value in expected.items():
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("name", [name for name in RUNS if "LoRA" not in name])
def test_diffusers_loads_the_transformer(folder: Path, tmp_path: Path, name: str) -> None:
    assert consolidate_command([str(folder / name), str(tmp_path / "out"), "--dtype", "fp32", "--max_shard_size", "100KB"]) == 0
    transformer, info = FluxTransformer2DModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    dtype, tolerance = (torch.bfloat16, 2e-2) if "bf16" in name else (torch.float32, 1e-5)
    with torch.no_grad():
        velocity = transformer.to(dtype)(**fixed_inputs(dtype), return_dict=False)[0]
    torch.testing.assert_close(velocity, torch.load(folder / f"{name}.pt"), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in RUNS if "LoRA" in name])
def test_the_stock_pipeline_loads_the_lora(assets: Assets, folder: Path, tmp_path: Path, name: str) -> None:
    consolidate(folder / name / "checkpoint-6", tmp_path / "out", torch.float32, 10**9)
    pipeline = FluxPipeline.from_pretrained(assets.model)
    with torch.no_grad():
        before = pipeline.transformer(**fixed_inputs(), return_dict=False)[0]
        pipeline.load_lora_weights(tmp_path / "out")
        after = pipeline.transformer(**fixed_inputs(), return_dict=False)[0]
    assert (after - before).abs().max() > 1e-3
    expected = torch.load(folder / f"{name}.pt")
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-5)

    arguments = ["--pretrained_model_name_or_path", str(assets.model), "--mixed_precision", "no"]
    settings, _ = config.load(arguments, "test", commands.SampleCommand)
    runtime.init()
    architecture = models.find_architecture(settings.model)
    ours = assemble.build_frozen_transformer(settings, architecture, lora.config_of_file(tmp_path / "out", architecture.family))
    with torch.no_grad():
        torch.testing.assert_close(ours(**fixed_inputs(), return_dict=False)[0], expected, rtol=1e-5, atol=1e-5)


def test_a_lora_checkpoint_leaves_the_base_out(folder: Path) -> None:
    size = {name: sum(path.stat().st_size for path in (folder / name / "checkpoint-6").iterdir()) for name in RUNS}
    assert size["stage 3, LoRA"] < 0.5 * size["stage 3, offload"]
    manifest = json.loads((folder / "stage 3, LoRA/checkpoint-6/ds_flux.json").read_text())
    assert manifest["lora"] == {**manifest["lora"], "rank": 4, "alpha": 8.0}
    assert len(manifest["base_fingerprint"]) == 32


def test_a_lora_starts_from_a_file(assets: Assets, folder: Path, tmp_path: Path, run_main: Any) -> None:
    """--lora_init_from: the first loss of a run is the one its file was left with."""
    consolidate(folder / "stage 3, LoRA/checkpoint-6", tmp_path / "lora", torch.float32, 10**9)
    flags = {**LORA, "lora_init_from": tmp_path / "lora", "max_train_steps": 1, "train_batch_size": 8}
    done = run_main("train", *assets.flags(tmp_path / "run", deepspeed_config=assets.ds_config(0), **flags))
    assert done.status == 0, done.errors
    fresh = {key: value for key, value in flags.items() if key != "lora_init_from"}
    done = run_main("train", *assets.flags(tmp_path / "fresh", deepspeed_config=assets.ds_config(0), **fresh))
    assert metrics(tmp_path / "run")[0]["loss"] != metrics(tmp_path / "fresh")[0]["loss"]
    wrong = {**flags, "rank": 2}
    done = run_main("train", *assets.flags(tmp_path / "wrong", deepspeed_config=assets.ds_config(0), **wrong))
    assert (done.status, "does not fit --rank 2" in done.errors) == (2, True)


BREAKAGES = {
    "truncated": "is not whole",
    "missing": "is missing",
    "flipped": "does not hold what was written",
    "swapped": "does not hold what was written",
    "no checkpoint": "no checkpoint of ds_flux",
    "absent": "no such folder",
    "another model": "another model",
    "another LoRA": "another LoRA",
    "stage 0": "no way from or to stage 0",
}


@pytest.mark.parametrize("kind", BREAKAGES)
def test_resume_refuses_what_is_not_its_own(assets: Assets, folder: Path, tmp_path: Path, run_main: Any, kind: str) -> None:
    checkpoint = shutil.copytree(folder / "stage 3, offload/checkpoint-3", tmp_path / "checkpoint-3")
    manifest = json.loads((checkpoint / "ds_flux.json").read_text())
    victim = next(path for path in checkpoint.iterdir() if "optim_states" in path.name)
    flags: dict[str, Any] = {"stage": 3}
    match kind:
        case "truncated":
            victim.write_bytes(victim.read_bytes()[:-100])
        case "missing":
            victim.unlink()
        case "flipped":
            content = bytearray(victim.read_bytes())
            content[len(content) // 2] ^= 1
            victim.write_bytes(content)
        case "swapped":
            one, other = sorted(path for path in checkpoint.iterdir() if "optim_states" in path.name)
            assert one.stat().st_size == other.stat().st_size
            one.rename(tmp_path / "aside"), other.rename(one), (tmp_path / "aside").rename(other)
        case "stage 0":
            flags["stage"] = 0
        case "another model":
            manifest["transformer_config"]["num_layers"] = 7
        case "another LoRA":
            flags |= LORA
    (checkpoint / "ds_flux.json").write_text(json.dumps(manifest))
    if kind == "no checkpoint":
        (checkpoint / "ds_flux.json").unlink()
    path = checkpoint if kind != "absent" else tmp_path / "nowhere"
    done = run_main("train", *arguments(assets, tmp_path / "run", resume_from_checkpoint=path, **flags))
    assert done.status == 2
    said = [line for line in done.errors.splitlines() if BREAKAGES[kind] in line]
    assert len(said) == 1 and said[0].startswith("ds-flux")
    assert not (tmp_path / "run").exists()


TORN = {"truncated": "is not whole", "flipped": "does not hold", "no manifest": "ds_flux.json is missing"}


@pytest.mark.parametrize("kind", TORN)
def test_latest_passes_over_what_is_torn(assets: Assets, folder: Path, tmp_path: Path, run_main: Any, kind: str) -> None:
    run = shutil.copytree(folder / "stage 3, LoRA", tmp_path / "run", ignore=shutil.ignore_patterns("logs"))
    victim = next(path for path in (run / "checkpoint-6").iterdir() if "optim_states" in path.name)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    if kind == "no manifest":
        (run / "checkpoint-6/ds_flux.json").unlink()
    else:
        victim.write_bytes(content if kind == "flipped" else content[:-1])
    flags = {**LORA, "lora_dropout": 0.2, "resume_from_checkpoint": "latest", "train_batch_size": 8, "max_train_steps": 4}
    done = run_main("train", *arguments(assets, run, stage=3, **flags))
    assert done.status == 0, done.errors
    assert [line for line in done.errors.splitlines() if "checkpoint-6" in line and TORN[kind] in line]
    assert [row["step"] for row in metrics(run)] == [4]
    shutil.rmtree(run / "checkpoint-3")
    shutil.rmtree(run / "checkpoint-4")
    done = run_main("train", *arguments(assets, run, stage=3, **flags))
    assert (done.status, TORN[kind] in done.errors) == (2, True)


def test_resume_refuses_another_base(assets: Assets, folder: Path, tmp_path: Path, run_main: Any) -> None:
    model = shutil.copytree(assets.model, tmp_path / "model")
    transformer = FluxTransformer2DModel.from_pretrained(model / "transformer")
    with torch.no_grad():
        transformer.x_embedder.weight[0, 0] += 1
    shutil.rmtree(model / "transformer")
    transformer.save_pretrained(model / "transformer")
    checkpoint = shutil.copytree(folder / "stage 3, LoRA/checkpoint-3", tmp_path / "checkpoint-3")
    flags = {"pretrained_model_name_or_path": model, "resume_from_checkpoint": checkpoint, **LORA}
    done = run_main("train", *arguments(assets, tmp_path / "run", stage=3, **flags))
    assert (done.status, "other base weights" in done.errors) == (2, True)


def test_consolidate_refuses(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    checkpoint = shutil.copytree(folder / "stage 3, offload/checkpoint-3", tmp_path / "checkpoint-3")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="exists already"):
        consolidate(checkpoint, tmp_path / "there", torch.float32, 10**9)
    victim = next(path for path in checkpoint.iterdir() if "optim_states" in path.name)
    victim.write_bytes(victim.read_bytes()[:-100])
    with pytest.raises(UserError, match="is not whole"):
        consolidate(checkpoint, tmp_path / "out", torch.float32, 10**9)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match="no checkpoint"):
        consolidate_command([str(tmp_path / "there"), str(tmp_path / "out")])


def test_consolidate_runs_no_code_from_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """A pickle that would run something is refused by torch's weights_only."""

    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    checkpoint = shutil.copytree(folder / "stage 3, offload/checkpoint-3", tmp_path / "checkpoint-3")
    victim = next(path for path in checkpoint.iterdir() if "optim_states" in path.name)
    torch.save({"optimizer_state_dict": Evil()}, victim)
    manifest = json.loads((checkpoint / "ds_flux.json").read_text())
    manifest["files"][victim.name] = victim.stat().st_size
    (checkpoint / "ds_flux.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=f"{victim.name} is refused"):
        consolidate(checkpoint, tmp_path / "out", torch.float32, 10**9)
    assert not (tmp_path / "ran").exists()
