"""The model that the benchmarks share: a FLUX.1 transformer of about 160 million weights and small encoders."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from PIL import Image

from ds_flux import demo
from ds_flux.families import tiny
from tests.distributed import ROOT

RESOLUTION, NUM_IMAGE_TOKENS, NUM_TEXT_TOKENS, NUM_IMAGES = 256, 256, 64, 64
TRANSFORMER = dict(
    num_layers=4, num_single_layers=8, num_attention_heads=12, attention_head_dim=64, axes_dims_rope=(8, 28, 28),
    in_channels=64, joint_attention_dim=256, pooled_projection_dim=64, guidance_embeds=True,
)  # fmt: skip


def write(folder: Path) -> None:
    """model/ (fp32, as trained models are stored) and images/, unless they are there."""
    if (folder / "done").exists():
        return
    torch.manual_seed(0)
    channels = (8, 8, 8, 8)
    autoencoder = AutoencoderKL(
        block_out_channels=channels, down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1, latent_channels=16, norm_num_groups=4, shift_factor=0.1159, scaling_factor=0.3611,
        mid_block_add_attention=False,
    )  # fmt: skip
    FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=autoencoder,
        **tiny.clip_and_t5(demo.WORDS, TRANSFORMER),
        transformer=FluxTransformer2DModel(**TRANSFORMER),
    ).save_pretrained(folder / "model", max_shard_size="200MB")
    (folder / "images").mkdir(exist_ok=True)
    for number in range(NUM_IMAGES):
        color = tuple(int(x) for x in torch.randint(0, 256, (3,)))
        Image.new("RGB", (RESOLUTION, RESOLUTION), color).save(folder / f"images/{number}.png")
    (folder / "done").touch()


def flags(folder: Path, output_dir: Path, num_steps: int) -> list[str]:
    """Of `ds-flux train` on these, under ZeRO-3 and without checkpoints on the way."""
    arguments = {
        "pretrained_model_name_or_path": folder / "model", "instance_data_dir": folder / "images",
        "instance_prompt": "a handwritten seven", "output_dir": output_dir, "resolution": RESOLUTION,
        "max_sequence_length": NUM_TEXT_TOKENS, "mixed_precision": "bf16", "train_batch_size": 2,
        "max_train_steps": num_steps, "deepspeed_config": ROOT / "ds_configs/zero3.json",
        "text_encoder_deepspeed_config": ROOT / "ds_configs/text_encoder_zero3.json", "checkpointing_steps": 10**6,
    }  # fmt: skip
    return [f"--{name}={value}" for name, value in arguments.items()]
