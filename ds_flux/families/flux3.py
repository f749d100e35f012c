"""FLUX.3: text from Qwen3-VL, references as arguments of their own, text windows in steps of 80 tokens."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux3Transformer2DModel
from diffusers.loaders import Flux3LoraLoaderMixin
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer, Qwen3VLTextModel

from ds_flux.families.decoder import render, stacked_states, tokenize
from ds_flux.families.flux2 import QWEN3_4B, count_tokens, latent_statistics
from ds_flux.families.spec import FluxFamily, SampleRequest, TextEncoderSpec
from ds_flux.latents import Positions

ENCODER = "text_encoder"
LAYERS = (4, 8, 12, 16, 20, 24, 28, 32)
WINDOW = 80
SHIFT = 6.93


def texts_of(tokenizer: Any, prompts: list[str]) -> list[str]:
    """One user turn, and the beginning of an answer."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [render(tokenizer, turn, add_generation_prompt=True) for turn in turns]


def text_length(_config: dict[str, Any]) -> int:
    """The pipeline's bound; most prompts fill one or a few windows."""
    return 8192


def encode_text(
    encoders: dict[str, Callable[..., Any]],
    tokenizers: dict[str, Any],
    prompts: dict[str, list[str]],
    max_sequence_length: int,
    device: torch.device,
) -> dict[str, Tensor]:
    """What `Flux3TextEncoderStep` computes: stacked hidden states (B, L, layers * D).

    The transformer attends to the padding, so L is part of the condition: the prompt's length rounded up to the window.
    A batch has one L, that of its longest prompt; who makes batches puts prompts of one window together.
    """
    longest = max(count_tokens(texts_of, tokenizers, prompts[ENCODER]))
    length = min(math.ceil(longest / WINDOW) * WINDOW, max_sequence_length)
    texts = texts_of(tokenizers[ENCODER], prompts[ENCODER])
    ids, mask = tokenize(tokenizers[ENCODER], texts, length, padding_side="right")
    # the step's own choice: padding sits at position 1, as in the model's training
    position_ids = torch.arange(length).expand(len(ids), -1).masked_fill(mask == 0, 1)
    states = stacked_states(encoders[ENCODER], ids.to(device), mask.to(device), LAYERS, position_ids.to(device))
    return {"encoder_hidden_states": states}


def sampling_mu(_num_image_tokens: int, _num_steps: int) -> float:
    """The constant shift of the sampling recipe, at every size."""
    return math.log(SHIFT)


def sample(components: dict[str, Any], request: SampleRequest) -> Image.Image:
    """By the modular pipeline, without its prompt upsampler; the text is encoded already."""
    from diffusers import ClassifierFreeGuidance  # these pull in what training does without
    from diffusers.modular_pipelines.flux3 import Flux3AutoBlocks, Flux3DistilledAutoBlocks

    blocks = (Flux3DistilledAutoBlocks if request.is_distilled else Flux3AutoBlocks)()
    for step in ("prompt_upsampler", "text_encoder"):
        blocks.sub_blocks.pop(step)
    pipeline = blocks.init_pipeline()
    pipeline.update_components(**components)
    arguments: dict[str, Any] = {"prompt_embeds": request.text["encoder_hidden_states"]}
    if not request.is_distilled:
        arguments["negative_prompt_embeds"] = request.null_text["encoder_hidden_states"]
        if request.guidance_scale is not None:
            pipeline.update_components(guider=ClassifierFreeGuidance(guidance_scale=request.guidance_scale))
    sizes = {"height": request.height, "width": request.width}
    arguments |= {name: size for name, size in sizes.items() if size is not None}
    if request.references:
        arguments["image"] = request.references
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(**arguments, num_inference_steps=request.num_inference_steps, generator=request.generator, output="images")[
        0
    ]


RELEASED = dict(
    in_channels=128, cond_in_channels=128, num_layers=5, num_single_layers=28, attention_head_dim=128, num_attention_heads=24,
    joint_attention_dim=20480,
)  # fmt: skip

FLUX3 = FluxFamily(
    name="flux3",
    transformer_class=Flux3Transformer2DModel,
    autoencoder_class=AutoencoderKLFlux2,
    text_encoders=(
        TextEncoderSpec(
            component=ENCODER,
            tokenizer="tokenizer",
            architecture="Qwen3VLForConditionalGeneration",
            model_class=Qwen3VLTextModel,
            tokenizer_class=AutoTokenizer,
            layers=LAYERS,
            released={2560: QWEN3_4B},
        ),
    ),
    positions=Positions(num_axes=4, scale=0.5, reference_axis=3, reference_stride=-1),
    reference_arguments=("image_cond_hidden_states", "image_cond_ids"),
    pads_single_reference=True,
    text_window=WINDOW,
    lora_layers=("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "single_transformer_blocks.*.ff.linear_*"),
    lora_loader=Flux3LoraLoaderMixin,
    flavours={"flux3": RELEASED},
    scheduler_config=dict(shift=SHIFT),
    text_length=text_length,
    latent_statistics=latent_statistics,
    count_tokens=partial(count_tokens, texts_of),
    encode_text=encode_text,
    sampling_mu=sampling_mu,
    sample=sample,
)
