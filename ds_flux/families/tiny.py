"""Small random models of every FLUX family, in the layout of the released repositories: for tests and the demo.

Each folder is built here from stock classes and loads offline with the family's stock pipeline; only the sizes differ from
the released model.  One token is 8 x 8 pixels: the autoencoders make latents 4 times smaller, with 4 channels.

The released FLUX.2 and FLUX.3 wrap their tokenizers in PixtralProcessor and Qwen3VLProcessor, which need torchvision even
for plain text.  Here LlavaProcessor wraps them, which does not, and has the same `tokenizer` and `apply_chat_template`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    Flux3ModularPipeline,
    Flux3Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPImageProcessorPil,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    LlavaProcessor,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2TokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from ds_flux.families import tiny_autoencoder

Components = dict[str, Any]

TRANSFORMER = dict(num_layers=1, num_single_layers=2, num_attention_heads=2, attention_head_dim=16, in_channels=16)
DEMO = dict(num_layers=2, num_single_layers=4, num_attention_heads=4, attention_head_dim=32)
# the default spread of 0.02 would leave all layers alike at these widths
DECODER = dict(
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=2048, initializer_range=0.1,
)  # fmt: skip
DYNAMIC_SHIFT = dict(use_dynamic_shifting=True, shift=3.0, base_shift=0.5, max_shift=1.15)

MISTRAL_SPECIAL = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
MISTRAL_MARKS = ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"]
MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- set text = message.content if message.content is string else message.content | map(attribute="text") | join %}
    {%- if message.role == "system" %}
        {{- "[SYSTEM_PROMPT]" + text + "[/SYSTEM_PROMPT]" }}
    {%- elif message.role == "user" %}
        {{- "[INST]" + text + "[/INST]" }}
    {%- else %}
        {{- text + eos_token }}
    {%- endif %}
{%- endfor %}"""
QWEN_MARKS = [
    "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<think>", "</think>",
]  # fmt: skip
QWEN_TEMPLATE = """\
{%- for message in messages %}
    {%- set text = message.content if message.content is string else message.content | map(attribute="text") | join %}
    {{- "<|im_start|>" + message.role + "\\n" + text + "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- "<think>\\n\\n</think>\\n\\n" }}
    {%- endif %}
{%- endif %}"""


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """What the folder of one model is made of."""

    pipeline_class: type
    transformer_class: type
    transformer: dict[str, Any]
    autoencoder_class: type
    make_text: Callable[[list[str], dict[str, Any]], Components]
    """(words, transformer config) -> text encoders and tokenizers, of the width that the transformer takes"""
    scheduler: dict[str, Any] | None
    """None: the pipeline's own blocks hold it, and the folder does not"""
    text_length: int
    """tokens that hold a short caption, template included"""
    demo: dict[str, Any]
    """entries of the transformer's config that are larger for the demo, which learns handwritten digits"""


def write(
    name: str, folder: Path, autoencoder: Any, seed: int, words: list[str], transformer: dict[str, Any] | None = None
) -> None:
    """Save a complete model folder.

    Args:
        name: a key of TINY.
        autoencoder: of the family's class, as `tiny_autoencoder.make` makes it; None: a random one.
        words: what the tokenizers have one token each for; other text they spell.
        transformer: entries of the transformer's config that differ from TINY's.
    """
    tiny = TINY[name]
    config = {**tiny.transformer, **(transformer or {})}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        components = {
            "transformer": tiny.transformer_class(**config),
            **tiny.make_text(words, config),
            "vae": tiny_autoencoder.make(tiny.autoencoder_class) if autoencoder is None else autoencoder,
        }
    if tiny.scheduler:
        components["scheduler"] = FlowMatchEulerDiscreteScheduler(**tiny.scheduler)
    save(tiny.pipeline_class, components, folder)


def save(pipeline_class: type, components: Components, folder: Path) -> None:
    """Save by the stock pipeline, which also writes the index that it loads from."""
    if not issubclass(pipeline_class, Flux3ModularPipeline):
        pipeline_class(**components).save_pretrained(folder)
        return
    pipeline = pipeline_class()
    pipeline.update_components(**components)
    pipeline.save_pretrained(str(folder), overwrite_modular_index=True)


