"""A LoRA added to its base, and what a run leaves behind in every format."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file

from ds_flux import UserError, export, merge, streaming
from ds_flux.consolidate import main as consolidate_command
from ds_flux.lora import FILE_NAME
from tests.conftest import Assets
from tests.distributed import metrics
from tests.pairs import Pairs
from tests.test_export import (
    ALPHA,
    MODELS,
    RANK,
    Tensors,
    assert_equal,
    direct,
    fused,
    lora_file,
    pieces,
    random_lora,
    transformer,
    written,
)
from tests.workers import fixed_inputs

# ---------------------------------------------------------------------------------------------------------------------
# merging


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS)
def test_merged_equals_diffusers_fuse(tmp_path: Path, model: str, dtype: torch.dtype) -> None:
    """In every format, from a base in several files, and rounded once."""
    module = transformer(model).to(dtype)
    module.save_pretrained(tmp_path / "model/transformer", max_shard_size="50KB")
    assert len(list((tmp_path / "model/transformer").glob("*.safetensors"))) > 2
    tensors = random_lora(model, lambda name: name != "proj_out", module)
    alpha = 2.0 * RANK  # a power of two times the rank, so that it does not matter where it is multiplied
    lora_file(model, tensors, "diffusers", tmp_path / "lora", alpha)
    expected = {name: tensor.to(dtype) for name, tensor in direct(module.state_dict(), tensors, alpha).items()}
    flags = ["--merge_lora", str(tmp_path / "model"), "--dtype", "fp32" if dtype == torch.float32 else "bf16"]
    for form in ("diffusers", "bfl", "comfyui"):
        assert consolidate_command([str(tmp_path / "lora"), str(tmp_path / form), "--format", form, *flags]) == 0
    _, info = type(module).from_pretrained(tmp_path / "diffusers", output_loading_info=True)
    assert not any(info.values())
    got = load_file(tmp_path / "diffusers/diffusion_pytorch_model.safetensors")
    assert_equal(got, expected)
    original = load_file(tmp_path / "bfl/transformer.safetensors")
    assert_equal(written(export.weights(pieces(expected), type(module).__name__, "bfl"), tmp_path, dtype), original)
    assert_equal(load_file(tmp_path / "comfyui/transformer.safetensors"), original)
    if dtype == torch.float32:
        by_diffusers = fused(model, module, tmp_path / "lora")
        for name in expected:
            torch.testing.assert_close(got[name], by_diffusers[name], rtol=1e-5, atol=1e-5)


def test_chunks_that_end_within_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces in which it is done, the same is written."""
    module = transformer("FLUX.2")
    tensors = random_lora("FLUX.2", lambda name: "blocks" in name or name == "norm_out.linear", module)
    expected = direct(module.state_dict(), tensors)

    def everything(folder: Path) -> list[Tensors]:
        folder.mkdir()
        lora = export.lora_of(pieces(tensors), ALPHA)
        merged = merge.merged(pieces(module.state_dict()), lora.layers, lora.scale)
        return [
            written(merged, folder),
            written(export.weights(merged, type(module).__name__, "bfl"), folder),
            *(written(export.lora_weights(lora, type(module).__name__, form), folder) for form in ("diffusers", "comfyui")),
        ]

    in_one = everything(tmp_path / "in one")
    monkeypatch.setattr(streaming, "CHUNK_NUMEL", 37)
    for got, wanted in zip(everything(tmp_path / "in many"), in_one):
        assert got.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(got[name], wanted[name], rtol=1e-5, atol=1e-5)
    for name in expected:
        torch.testing.assert_close(in_one[0][name], expected[name], rtol=1e-5, atol=1e-5)


