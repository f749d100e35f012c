"""The small model of every family runs in its stock pipeline, and tells words apart."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, DiffusionPipeline, FluxKontextPipeline, ModularPipeline
from PIL import Image
from transformers import ProcessorMixin

from ds_flux.families import tiny

WORDS = "a handwritten zero one two the cat at".split()
SIZE = dict(height=32, width=32, num_inference_steps=2)
SEQUENCE = {"flux1": 16, "kontext": 16, "flux2": 64, "flux2-klein": 32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model folder of every family."""
    folders = {name: tmp_path_factory.mktemp("tiny") / name for name in tiny.TINY}
    for name, folder in folders.items():
        tiny.write(name, folder, None, 0, WORDS)
    return folders


def load(name: str, folder: Path, without: tuple[str, ...] = ()) -> Any:
    """The stock pipeline; FLUX.3's without its prompt upsampler and the blocks named in `without`."""
    if name != "flux3":
        return DiffusionPipeline.from_pretrained(folder)
    blocks = ModularPipeline.from_pretrained(str(folder)).blocks
    for block in ("prompt_upsampler", *without):
        blocks.sub_blocks.pop(block)
    pipeline = blocks.init_pipeline(str(folder))
    pipeline.load_components()
    return pipeline


def generate(pipeline: Any, **inputs: Any) -> Image.Image:
    """One image from the same noise, whichever kind of pipeline."""
    inputs["generator"] = torch.Generator().manual_seed(0)
    if isinstance(pipeline, ModularPipeline):
        return pipeline(**inputs, output="images")[0]
    if isinstance(pipeline, FluxKontextPipeline):
        inputs |= dict(max_area=32 * 32, _auto_resize=False)
    return pipeline(**inputs).images[0]


def reference(width: int = 64) -> Image.Image:
    """A reference image: a ramp."""
    return Image.linear_gradient("L").resize((width, 64)).convert("RGB")


def features(pipeline: Any, name: str, prompt: str) -> torch.Tensor:
    """The token states that the stock pipeline's text encoding gives the transformer."""
    if name == "flux3":
        state = pipeline(prompt=prompt, **SIZE, output=["prompt_embeds"])
        return state["prompt_embeds"]
    second = {"prompt_2": None} if name in ("flux1", "kontext") else {}
    return pipeline.encode_prompt(prompt=prompt, max_sequence_length=SEQUENCE[name], **second)[0]


@pytest.mark.parametrize("name", tiny.TINY)
def test_the_stock_pipeline_makes_images(folders: dict[str, Path], name: str) -> None:
    pipeline = load(name, folders[name])
    lengths = {"max_sequence_length": SEQUENCE[name]} if name in SEQUENCE else {}
    image = generate(pipeline, prompt="a handwritten two", **SIZE, **lengths)
    assert image.size == (32, 32)
    if name != "flux1":
        edited = generate(pipeline, prompt="a handwritten two", image=reference(), **SIZE, **lengths)
        assert edited.size == (32, 32)
        assert edited.tobytes() != image.tobytes()


@pytest.mark.parametrize("name", tiny.TINY)
@torch.no_grad()
def test_words_are_tokens_with_states_of_their_own(folders: dict[str, Path], name: str) -> None:
    pipeline = load(name, folders[name])
    for key in ("tokenizer", "tokenizer_2")[: 1 + (name in ("flux1", "kontext"))]:
        tokenizer = vars(pipeline)[key]
        tokenizer = tokenizer.tokenizer if isinstance(tokenizer, ProcessorMixin) else tokenizer
        ids = [tuple(tokenizer(" " + word, add_special_tokens=False).input_ids) for word in WORDS]
        assert {len(own) for own in ids} == {1} and len(set(ids)) == len(WORDS)
        assert tokenizer("\u00dcber \u6f22 \U0001f642\n42", add_special_tokens=False).input_ids  # spelt, or unknown
    one, two = (features(pipeline, name, f"a handwritten {word}") for word in ("one", "two"))
    difference = (one - two).norm(dim=-1) / one.norm(dim=-1).mean()
    assert difference.max() > 0.5
    assert torch.equal(one, features(pipeline, name, "a handwritten one"))


def test_flux3_runs_without_text_encoder(folders: dict[str, Path]) -> None:
    whole = load("flux3", folders["flux3"])
    embeds = {
        "prompt_embeds": features(whole, "flux3", "a handwritten two"),
        "negative_prompt_embeds": features(whole, "flux3", ""),
    }
    pipeline = load("flux3", folders["flux3"], without=("text_encoder",))
    assert "text_encoder" not in pipeline.components
    image = generate(pipeline, **embeds, **SIZE)
    assert image.tobytes() == generate(whole, prompt="a handwritten two", **SIZE).tobytes()
    references = [reference(), reference(width=96)]
    assert generate(pipeline, **embeds, **SIZE, image=references).tobytes() != image.tobytes()
    pipeline.update_components(guider=ClassifierFreeGuidance(guidance_scale=1.0))
    assert generate(pipeline, prompt_embeds=embeds["prompt_embeds"], **SIZE).tobytes() != image.tobytes()


def test_what_is_given_is_saved(tmp_path: Path) -> None:
    autoencoder = tiny.make_autoencoder("flux2-klein")
    for folder in (tmp_path / "a", tmp_path / "b"):
        tiny.write("flux2-klein", folder, autoencoder, 1, WORDS, {"num_layers": 2, "joint_attention_dim": 3 * 16})
    assert (tmp_path / "a/tokenizer/tokenizer.json").read_text() == (tmp_path / "b/tokenizer/tokenizer.json").read_text()
    first, second = (DiffusionPipeline.from_pretrained(tmp_path / name) for name in "ab")
    assert len(first.transformer.transformer_blocks) == 2 and first.text_encoder.config.hidden_size == 16
    assert torch.equal(first.vae.bn.running_var, autoencoder.bn.running_var)
    for part in ("transformer", "text_encoder", "vae"):
        for one, two in zip(first.components[part].parameters(), second.components[part].parameters()):
            assert torch.equal(one, two)


def test_statistics_of_random_autoencoders_matter() -> None:
    statistics = tiny.make_autoencoder("flux2").bn
    assert statistics.running_mean.abs().max() > 0.1 and (statistics.running_var - 1).abs().max() > 0.1