def clip_and_t5(words: list[str], transformer: dict[str, Any]) -> Components:
    """FLUX.1's two text encoders."""
    clip_tokenizer, t5_tokenizer = make_clip_tokenizer(words), make_t5_tokenizer(words)
    return {
        "text_encoder": make_clip(clip_tokenizer, transformer["pooled_projection_dim"]),
        "tokenizer": clip_tokenizer,
        "text_encoder_2": make_t5(t5_tokenizer, transformer["joint_attention_dim"]),
        "tokenizer_2": t5_tokenizer,
    }


def mistral(words: list[str], transformer: dict[str, Any]) -> Components:
    """FLUX.2's Mistral Small 3, whose states after layers 10, 20 and 30 are stacked; like the released one it has more."""
    tokenizer = make_mistral_tokenizer([*words, *SYSTEM_MESSAGE.split()])
    width = transformer["joint_attention_dim"] // 3
    text = decoder_config(tokenizer, width, num_layers=32, model_type="mistral")
    vision = dict(
        model_type="pixtral", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        image_size=56, patch_size=14,
    )  # fmt: skip
    image_id = tokenizer.convert_tokens_to_ids("[IMG]")
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=image_id, tie_word_embeddings=False)
    return {"text_encoder": amplify_words(Mistral3ForConditionalGeneration(config)), "tokenizer": wrap(tokenizer, "[IMG]")}


def qwen3(words: list[str], transformer: dict[str, Any]) -> Components:
    """FLUX.2 klein's Qwen3, whose states after layers 9, 18 and 27 are stacked."""
    tokenizer = make_qwen_tokenizer(words)
    text = decoder_config(tokenizer, transformer["joint_attention_dim"] // 3, num_layers=29)
    encoder = Qwen3ForCausalLM(Qwen3Config(**text, tie_word_embeddings=True))
    return {"text_encoder": amplify_words(encoder), "tokenizer": tokenizer}


def qwen3_vl(words: list[str], transformer: dict[str, Any]) -> Components:
    """FLUX.3's Qwen3-VL, whose states after layers 4, 8, ..., 32 are stacked."""
    tokenizer = make_qwen_tokenizer(words)
    width = transformer["joint_attention_dim"] // 8
    rope = dict(rope_type="default", rope_theta=5e6, mrope_section=[4, 2, 2], mrope_interleaved=True)
    text = decoder_config(tokenizer, width, num_layers=34, rope_parameters=rope, tie_word_embeddings=True)
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=32, num_heads=2, out_hidden_size=width, deepstack_visual_indexes=[0],
        num_position_embeddings=16,
    )  # fmt: skip
    marks = ("image_token_id", "<|image_pad|>"), ("video_token_id", "<|video_pad|>")
    marks += ("vision_start_token_id", "<|vision_start|>"), ("vision_end_token_id", "<|vision_end|>")
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    return {
        "text_encoder": amplify_words(Qwen3VLForConditionalGeneration(config)),
        "tokenizer": wrap(tokenizer, "<|image_pad|>"),
    }


def decoder_config(tokenizer: Any, width: int, num_layers: int, **others: Any) -> dict[str, Any]:
    """What the configs of the decoder-only text encoders share."""
    return {
        **DECODER,
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **others,
    }


def amplify_words(encoder: Any) -> Any:
    """Embeddings as large as what 30 random layers add to them, so that a word stays visible in its own state."""
    encoder.get_input_embeddings().weight.data.mul_(10)
    return encoder.eval()


def wrap(tokenizer: Any, image_token: str) -> LlavaProcessor:
    """A processor around a tokenizer; see the top of this file."""
    images = CLIPImageProcessorPil()
    return LlavaProcessor(images, tokenizer, chat_template=tokenizer.chat_template, image_token=image_token, patch_size=14)


