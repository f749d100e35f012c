"""`ds-flux consolidate --format` and `--merge_lora`, held against diffusers' own converters and loaders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, Flux2Transformer2DModel, Flux3Transformer2DModel, FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from diffusers.loaders.lora_pipeline import Flux2LoraLoaderMixin, Flux3LoraLoaderMixin, FluxLoraLoaderMixin
from safetensors.torch import load_file
from torch import Tensor, nn

from ds_flux import UserError, export
from ds_flux.lora import FILE_NAME
from ds_flux.streaming import whole, write_files

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
