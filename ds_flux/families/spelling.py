"""What the original Black Forest Labs repositories call the layers of diffusers' transformers.

The tables are those in diffusers' loaders/single_file_utils.py (`convert_flux*_transformer_checkpoint_to_diffusers`), read the
other way round.  `*` stands for one part of a path, such as the number of a block, so any number of blocks will do.
"""

import re
from dataclasses import dataclass

from ds_flux import UserError


@dataclass(frozen=True)
class Layer:
    """A layer of the original: one of diffusers', or several that follow one another in its rows."""

    original: str
    parts: tuple[str, ...]
    shares: tuple[int, ...]
    """how many rows the parts have, relative to one another"""
    is_swapped: bool = False
    """the original's rows are (shift, scale), diffusers' (scale, shift)"""

    def filled(self, words: tuple[str, ...]) -> "Layer":
        """With the stars of every name replaced, in order."""
        names = [name.replace("*", "{}").format(*words) for name in (self.original, *self.parts)]
        return Layer(names[0], tuple(names[1:]), self.shares, self.is_swapped)


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """The layers of a transformer class, and what diffusers' loader of its LoRA files takes (loaders/lora_pipeline.py)."""

    layers: tuple[Layer, ...]
    reads_alpha: bool
    """`.alpha` beside lora_A and lora_B; where not, such a file is refused"""
    reads_kohya: bool
    """kohya's `lora_unet_*`; where not, `diffusion_model.*` with lora_A and lora_B"""

    def find(self, name: str) -> Layer:
        """The layer that one of diffusers' is, or is a part of.  Raises UserError when the table has none."""
        for layer in self.layers:
            for part in layer.parts:
                found = re.fullmatch(re.escape(part).replace(r"\*", r"([^.]+)"), name)
                if found:
                    return layer.filled(found.groups())
        raise UserError(f"{name} has no name in the original repository: only --format diffusers can hold it")


def spelling_of(transformer_class: str) -> Spelling:
    """By the class name that config.json carries.  Raises UserError for one that has no table."""
    if transformer_class not in SPELLINGS:
        raise UserError(f"no other names are known for the layers of {transformer_class or 'this transformer'}")
    return SPELLINGS[transformer_class]


def below(original: str, diffusers: str, names: dict[str, str]) -> tuple[Layer, ...]:
    """Layers under two prefixes: {original name: diffusers' name, or several of equal size with spaces between}."""
    layers = []
    for theirs, ours in names.items():
        parts = tuple(diffusers + part for part in ours.split())
        layers.append(Layer(original + theirs, parts, (1,) * len(parts)))
    return tuple(layers)


def embedder(original: str, diffusers: str) -> tuple[Layer, ...]:
    """The two linear layers that a timestep, a guidance value or a pooled text goes through."""
    return below(f"{original}.", f"{diffusers}.", {"in_layer": "linear_1", "out_layer": "linear_2"})


JOINT_ATTENTION = {
    "img_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "img_attn.norm.query_norm": "attn.norm_q",
    "img_attn.norm.key_norm": "attn.norm_k",
    "img_attn.proj": "attn.to_out.0",
    "txt_attn.qkv": "attn.add_q_proj attn.add_k_proj attn.add_v_proj",
    "txt_attn.norm.query_norm": "attn.norm_added_q",
    "txt_attn.norm.key_norm": "attn.norm_added_k",
    "txt_attn.proj": "attn.to_add_out",
}
QK_NORMS = {"norm.query_norm": "attn.norm_q", "norm.key_norm": "attn.norm_k"}
ENDS = below("", "", {"img_in": "x_embedder", "txt_in": "context_embedder", "final_layer.linear": "proj_out"})
FINAL_NORM = Layer("final_layer.adaLN_modulation.1", ("norm_out.linear",), (1,), is_swapped=True)

FLUX1 = (
    *ENDS,
    FINAL_NORM,
    *embedder("time_in", "time_text_embed.timestep_embedder"),
    *embedder("vector_in", "time_text_embed.text_embedder"),
    *embedder("guidance_in", "time_text_embed.guidance_embedder"),
    *below(
        "double_blocks.*.",
        "transformer_blocks.*.",
        {
            "img_mod.lin": "norm1.linear",
            "txt_mod.lin": "norm1_context.linear",
            **JOINT_ATTENTION,
            "img_mlp.0": "ff.net.0.proj",
            "img_mlp.2": "ff.net.2",
            "txt_mlp.0": "ff_context.net.0.proj",
            "txt_mlp.2": "ff_context.net.2",
        },
    ),
    *below(
        "single_blocks.*.",
        "single_transformer_blocks.*.",
        {"modulation.lin": "norm.linear", **QK_NORMS, "linear2": "proj_out"},
    ),
    Layer(
        "single_blocks.*.linear1",
        tuple(f"single_transformer_blocks.*.{part}" for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        (1, 1, 1, 4),
    ),
)

FLUX2 = (
    *ENDS,
    FINAL_NORM,
    *embedder("time_in", "time_guidance_embed.timestep_embedder"),
    *embedder("guidance_in", "time_guidance_embed.guidance_embedder"),
    *below("", "", {f"{stream}.lin": f"{stream}.linear" for stream in (
        "double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation"
    )}),
    *below(
        "double_blocks.*.",
        "transformer_blocks.*.",
        {
            **JOINT_ATTENTION,
            "img_mlp.0": "ff.linear_in",
            "img_mlp.2": "ff.linear_out",
            "txt_mlp.0": "ff_context.linear_in",
            "txt_mlp.2": "ff_context.linear_out",
        },
    ),
    *below(
        "single_blocks.*.",
        "single_transformer_blocks.*.",
        {"linear1": "attn.to_qkv_mlp_proj", **QK_NORMS, "linear2": "attn.to_out"},
    ),
)  # fmt: skip

FLUX3_BLOCK = {
    "q_proj": "attn.to_q",
    "k_proj": "attn.to_k",
    "v_proj": "attn.to_v",
    "attn_out": "attn.to_out.0",
    **QK_NORMS,
    "mlp_in": "ff.linear_in",
    "mlp_out": "ff.linear_out",
}
FLUX3 = (
    *embedder("time_in", "timestep_embedder"),
    *embedder("ref_time_in", "target_timestep_embedder"),
    *below("", "", {
        "emb_in.*": "x_embedders.*",
        "txt_in": "context_embedder",
        "early_stream_modulations.*.lin": "early_stream_modulations.*.linear",
        "single_stream_modulations.*.lin": "single_stream_modulations.*.linear",
        "final_layer.image.linear": "proj_out",
    }),
    Layer("final_layer.image.adaLN_modulation.1", ("norm_out.linear",), (1,), is_swapped=True),
    *below("content_mode_blocks.*.*.", "mode_blocks.*.*.", FLUX3_BLOCK),
    *below("txt_mode_blocks.*.", "txt_mode_blocks.*.", FLUX3_BLOCK),
    *below("single_blocks.*.", "single_transformer_blocks.*.", FLUX3_BLOCK),
)  # fmt: skip

SPELLINGS = {
    "FluxTransformer2DModel": Spelling(layers=FLUX1, reads_alpha=True, reads_kohya=True),
    "Flux2Transformer2DModel": Spelling(layers=FLUX2, reads_alpha=False, reads_kohya=True),
    "Flux3Transformer2DModel": Spelling(layers=FLUX3, reads_alpha=False, reads_kohya=False),
}
