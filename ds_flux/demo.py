"""`ds-flux demo`: a small FLUX.1 and scikit-learn's handwritten digits, and the score of what a run made of them.

The model folder has the layout and the classes of the released one; only the sizes differ.  Text encoders and transformer
are random, the tokenizers are built from the captions' words, the autoencoder is trained here.  Nothing is downloaded.
"""

import json
import string
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from jsonargparse import ArgumentParser
from PIL import Image
from torch import Tensor
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast

from ds_flux import UserError
from ds_flux.flags import parse
from ds_flux.manifest import find
from ds_flux.models import initial_weight

DIGITS = "zero one two three four five six seven eight nine".split()
WORDS = ["a", "handwritten", *DIGITS]
RESOLUTION = 32
MAX_SEQUENCE_LENGTH = 8
NUM_SCORED = 100
TRANSFORMER = dict(
    num_layers=2, num_single_layers=4, num_attention_heads=4, attention_head_dim=32, axes_dims_rope=(8, 12, 12),
    in_channels=16, joint_attention_dim=64, pooled_projection_dim=32, guidance_embeds=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """demo"""

    output_dir: str = "demo"
    """where to write model/, digits/ and run.yaml, or where they are"""
    score: str | None = None
    """instead of writing: score this consolidated transformer folder with the stock pipeline"""
    began: int | None = None
    """with --score: when the whole demo began, in seconds since 1970, to report how long it took"""
    autoencoder_steps: int = 250
    """training steps of the autoencoder"""
    seed: int = 0
    """of the random weights and of the scored images"""


def main(argv: list[str]) -> int:
    """Write the demo, or score a run of it."""
    parser = ArgumentParser(prog="ds-flux demo", exit_on_error=False)
    parser.add_class_arguments(DemoConfig)
    config = DemoConfig(**parse(parser, argv).as_dict())
    folder = Path(config.output_dir)
    if config.score:
        print_report(report(folder, Path(config.score), config.seed, config.began))
        return 0
    images, labels = digits()
    write_model(folder / "model", images, config.autoencoder_steps, config.seed)
    write_dataset(folder / "digits", images, labels)
    (folder / "run.yaml").write_text(recipe(folder))
    print(f"wrote {folder / 'model'}, {folder / 'digits'} ({len(images)} images) and {folder / 'run.yaml'}")
    return 0


def caption(digit: int) -> str:
    """The prompt of a digit."""
    return f"a handwritten {DIGITS[digit]}"


def digits() -> tuple[list[Image.Image], list[int]]:
    """scikit-learn's 1,797 scanned digits, 8 x 8 with 17 grey levels, enlarged; and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the demo needs scikit-learn: pip install 'ds_flux[demo]'") from None
    data = load_digits()
    small = [Image.fromarray((image * 255 / 16).round().astype(np.uint8)) for image in data.images]
    size = (RESOLUTION, RESOLUTION)
    return [image.resize(size, Image.Resampling.BICUBIC).convert("RGB") for image in small], data.target.tolist()


def write_dataset(folder: Path, images: list[Image.Image], labels: list[int]) -> None:
    """A data set for `--dataset_name`, with the columns image and text."""
    rows = {"image": images, "text": [caption(label) for label in labels]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder)


def recipe(folder: Path) -> str:
    """The settings of the demo's run; `launch/recipes` has those of real ones."""
    return f"""\
pretrained_model_name_or_path: {folder / "model"}
dataset_name: {folder / "digits"}
caption_column: text
output_dir: {folder / "out"}
resolution: {RESOLUTION}
max_sequence_length: {MAX_SEQUENCE_LENGTH}
mixed_precision: 'no'
weighting_scheme: logit_normal
train_batch_size: 32
max_train_steps: 700
learning_rate: 2.0e-3
adam_beta2: 0.99
adam_weight_decay: 0.01
lr_scheduler: cosine
lr_warmup_steps: 50
proportion_empty_prompts: 0.0
checkpointing_steps: 500
checkpoints_total_limit: 2
"""


def write_model(
    folder: Path, images: list[Image.Image], autoencoder_steps: int, seed: int, transformer: dict[str, Any] = TRANSFORMER
) -> None:
    """A FLUX.1 pipeline folder of small, stock components, saved by the stock pipeline."""
    torch.manual_seed(seed)
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(), make_t5_tokenizer()
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=train_autoencoder(images, autoencoder_steps),
        text_encoder=make_clip(clip_tokenizer, transformer["pooled_projection_dim"]),
        tokenizer=clip_tokenizer,
        text_encoder_2=make_t5(t5_tokenizer, transformer["joint_attention_dim"]),
        tokenizer_2=t5_tokenizer,
        transformer=make_transformer(transformer, seed),
    )
    pipeline.save_pretrained(folder)


def make_transformer(config: dict[str, Any], seed: int) -> FluxTransformer2DModel:
    """The transformer that pre-training would start from."""
    transformer = FluxTransformer2DModel(**config)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            initial_weight(name, parameter, seed)
    return transformer


