"""`ds-flux consolidate --format` and `--merge_lora`, held against diffusers' own converters and loaders."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, Flux2Transformer2DModel, Flux3Transformer2DModel, FluxPipeline, FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin, Flux3LoraLoaderMixin, FluxLoraLoaderMixin
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ds_flux import UserError, export, merge, streaming
from ds_flux.consolidate import main as consolidate_command
from ds_flux.lora import FILE_NAME
from ds_flux.streaming import whole, write_files
from tests.conftest import Assets
from tests.distributed import metrics
from tests.pairs import Pairs
from tests.workers import fixed_inputs

Tensors = dict[str, Tensor]
SIZE = dict(num_layers=2, num_single_layers=2, num_attention_heads=2, attention_head_dim=16, joint_attention_dim=32)
FLUX1 = dict(SIZE, in_channels=16, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6), guidance_embeds=True)
FLUX2 = dict(SIZE, in_channels=16, axes_dims_rope=(4, 4, 4, 4))
FLUX3 = dict(SIZE, in_channels=16, cond_in_channels=16, axes_dims_rope=(4, 4, 4, 4), flow_map=True)
# name of a model: its class, its config, diffusers' converter of its weights, and its pipeline's loader of LoRA files
MODELS: dict[str, tuple[Any, dict[str, Any], Callable[..., Tensors], Any]] = {
    "FLUX.1": (
        FluxTransformer2DModel, FLUX1, single_file_utils.convert_flux_transformer_checkpoint_to_diffusers, FluxLoraLoaderMixin
    ),
    "FLUX.2": (
        Flux2Transformer2DModel, FLUX2, single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
        Flux2LoraLoaderMixin,
    ),
    "FLUX.3": (
        Flux3Transformer2DModel, FLUX3, single_file_utils.convert_flux3_transformer_checkpoint_to_diffusers,
        Flux3LoraLoaderMixin,
    ),
}  # fmt: skip
ALPHA, RANK = 6.0, 4


def transformer(model: str) -> nn.Module:
    """With numbers of the order of one everywhere, so that no two tensors are alike."""
    torch.manual_seed(0)
    return MODELS[model][0](**MODELS[model][1]).requires_grad_(False)


def state_dict(model: str) -> Tensors:
    """FLUX.1's converter knows one width only, 3072: of that width, but with two columns."""
    if model != "FLUX.1":
        return transformer(model).state_dict()
    with torch.device("meta"):
        shapes = FluxTransformer2DModel(num_layers=2, num_single_layers=2, guidance_embeds=True).state_dict()
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand((len(tensor), 2)[: tensor.ndim], generator=generator) for name, tensor in shapes.items()}


def written(tensors: list[Any], folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    """What a file of these tensors holds."""
    return written_to(folder / "file.safetensors", tensors, dtype)


def written_to(path: Path, tensors: list[Any], dtype: torch.dtype = torch.float32) -> Tensors:
    write_files(path.parent, {path.name: tensors}, dtype)
    return {name: tensor.clone() for name, tensor in load_file(path).items()}  # load_file maps, and a test may write again


def pieces(tensors: Tensors) -> list[Any]:
    return [whole(name, tensor) for name, tensor in tensors.items()]


def assert_equal(got: Tensors, expected: Tensors) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


# ---------------------------------------------------------------------------------------------------------------------
# all weights


@pytest.mark.parametrize("form", ["bfl", "comfyui"])
@pytest.mark.parametrize("model", MODELS)
def test_diffusers_converts_the_original_names_back(tmp_path: Path, model: str, form: Any) -> None:
    model_class, _, convert, _ = MODELS[model]
    expected = state_dict(model)
    got = written(export.weights(pieces(expected), model_class.__name__, form), tmp_path)
    assert not got.keys() & expected.keys() - {name for name in expected if name.startswith("txt_mode_blocks")}
    assert_equal(convert(got), expected)


@pytest.mark.parametrize("model", ["FLUX.2", "FLUX.3"])
def test_diffusers_loads_the_single_file(tmp_path: Path, model: str) -> None:
    original = transformer(model)
    original.save_config(tmp_path / "config")
    tensors = pieces(original.state_dict())
    write_files(tmp_path, {"all.safetensors": export.weights(tensors, type(original).__name__, "bfl")}, torch.float32)
    loaded = type(original).from_single_file(str(tmp_path / "all.safetensors"), config=str(tmp_path / "config"))
    assert_equal(loaded.state_dict(), original.state_dict())


def test_a_tensor_without_a_name_or_its_other_parts_is_refused() -> None:
    names = {"x_embedder.weight": torch.ones(4, 2), "transformer_blocks.0.attn.to_k.weight": torch.ones(4, 2)}
    with pytest.raises(UserError, match=r"img_attn.qkv.weight cannot be put together: .*to_q.weight is missing"):
        export.weights(pieces(names), "FluxTransformer2DModel", "bfl")
    with pytest.raises(UserError, match="mystery has no name in the original"):
        export.weights(pieces({"mystery.weight": torch.ones(1)}), "FluxTransformer2DModel", "bfl")
    with pytest.raises(UserError, match="no other names are known for the layers of UNet"):
        export.weights(pieces(names), "UNet", "bfl")


# ---------------------------------------------------------------------------------------------------------------------
# LoRA

LAYERS: dict[str, Callable[[str], bool]] = {
    "all of the blocks": lambda name: "blocks" in name,
    "query and value": lambda name: name.endswith(("to_q", "to_v", "add_v_proj", "to_qkv_mlp_proj")),
}


def random_lora(model: str, wanted: Callable[[str], bool], module: nn.Module | None = None) -> Tensors:
    """By the names that PEFT gives; of FLUX.1 of the released width, unless a module is given."""
    if module is None:
        with torch.device("meta"):
            small = dict(num_layers=1, num_single_layers=1) if model == "FLUX.1" else MODELS[model][1]
            module = MODELS[model][0](**small)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear) and wanted(name):
            tensors[f"{name}.lora_A.default.weight"] = torch.randn(RANK, layer.in_features, generator=generator)
            tensors[f"{name}.lora_B.default.weight"] = torch.randn(layer.out_features, RANK, generator=generator)
    return tensors