def test_merging_refuses_what_does_not_fit(tmp_path: Path) -> None:
    module = transformer("FLUX.2")
    module.save_pretrained(tmp_path / "base")
    tensors = random_lora("FLUX.2", lambda name: name.endswith("to_q"), module)

    def refused(tensors: Tensors, base: Path, *flags: str) -> str:
        lora_file("FLUX.2", tensors, "diffusers", tmp_path / "lora")
        with pytest.raises(UserError) as caught:
            consolidate_command([str(tmp_path / "lora"), str(tmp_path / "out"), *flags, "--merge_lora", str(base)])
        assert not list(tmp_path.glob("out*"))
        return str(caught.value)

    wider = {name: torch.ones(RANK, 40) if "lora_A" in name else tensor for name, tensor in tensors.items()}
    assert "it changes transformer_blocks.0.attn.to_q (32, 40), which is (32, 32) there" in refused(wider, tmp_path / "base")
    elsewhere = {name.replace("blocks.1", "blocks.7"): tensor for name, tensor in tensors.items()}
    assert "transformer_blocks.7.attn.to_q (32, 32), which is missing there" in refused(elsewhere, tmp_path / "base")
    assert "no config.json" in refused(tensors, tmp_path)
    assert "no config.json" in refused(tensors, tmp_path / "nowhere")
    weights = tmp_path / "base/diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "cannot be read" in refused(tensors, tmp_path / "base")
    weights.unlink()
    assert "cannot be read" in refused(tensors, tmp_path / "base")
    file = {name.replace("default.", ""): tensor for name, tensor in tensors.items()}
    save_file(file, tmp_path / "scaled.safetensors", metadata={"lora_adapter_metadata": "{}"})
    save_file({**file, "x.alpha": torch.tensor(1.0)}, tmp_path / "partly.safetensors")
    for name in ("scaled", "partly"):
        with pytest.raises(UserError, match="scales that ds-flux consolidate does not write"):
            consolidate_command([str(tmp_path / f"{name}.safetensors"), str(tmp_path / "out")])
    with pytest.raises(UserError, match="can only be merged"):
        consolidate_command([str(tmp_path / "lora"), str(tmp_path / "out")])
    with pytest.raises(UserError, match="cannot be read"):
        consolidate_command([str(tmp_path / "absent.safetensors"), str(tmp_path / "out")])


# ---------------------------------------------------------------------------------------------------------------------
# from a run to the files