def make_t5_tokenizer() -> T5TokenizerFast:
    """A piece for each word of the captions, and letters for everything else."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [("\u2581" + word, -1.0) for word in WORDS]
    letters = [(letter, -10.0) for letter in "\u2581" + string.ascii_lowercase]
    return T5TokenizerFast(vocab=special + words + letters, extra_ids=0)


def make_clip_tokenizer() -> CLIPTokenizer:
    """Byte pairs that merge each word of the captions into one token."""
    letters = [*string.ascii_lowercase, *(letter + "</w>" for letter in string.ascii_lowercase)]
    tokens = dict.fromkeys(letters)
    merges = {}
    for word in WORDS:
        left, *rest = [*word[:-1], word[-1] + "</w>"]
        for right in rest:
            merges[left, right] = None
            left += right
            tokens[left] = None
    names = [*tokens, "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(names)}
    return CLIPTokenizer(vocab=vocab, merges=list(merges), model_max_length=16)


def make_clip(tokenizer: CLIPTokenizer, width: int) -> CLIPTextModel:
    """A random CLIP text encoder."""
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, projection_dim=width,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return CLIPTextModel(config).eval()


def make_t5(tokenizer: T5TokenizerFast, width: int) -> T5EncoderModel:
    """A random T5 encoder of version 1.1's shape, which FLUX.1 uses."""
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=width // 4, d_ff=2 * width, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5EncoderModel(config).eval()


def train_autoencoder(images: list[Image.Image], num_steps: int, batch_size: int = 32) -> AutoencoderKL:
    """A small autoencoder (4 times smaller latents, 4 channels) that knows these images; latents normalised like FLUX's."""
    autoencoder = AutoencoderKL(
        block_out_channels=(16, 32, 32), down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3, layers_per_block=1, latent_channels=4, norm_num_groups=8,
        use_quant_conv=False, use_post_quant_conv=False, mid_block_add_attention=False,
    )  # fmt: skip
    pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images]).float() / 127.5 - 1
    optimizer = torch.optim.AdamW(autoencoder.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=max(num_steps, 1))
    for _ in (bar := tqdm(range(num_steps), desc="train the autoencoder")):
        loss = autoencoder_loss(autoencoder, pixels[torch.randint(len(pixels), (batch_size,))])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
    with torch.no_grad():
        latents = autoencoder.encode(pixels[:256]).latent_dist.mode()
    autoencoder.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return autoencoder.eval().requires_grad_(False)


def autoencoder_loss(autoencoder: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Reconstruction error, plus a little of the divergence that keeps the latents near a normal distribution."""
    posterior = autoencoder.encode(pixels).latent_dist
    reconstruction = autoencoder.decode(posterior.sample()).sample
    return (reconstruction - pixels).square().mean() + 1e-4 * posterior.kl().mean() / pixels[0].numel()


def report(folder: Path, transformer: Path, seed: int, began: int | None) -> dict[str, Any]:
    """What the run of the demo came to; losses are means over the first and the last 20 steps."""
    recognised, grid = score(folder, transformer, seed)
    losses = [json.loads(line)["loss"] for line in (folder / "out/logs/metrics.jsonl").read_text().splitlines()]
    return {
        "digits_recognised": recognised,
        "loss_first": round(sum(losses[:20]) / 20, 4),
        "loss_last": round(sum(losses[-20:]) / 20, 4),
        "seconds": round(time.time() - began) if began else None,
        "checkpoint": str(find(folder / "out", "latest")),
        "transformer": str(transformer),
        "grid": str(grid),
    }


def print_report(figures: dict[str, Any]) -> None:
    """For a person, then the same as one line of JSON."""
    print(
        f"loss {figures['loss_first']} -> {figures['loss_last']}\n"
        f"{figures['digits_recognised']} of {NUM_SCORED} generated digits are recognised as the digit asked for\n"
        f"look at them:          {figures['grid']}\n"
        f"ZeRO checkpoint:       {figures['checkpoint']}\n"
        f"diffusers transformer: {figures['transformer']}"
    )
    print(json.dumps(figures))


def score(folder: Path, transformer: Path, seed: int) -> tuple[int, Path]:
    """Ask the stock pipeline for each digit ten times; how many a classifier recognises, and a picture of all."""
    images, labels = digits()
    pipeline = FluxPipeline.from_pretrained(
        folder / "model", transformer=FluxTransformer2DModel.from_pretrained(transformer, torch_dtype=torch.float32)
    )
    num_each = NUM_SCORED // len(DIGITS)
    wanted = [digit for digit in range(len(DIGITS)) for _ in range(num_each)]
    made = pipeline(
        [caption(digit) for digit in wanted],
        height=RESOLUTION, width=RESOLUTION, num_inference_steps=20, max_sequence_length=MAX_SEQUENCE_LENGTH,
        generator=torch.Generator().manual_seed(seed),
    ).images  # fmt: skip
    seen = classify(images, labels, made)
    save_grid(made, num_each, folder / "digits.png")
    return sum(a == b for a, b in zip(wanted, seen)), folder / "digits.png"


def classify(images: list[Image.Image], labels: list[int], made: list[Image.Image]) -> list[int]:
    """What a support vector machine trained on the real digits takes the made ones for."""
    from sklearn.svm import SVC

    def features(batch: list[Image.Image]) -> np.ndarray:
        small = [image.convert("L").resize((8, 8), Image.Resampling.BOX) for image in batch]
        return np.stack([np.array(image).flatten() / 255 * 16 for image in small])

    return SVC(gamma=0.001).fit(features(images), labels).predict(features(made)).tolist()


def save_grid(images: list[Image.Image], columns: int, path: Path, scale: int = 2) -> None:
    """One PNG of all images, row by row."""
    width, height = images[0].width * scale, images[0].height * scale
    grid = Image.new("RGB", (columns * width, -(-len(images) // columns) * height))
    for place, image in enumerate(images):
        row, column = divmod(place, columns)
        grid.paste(image.resize((width, height), Image.Resampling.NEAREST), (column * width, row * height))
    grid.save(path)
