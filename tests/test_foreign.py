"""`ds-flux consolidate` on what plain DeepSpeed and accelerate wrote, `--verify`, and files that carry code."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file, save_file

from ds_flux.manifest import checksum
from tests.conftest import Assets
from tests.distributed import run_jobs
from tests.foreign import FROZEN, KINDS


class Evil:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch '{self.marker}'",)


@pytest.fixture(scope="module")
def folder(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of plain DeepSpeed at each stage, and one of our own."""
    folder = tmp_path_factory.mktemp("foreign")
    ours = assets.flags(folder / "ours", max_train_steps=1, deepspeed_config=assets.ds_config(3))
    plain = {"function": "tests.foreign:train_and_save", "args": [str(assets.model), str(folder)]}
    run_jobs(2, [plain, ours], folder)
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*KINDS, "accelerate/checkpoint-2"])
def test_equals_zero_to_fp32(assets: Assets, folder: Path, tmp_path: Path, run_main: Any, name: str) -> None:
    arguments = (tmp_path / "out", "--config", assets.model, "--dtype", "fp32", "--verify", assets.model)
    done = run_main("consolidate", folder / name, *arguments)
    assert done.status == 0, done.errors
    assert done.output.splitlines()[-1].endswith("every value finite")
    got = tensors_in(tmp_path / "out")
    if name == "stage 0":
        expected = torch.load(folder / name / "global_step2/mp_rank_00_model_states.pt", weights_only=True)["module"]
    else:
        expected = get_fp32_state_dict_from_zero_checkpoint(str(folder / name))
    if name == "stage 2":
        assert "2 tensors are not the transformer's and left out: text_encoder.weight" in done.output
        expected = {key.removeprefix("transformer."): value for key, value in expected.items() if "text_encoder." not in key}
    if name == "stage 1":  # zero_to_fp32 does not find frozen weights at stage 1
        base = tensors_in(assets.model / "transformer")
        expected |= {key: base[key] for key in (f"{FROZEN}.weight", f"{FROZEN}.bias")}
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(got[key], value), key
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["_class_name"] == "FluxTransformer2DModel" and config["num_layers"] == 1


