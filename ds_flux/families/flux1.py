"""FLUX.1: dev, schnell, Krea, Kontext; CLIP and T5."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.loaders import FluxLoraLoaderMixin
from PIL import Image
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from ds_flux import UserError
from ds_flux.families.spec import FluxFamily, SampleRequest, TextEncoderSpec
from ds_flux.latents import Positions


def latent_statistics(autoencoder: AutoencoderKL) -> tuple[Tensor, Tensor]:
    """One mean and one standard deviation for all channels: the pipeline's (x - shift_factor) * scaling_factor."""
    config = autoencoder.config
    shape = (1, 4 * config.latent_channels, 1, 1)
    return torch.full(shape, config.shift_factor), torch.full(shape, 1 / config.scaling_factor)


def encode_text(
    encoders: dict[str, Callable[..., Any]],
    tokenizers: dict[str, Any],
    prompts: dict[str, list[str]],
    max_sequence_length: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """What `FluxPipeline.encode_prompt` computes: T5's states (B, L, D), padding included, and CLIP's pooled state (B, D).

    Args:
        prompts: {text encoder: one prompt for each sample}; they differ where prompt dropout emptied one of them.
    """
    clip, t5 = "text_encoder", "text_encoder_2"
    clip_ids = tokenize(tokenizers[clip], prompts[clip], tokenizers[clip].model_max_length)
    t5_ids = tokenize(tokenizers[t5], prompts[t5], max_sequence_length)
    return {
        "encoder_hidden_states": encoders[t5](input_ids=t5_ids.to(device))[0],
        "pooled_projections": encoders[clip](input_ids=clip_ids.to(device)).pooler_output,
    }


def count_tokens(tokenizers: dict[str, Any], prompts: list[str]) -> list[int]:
    """Tokens of each prompt in T5; CLIP, which sees 77, only gives the pooled state."""
    return [len(ids) for ids in tokenizers["text_encoder_2"](prompts).input_ids]


def text_length(config: dict[str, Any]) -> int:
    """512 with guidance embedding (dev, Krea, Kontext), 256 without (schnell)."""
    return 512 if config.get("guidance_embeds") else 256


def tokenize(tokenizer: Any, prompts: list[str], max_length: int) -> Tensor:
    """Token ids (B, max_length): padded to the full length, as the pipeline does, and cut there."""
    return tokenizer(prompts, padding="max_length", max_length=max_length, truncation=True, return_tensors="pt").input_ids


def sampling_mu(num_image_tokens: int, _num_steps: int) -> float:
    """`calculate_shift` of diffusers' FLUX.1 pipeline with the released schedulers' values."""
    slope = (1.15 - 0.5) / (4096 - 256)
    return slope * num_image_tokens + 0.5 - slope * 256


def sample(components: dict[str, Any], request: SampleRequest) -> Image.Image:
    """By `FluxPipeline`, or with references by `FluxKontextPipeline`, which takes one."""
    from diffusers import FluxKontextPipeline, FluxPipeline  # with image encoders, which training does without

    bare = {"text_encoder": None, "tokenizer": None, "text_encoder_2": None, "tokenizer_2": None}
    arguments: dict[str, Any] = {
        "prompt_embeds": request.text["encoder_hidden_states"],
        "pooled_prompt_embeds": request.text["pooled_projections"],
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.num_inference_steps,
        "generator": request.generator,
    }
    if request.guidance_scale is not None:
        arguments["guidance_scale"] = request.guidance_scale
    if not request.references:
        pipeline = FluxPipeline(**components, **bare)
    elif len(request.references) > 1:
        raise UserError(f"the stock pipeline of this model takes one reference image, got {len(request.references)}")
    else:
        pipeline = FluxKontextPipeline(**components, **bare)
        # the pipeline would move every size to about a megapixel
        reference = request.references[0]
        height, width = request.height or reference.height, request.width or reference.width
        arguments |= {"image": reference, "height": height, "width": width}
        arguments |= {"max_area": height * width, "_auto_resize": False}
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(**arguments).images[0]


RELEASED = dict(
    num_layers=19, num_single_layers=38, attention_head_dim=128, num_attention_heads=24, in_channels=64,
    joint_attention_dim=4096, pooled_projection_dim=768, axes_dims_rope=(16, 56, 56),
)  # fmt: skip
DEBUG = dict(
    num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, in_channels=64,
    joint_attention_dim=4096, pooled_projection_dim=768, axes_dims_rope=(4, 6, 6), guidance_embeds=True,
)  # fmt: skip
CLIP_L = dict(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768,
)  # fmt: skip
T5_XXL = dict(
    d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, vocab_size=32128, feed_forward_proj="gated-gelu",
)  # fmt: skip
AUTOENCODER = dict(
    block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=16, use_quant_conv=False,
    use_post_quant_conv=False,
)  # fmt: skip

FLUX1 = FluxFamily(
    name="flux1",
    transformer_class=FluxTransformer2DModel,
    autoencoder_class=AutoencoderKL,
    text_encoders=(
        TextEncoderSpec(
            component="text_encoder",
            tokenizer="tokenizer",
            architecture="CLIPTextModel",
            model_class=CLIPTextModel,
            tokenizer_class=CLIPTokenizer,
            argument="pooled_projections",
            width_key="pooled_projection_dim",
            is_large=False,
            released={768: CLIP_L},
        ),
        TextEncoderSpec(
            component="text_encoder_2",
            tokenizer="tokenizer_2",
            architecture="T5EncoderModel",
            model_class=T5EncoderModel,
            tokenizer_class=T5TokenizerFast,
            released={4096: T5_XXL},
        ),
    ),
    positions=Positions(num_axes=3, reference_stride=1),
    lora_layers=(
        "attn.to_k",
        "attn.to_q",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    ),  # fmt: skip
    lora_loader=FluxLoraLoaderMixin,
    flavours={
        "debug": DEBUG,
        "dev": {**RELEASED, "guidance_embeds": True},
        "schnell": {**RELEASED, "guidance_embeds": False},
    },
    released_autoencoder=AUTOENCODER,
    text_length=text_length,
    latent_statistics=latent_statistics,
    count_tokens=count_tokens,
    encode_text=encode_text,
    sampling_mu=sampling_mu,
    sample=sample,
)
