"""FLUX.2: dev with Mistral-3, klein with Qwen3."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.loaders import Flux2LoraLoaderMixin
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu, format_input
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, MistralModel, Qwen3Model

from ds_flux.families.decoder import render, stacked_states, tokenize
from ds_flux.families.spec import FluxFamily, SampleRequest, TextEncoderSpec
from ds_flux.latents import Positions

ENCODER = "text_encoder"


def latent_statistics(autoencoder: AutoencoderKLFlux2) -> tuple[Tensor, Tensor]:
    """The running statistics of the autoencoder's batch norm, which the pipeline applies to patchified latents."""
    norm = autoencoder.bn
    std = (norm.running_var.float() + autoencoder.config.batch_norm_eps).sqrt()
    return norm.running_mean.float().view(1, -1, 1, 1), std.view(1, -1, 1, 1)


def text_length(_config: dict[str, Any]) -> int:
    """Of both pipelines."""
    return 512


def mistral_texts(tokenizer: Any, prompts: list[str]) -> list[str]:
    """The pipeline's conversations: its system message, then the prompt."""
    return [render(tokenizer, conversation) for conversation in format_input(prompts)]


def qwen_texts(tokenizer: Any, prompts: list[str]) -> list[str]:
    """One user turn, and an answer that begins with no thoughts."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [render(tokenizer, turn, add_generation_prompt=True, enable_thinking=False) for turn in turns]


Texts = Callable[[Any, list[str]], list[str]]


def special_tokens(tokenizer: Any, texts: list[str]) -> dict[str, bool]:
    """Whether the tokenizer adds its own: not where the template has begun with one, as the processors decide."""
    begun = tokenizer.bos_token is not None and texts[0].startswith(tokenizer.bos_token)
    return {"add_special_tokens": not begun}


def count_tokens(texts_of: Texts, tokenizers: dict[str, Any], prompts: list[str]) -> list[int]:
    """Tokens of each prompt, template included."""
    texts = texts_of(tokenizers[ENCODER], prompts)
    return [len(ids) for ids in tokenizers[ENCODER](texts, **special_tokens(tokenizers[ENCODER], texts)).input_ids]


def encode_text(
    texts_of: Texts,
    layers: tuple[int, ...],
    encoders: dict[str, Callable[..., Any]],
    tokenizers: dict[str, Any],
    prompts: dict[str, list[str]],
    max_sequence_length: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """What the pipeline's `encode_prompt` computes: stacked hidden states (B, L, layers * D), padding included."""
    texts = texts_of(tokenizers[ENCODER], prompts[ENCODER])
    special = special_tokens(tokenizers[ENCODER], texts)
    ids, mask = tokenize(tokenizers[ENCODER], texts, max_sequence_length, **special)
    return {"encoder_hidden_states": stacked_states(encoders[ENCODER], ids.to(device), mask.to(device), layers)}


def arguments_of(request: SampleRequest) -> dict[str, Any]:
    """What both pipelines are called with."""
    guidance = {} if request.guidance_scale is None else {"guidance_scale": request.guidance_scale}
    return guidance | {
        "image": request.references or None,
        "prompt_embeds": request.text["encoder_hidden_states"],
        "height": request.height,
        "width": request.width,
        "num_inference_steps": request.num_inference_steps,
        "generator": request.generator,
    }


def sample(components: dict[str, Any], request: SampleRequest) -> Image.Image:
    """By `Flux2Pipeline`; guidance is the distilled value."""
    pipeline = Flux2Pipeline(**components, text_encoder=None, tokenizer=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(**arguments_of(request)).images[0]


def sample_klein(components: dict[str, Any], request: SampleRequest) -> Image.Image:
    """By `Flux2KleinPipeline`; guidance is classifier-free, or none where the model is step-distilled."""
    pipeline = Flux2KleinPipeline(**components, text_encoder=None, tokenizer=None, is_distilled=request.is_distilled)
    pipeline.set_progress_bar_config(disable=True)
    null = request.null_text["encoder_hidden_states"]
    return pipeline(**arguments_of(request), negative_prompt_embeds=null).images[0]


DEV = dict(
    num_layers=8, num_single_layers=48, attention_head_dim=128, num_attention_heads=48, in_channels=128,
    joint_attention_dim=15360, guidance_embeds=True,
)  # fmt: skip
KLEIN = {**DEV, "guidance_embeds": False}
MISTRAL_LAYERS, QWEN_LAYERS = (10, 20, 30), (9, 18, 27)
MISTRAL_24B = dict(
    hidden_size=5120, intermediate_size=32768, num_hidden_layers=40, num_attention_heads=32, num_key_value_heads=8,
    head_dim=128, vocab_size=131072,
)  # fmt: skip
QWEN3 = dict(num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=151936)
QWEN3_4B = {**QWEN3, "hidden_size": 2560, "intermediate_size": 9728}
QWEN3_8B = {**QWEN3, "hidden_size": 4096, "intermediate_size": 12288}

FLUX2 = FluxFamily(
    name="flux2",
    transformer_class=Flux2Transformer2DModel,
    autoencoder_class=AutoencoderKLFlux2,
    text_encoders=(
        TextEncoderSpec(
            component=ENCODER,
            tokenizer="tokenizer",
            architecture="Mistral3ForConditionalGeneration",
            model_class=MistralModel,
            tokenizer_class=AutoTokenizer,
            layers=MISTRAL_LAYERS,
            released={5120: MISTRAL_24B},
        ),
    ),
    positions=Positions(num_axes=4, reference_stride=10),
    lora_layers=(
        "attn.to_k",
        "attn.to_q",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_k_proj",
        "attn.add_q_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
        "attn.to_qkv_mlp_proj",
        "single_transformer_blocks.*.attn.to_out",
    ),  # fmt: skip
    lora_loader=Flux2LoraLoaderMixin,
    flavours={"flux2-dev": DEV},
    text_length=text_length,
    latent_statistics=latent_statistics,
    count_tokens=partial(count_tokens, mistral_texts),
    encode_text=partial(encode_text, mistral_texts, MISTRAL_LAYERS),
    sampling_mu=compute_empirical_mu,
    sample=sample,
)

FLUX2_KLEIN = replace(
    FLUX2,
    name="flux2-klein",
    text_encoders=(
        replace(
            FLUX2.text_encoders[0],
            architecture="Qwen3ForCausalLM",
            model_class=Qwen3Model,
            layers=QWEN_LAYERS,
            released={2560: QWEN3_4B, 4096: QWEN3_8B},
        ),
    ),
    flavours={
        "flux2-klein-4b": {
            **KLEIN,
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
        },
        "flux2-klein-9b": {
            **KLEIN,
            "num_layers": 8,
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
        },
    },  # fmt: skip
    count_tokens=partial(count_tokens, qwen_texts),
    encode_text=partial(encode_text, qwen_texts, QWEN_LAYERS),
    sample=sample_klein,
)