def learn_byte_pairs(words: list[str], suffix: str = "") -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte pair encoding in which each word is one token and every byte has a token.

    Args:
        suffix: what marks the last byte of a word, as CLIP does; without it, a word's leading space belongs to the word.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=100_000, min_frequency=1, initial_alphabet=letters, end_of_word_suffix=suffix, show_progress=False
    )
    learner.train_from_iterator(words if suffix else [*words, *(" " + word for word in words)], trainer)
    model = json.loads(learner.to_str())["model"]
    tokens = dict.fromkeys([*letters, *(letter + suffix for letter in letters)])
    tokens |= dict.fromkeys(sorted(model["vocab"], key=model["vocab"].__getitem__))
    return {token: index for index, token in enumerate(tokens)}, [tuple(pair) for pair in model["merges"]]


def make_mistral_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs; pads on the left, and puts <s> in front of plain text, as the released one does."""
    vocab, merges = learn_byte_pairs(words)
    special = [*MISTRAL_SPECIAL.values(), *MISTRAL_MARKS]
    vocab = {token: index for index, token in enumerate([*special, *vocab])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=MISTRAL_MARKS, padding_side="left", **MISTRAL_SPECIAL,
        chat_template=MISTRAL_TEMPLATE,
    )  # fmt: skip


def make_qwen_tokenizer(words: list[str]) -> Qwen2TokenizerFast:
    """Byte pairs; also one token for the roles of the chat template."""
    vocab, merges = learn_byte_pairs([*words, "user", "assistant"])
    return Qwen2TokenizerFast(
        vocab=vocab, merges=merges, eos_token="<|im_end|>", extra_special_tokens=QWEN_MARKS, chat_template=QWEN_TEMPLATE
    )


def make_t5_tokenizer(words: list[str]) -> T5TokenizerFast:
    """A piece for each word, and one for each printable character of everything else."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces = dict.fromkeys(["\u2581" + word for word in words], -1.0)
    letters = {chr(code): -10.0 for code in [0x2581, *range(33, 127)]}
    return T5TokenizerFast(vocab=[*special, *(letters | pieces).items()], extra_ids=0)


def make_clip_tokenizer(words: list[str]) -> CLIPTokenizer:
    """Byte pairs."""
    vocab, merges = learn_byte_pairs([word.lower() for word in words], suffix="</w>")
    vocab = {token: index for index, token in enumerate([*vocab, "<|startoftext|>", "<|endoftext|>"])}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=16)


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


FLUX1 = Tiny(
    pipeline_class=FluxPipeline,
    transformer_class=FluxTransformer2DModel,
    transformer=dict(
        TRANSFORMER, axes_dims_rope=(4, 6, 6), joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True
    ),
    autoencoder_class=AutoencoderKL,
    make_text=clip_and_t5,
    scheduler=DYNAMIC_SHIFT,
    text_length=8,
    demo=dict(DEMO, axes_dims_rope=(8, 12, 12), joint_attention_dim=64),
)
FLUX2 = Tiny(
    pipeline_class=Flux2Pipeline,
    transformer_class=Flux2Transformer2DModel,
    transformer=dict(TRANSFORMER, axes_dims_rope=(4, 4, 4, 4), joint_attention_dim=3 * 32, guidance_embeds=True),
    autoencoder_class=AutoencoderKLFlux2,
    make_text=mistral,
    scheduler=DYNAMIC_SHIFT,
    text_length=48,
    demo=dict(DEMO, axes_dims_rope=(8, 8, 8, 8)),
)
FLUX3 = Tiny(
    pipeline_class=Flux3ModularPipeline,
    transformer_class=Flux3Transformer2DModel,
    transformer=dict(TRANSFORMER, axes_dims_rope=(4, 4, 4, 4), joint_attention_dim=8 * 32, cond_in_channels=16),
    autoencoder_class=AutoencoderKLFlux2,
    make_text=qwen3_vl,
    scheduler=None,  # a constant shift of 6.93
    text_length=80,
    demo=dict(DEMO, axes_dims_rope=(8, 8, 8, 8)),
)
TINY: dict[str, Tiny] = {
    "flux1": FLUX1,
    "kontext": replace(FLUX1, pipeline_class=FluxKontextPipeline),
    "flux2": FLUX2,
    "flux2-klein": replace(
        FLUX2,
        pipeline_class=Flux2KleinPipeline,
        transformer={**FLUX2.transformer, "guidance_embeds": False},
        make_text=qwen3,
        text_length=24,
    ),
    "flux3": FLUX3,
}