def pipeline(model: str, module: nn.Module) -> Any:
    """A pipeline that can load LoRA files and no more; diffusers has none yet for FLUX.3."""

    class Pipeline(MODELS[model][3], DiffusionPipeline):
        def __init__(self, transformer: nn.Module, text_encoder: None = None):
            super().__init__()
            self.register_modules(transformer=transformer, text_encoder=text_encoder)

    return Pipeline(module)


def fused(model: str, module: nn.Module, lora_folder: Path) -> Tensors:
    """The weights after diffusers has loaded a LoRA and added it."""
    pipe = pipeline(model, module)
    pipe.load_lora_weights(lora_folder)
    pipe.fuse_lora()
    pipe.unload_lora_weights()
    return pipe.transformer.state_dict()


def direct(base: Tensors, tensors: Tensors, alpha: float = ALPHA) -> Tensors:
    """W + alpha / rank * B @ A in fp32."""
    changed = {name: tensor.float().clone() for name, tensor in base.items()}
    for name, down in tensors.items():
        if "lora_A" in name:
            up = tensors[name.replace("lora_A", "lora_B")]
            changed[name.replace("lora_A.default.", "")] += alpha / RANK * (up @ down)
    return changed


def lora_file(model: str, tensors: Tensors, form: Any, folder: Path, alpha: float = ALPHA) -> Tensors:
    lora = export.lora_of(pieces(tensors), alpha)
    folder.mkdir(exist_ok=True)
    return written_to(folder / FILE_NAME, export.lora_weights(lora, MODELS[model][0].__name__, form))


@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("model", MODELS)
def test_diffusers_reads_the_comfyui_lora(tmp_path: Path, model: str, layers: str) -> None:
    tensors = random_lora(model, LAYERS[layers])
    file = lora_file(model, tensors, "comfyui", tmp_path)
    got = MODELS[model][3].lora_state_dict(dict(file))
    adapted = [name.removesuffix(".lora_A.default.weight") for name in tensors if "lora_A" in name]
    assert adapted
    for layer in adapted:
        down, up = (got.pop(f"transformer.{layer}.lora_{side}.weight") for side in "AB")
        a, b = (tensors[f"{layer}.lora_{side}.default.weight"] for side in "AB")
        if model == "FLUX.3":
            assert torch.equal(down, a) and torch.equal(up, b * ALPHA / RANK)
        else:  # the converters put the scale into the down matrix
            assert torch.equal(up, b) and torch.equal(down, a * (ALPHA / RANK))
    assert all(not tensor.any() for tensor in got.values()), "parts of fused layers without an adapter"
    assert bool(got) == (layers == "query and value" and model != "FLUX.3")


@pytest.mark.parametrize("alpha", [ALPHA, float(RANK)])
@pytest.mark.parametrize("model", MODELS)
def test_every_pipeline_loads_the_default_lora_at_its_scale(tmp_path: Path, model: str, alpha: float) -> None:
    module = transformer(model)
    tensors = random_lora(model, lambda name: name != "proj_out", module)
    expected = direct(module.state_dict(), tensors, alpha)
    file = lora_file(model, tensors, "diffusers", tmp_path, alpha)
    assert any(name.endswith(".alpha") for name in file) == (model == "FLUX.1" and alpha != RANK)
    got = fused(model, module, tmp_path)
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)


def test_the_final_norm_of_a_comfyui_lora_is_swapped(tmp_path: Path) -> None:
    for model in ("FLUX.2", "FLUX.3"):
        tensors = random_lora(model, lambda name: name == "norm_out.linear")
        up = tensors["norm_out.linear.lora_B.default.weight"]
        file = lora_file(model, tensors, "comfyui", tmp_path / model, alpha=RANK)
        (got,) = (tensor for name, tensor in file.items() if "final_layer" in name and ("lora_up" in name or "lora_B" in name))
        scale, shift = up.chunk(2)
        assert torch.equal(got, torch.cat([shift, scale]))


def test_a_lora_that_cannot_be_written_is_refused() -> None:
    tensors = random_lora("FLUX.2", lambda name: "to_q" in name)
    lora = export.lora_of(pieces(tensors), ALPHA)
    with pytest.raises(UserError, match="choose diffusers or comfyui"):
        export.lora_weights(lora, "Flux2Transformer2DModel", "bfl")
    name = next(iter(tensors))
    with pytest.raises(UserError, match="all of one rank"):
        export.lora_of(pieces({**tensors, name: torch.ones(RANK + 1, 32)}), ALPHA)
    with pytest.raises(UserError, match="a lora_A and a lora_B for each"):
        export.lora_of(pieces({name: tensors[name]}), ALPHA)
    with pytest.raises(UserError, match="by diffusers' names, found mystery.weight"):
        export.lora_of(pieces({"mystery.weight": torch.ones(1)}), ALPHA)


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