def test_all_weights_of_a_run_by_their_original_names(assets: Assets, tmp_path: Path, run_main: Any) -> None:
    done = run_main("train", *assets.flags(tmp_path / "run", max_train_steps=1))
    assert done.status == 0, done.errors
    for form in ("diffusers", "bfl"):
        done = run_main("consolidate", tmp_path / "run", tmp_path / form, "--format", form, "--dtype", "fp32")
        assert done.status == 0, done.errors
    assert {path.name for path in (tmp_path / "bfl").iterdir()} == {"transformer.safetensors", "config.json"}
    ours = load_file(tmp_path / "diffusers/diffusion_pytorch_model.safetensors")
    theirs = load_file(tmp_path / "bfl/transformer.safetensors")
    assert sum(tensor.numel() for tensor in theirs.values()) == sum(tensor.numel() for tensor in ours.values())
    block = "single_transformer_blocks.1."
    parts = [ours[f"{block}{name}.weight"] for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")]
    assert torch.equal(theirs["single_blocks.1.linear1.weight"], torch.cat(parts))
    scale, shift = ours["norm_out.linear.bias"].chunk(2)
    assert torch.equal(theirs["final_layer.adaLN_modulation.1.bias"], torch.cat([shift, scale]))
    done = run_main("consolidate", tmp_path / "run", tmp_path / "out", "--merge_lora", assets.model)
    assert (done.status, "no LoRA to merge" in done.errors) == (2, True)


def test_a_lora_of_a_run_merged_into_its_base(assets: Assets, tmp_path: Path, run_main: Any) -> None:
    flags = {"max_train_steps": 2, "rank": RANK, "lora_alpha": ALPHA, "learning_rate": 1e-2}
    done = run_main("train", *assets.flags(tmp_path / "run", **flags))
    assert done.status == 0, done.errors

    def consolidate(name: str, checkpoint: Path, *flags: object) -> Any:
        return run_main("consolidate", checkpoint, tmp_path / name, "--dtype", "fp32", *flags)

    assert consolidate("lora", tmp_path / "run").status == 0
    assert consolidate("merged", tmp_path / "run", "--merge_lora", assets.model).status == 0
    assert consolidate("again", tmp_path / "lora", "--merge_lora", assets.model / "transformer").status == 0
    merged = load_file(tmp_path / "merged/diffusion_pytorch_model.safetensors")
    assert_equal(load_file(tmp_path / "again/diffusion_pytorch_model.safetensors"), merged)
    pipe = FluxPipeline.from_pretrained(assets.model)
    with torch.no_grad():
        before = pipe.transformer(**fixed_inputs(), return_dict=False)[0]
        pipe.load_lora_weights(tmp_path / "lora")
        expected = pipe.transformer(**fixed_inputs(), return_dict=False)[0]
        got = FluxTransformer2DModel.from_pretrained(tmp_path / "merged")(**fixed_inputs(), return_dict=False)[0]
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)

    assert consolidate("comfyui", tmp_path / "run", "--format", "comfyui").status == 0
    file = load_file(tmp_path / "comfyui" / FILE_NAME)
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    parts = [f"transformer.transformer_blocks.0.attn.to_{part}.lora" for part in "qkv"]
    lora = load_file(tmp_path / "lora" / FILE_NAME)
    assert torch.equal(file[f"{name}.lora_down.weight"], torch.cat([lora[f"{part}_A.weight"] for part in parts]))
    assert torch.equal(file[f"{name}.lora_up.weight"], torch.block_diag(*(lora[f"{part}_B.weight"] for part in parts)))
    assert file[f"{name}.alpha"] == 3 * ALPHA

    done = consolidate("bfl", tmp_path / "run", "--format", "bfl")
    assert (done.status, "choose diffusers or comfyui" in done.errors) == (2, True)
    other = shutil.copytree(assets.model / "transformer", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "_class_name": "Flux2Transformer2DModel"}))
    done = consolidate("out", tmp_path / "run", "--merge_lora", other)
    assert (done.status, "is a Flux2Transformer2DModel, the LoRA is of a FluxTransformer2DModel" in done.errors) == (2, True)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("name", ["flux2", "flux3"])
def test_a_lora_starts_from_any_spelling(pairs: Pairs, tmp_path: Path, run_main: Any, name: str) -> None:
    """--lora_init_from a file of diffusers, and one of kohya or ComfyUI: the same next loss, and not a fresh one's."""
    flags = dict(rank=4, learning_rate=3e-2, max_train_steps=2, deepspeed_config="ds_configs/zero0.json", train_batch_size=8)
    done = run_main("train", *pairs.flags(name, tmp_path / "run", **flags))
    assert done.status == 0, done.errors
    losses = {}
    for form in ("diffusers", "comfyui"):
        consolidate_command([str(tmp_path / "run"), str(tmp_path / form), "--format", form, "--dtype", "fp32"])
        (path,) = (tmp_path / form).glob("*.safetensors")
        more = {**flags, "max_train_steps": 1, "lora_init_from": path, "seed": 5}
        done = run_main("train", *pairs.flags(name, tmp_path / f"{form} run", **more))
        assert done.status == 0, done.errors
        losses[form] = metrics(tmp_path / f"{form} run")[0]["loss"]
    done = run_main("train", *pairs.flags(name, tmp_path / "fresh", **{**flags, "max_train_steps": 1, "seed": 5}))
    assert losses["comfyui"] == pytest.approx(losses["diffusers"], rel=1e-6)
    assert abs(metrics(tmp_path / "fresh")[0]["loss"] - losses["diffusers"]) > 1e-3