OPTIMIZER, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_model_states.pt"
DAMAGES = {
    "missing": f"{OPTIMIZER} is missing",
    "all missing": "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing",
    "model missing": f"{MODEL} is missing",
    "short": f"{OPTIMIZER} cannot be read",
    "few weights": f"{OPTIMIZER} holds 1 weights",
    "another step": f"{OPTIMIZER} is of step 1, zero_pp_rank_0_mp_rank_00_optim_states.pt of step 2",
    "another step of a model": f"{MODEL} is of step 1",
    "another number": "zero_pp_rank_2_mp_rank_00_optim_states.pt beside those of 2 processes",
    "split": "only what ZeRO alone has split",
    "code": f"{OPTIMIZER} is refused: it asks for posix.system",
    "code in a model": f"{MODEL} is refused: it asks for posix.system",
    "odd": "no checkpoint in a form of DeepSpeed's",
    "a list": f"{MODEL} is no checkpoint file of DeepSpeed",
    "no config": "say --config",
    "config of another": "is of a UNet: expected one of FluxTransformer2DModel",
    "no such config": "neither a config.json nor the folder",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_names_what_is_wrong(assets: Assets, folder: Path, tmp_path: Path, run_main: Any, kind: str) -> None:
    place = shutil.copytree(folder / "stage 3/global_step2", tmp_path / "plain")
    older = folder / "stage 3/global_step1"
    optimizer, model, config = place / OPTIMIZER, place / MODEL, Path(assets.model)
    match kind:
        case "missing":
            optimizer.unlink()
        case "all missing":
            for path in place.glob("*optim_states.pt"):
                path.unlink()
        case "model missing":
            model.unlink()
        case "short":
            optimizer.write_bytes(optimizer.read_bytes()[:-100])
        case "few weights":
            content = torch.load(optimizer, weights_only=False)
            content["optimizer_state_dict"]["fp32_flat_groups"][1] = torch.ones(1)
            torch.save(content, optimizer)
        case "another step":
            shutil.copy(older / OPTIMIZER, optimizer)
        case "another step of a model":
            shutil.copy(older / MODEL, model)
        case "another number":
            shutil.copy(optimizer, place / OPTIMIZER.replace("rank_1", "rank_2"))
        case "split":
            shutil.copy(optimizer, place / OPTIMIZER.replace("rank_00", "rank_01"))
        case "code" | "code in a model":
            torch.save(
                {"optimizer_state_dict": {}, "module": {}, "x": Evil(tmp_path / "ran")}, optimizer if kind == "code" else model
            )
        case "odd":
            for path in place.glob("*optim_states.pt"):
                torch.save({"optimizer_state_dict": {"zero_stage": 3}}, path)
        case "a list":
            torch.save([1], model)
        case "config of another":
            config = tmp_path / "config.json"
            config.write_text('{"_class_name": "UNet"}')
        case "no such config":
            config = tmp_path / "nowhere"
    done = run_main("consolidate", place, tmp_path / "out", *(() if kind == "no config" else ("--config", config)))
    assert (done.status, len(done.errors.splitlines())) == (2, 1), done.errors
    assert DAMAGES[kind] in done.errors
    assert not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()


def test_verify_says_what_differs(assets: Assets, folder: Path, tmp_path: Path, run_main: Any) -> None:
    base = shutil.copytree(assets.model / "transformer", tmp_path / "base")
    victim = next(base.glob("*.safetensors"))
    tensors = load_file(victim)
    name, tensor = next(iter(tensors.items()))
    for change, said in (
        ({name: tensor[:1].clone()}, f"{name} has shape"),
        ({"mystery": tensor.clone()}, "mystery is missing"),
        ({name: tensor.half()}, f"{name} has dtype F32, the base's F16"),
    ):
        save_file({**tensors, **change}, victim)
        done = run_main("consolidate", folder / "ours", tmp_path / "out", "--dtype", "fp32", "--verify", base)
        errors = [line for line in done.errors.splitlines() if line.startswith("ds-flux: error")]
        assert (done.status, len(errors), said in done.errors) == (2, 1, True), done.errors
        shutil.rmtree(tmp_path / "out")
    checkpoint = shutil.copytree(folder / "stage 0/global_step2", tmp_path / "plain")
    path = checkpoint / "mp_rank_00_model_states.pt"
    content = torch.load(path, weights_only=False)
    content["module"][name].view(-1)[0] = torch.inf
    torch.save(content, path)
    arguments = ("--config", assets.model, "--dtype", "fp32", "--verify", assets.model)
    done = run_main("consolidate", checkpoint, tmp_path / "out", *arguments)
    assert (done.status, f"{name} has 1 values that are not finite" in done.errors) == (2, True), done.errors
    done = run_main("consolidate", folder / "ours", tmp_path / "other", "--format", "bfl", "--verify", assets.model)
    assert (done.status, "--verify compares with diffusers' layout" in done.errors) == (2, True)
    done = run_main("consolidate", folder / "ours", tmp_path / "other", "--config", assets.model)
    assert (done.status, "--config has no effect" in done.errors) == (2, True)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("victim", ["optim_states.pt", "model_states.pt", "foreign"])
def test_resume_runs_no_code(assets: Assets, folder: Path, tmp_path: Path, run_main: Any, victim: str) -> None:
    """Not even where the manifest was made to say that all is well."""
    checkpoint = shutil.copytree(folder / "ours/checkpoint-1", tmp_path / "checkpoint-1")
    path = sorted(checkpoint.glob(f"*{victim.replace('foreign', 'model_states.pt')}"))[-1]
    torch.save({"module": Evil(tmp_path / "ran"), "optimizer_state_dict": {}}, path)
    manifest = json.loads((checkpoint / "ds_flux.json").read_text())
    manifest["files"][path.name], manifest["checksums"][path.name] = path.stat().st_size, checksum(path)
    (checkpoint / "ds_flux.json").write_text(json.dumps(manifest))
    if victim == "foreign":
        (checkpoint / "ds_flux.json").unlink()
    done = run_main("consolidate", checkpoint, tmp_path / "out", *(("--config", assets.model) if victim == "foreign" else ()))
    assert (done.status, f"{path} is refused: it asks for posix.system" in done.errors) == (2, True), done.errors
    done = run_main("train", *assets.flags(tmp_path / "run", resume_from_checkpoint=checkpoint))
    said = [line for line in done.errors.splitlines() if line.startswith("ds-flux: error")]
    assert (done.status, len(said)) == (2, 1), done.errors
    assert ("is no checkpoint of ds_flux" if victim == "foreign" else f"{path} is refused: it asks for posix.system") in said[0]
    assert not (tmp_path / "ran").exists()
