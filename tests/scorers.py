"""A small CLIP and an Inception, both of random weights, in the formats of the released ones."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

from ds_flux import fid
from ds_flux.families import tiny

NUM_TOKENS = 8  # that a prompt may have


def write_clip(folder: Path, words: list[str]) -> None:
    """A folder as CLIPModel and CLIPProcessor save it, of images of 32 x 32."""
    tokenizer = tiny.make_clip_tokenizer(words)
    common = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, initializer_factor=3.0)
    ends = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    text = dict(vocab_size=len(tokenizer), max_position_embeddings=NUM_TOKENS, **ends, **common)
    vision = dict(image_size=32, patch_size=8, **common)
    torch.manual_seed(2)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    with torch.no_grad():  # embeddings that have something in common: a score below 0 counts as 0
        model.text_projection.weight.copy_(model.visual_projection.weight)
        model.text_model.final_layer_norm.bias += 1
        model.vision_model.post_layernorm.bias += 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = dict(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPImageProcessorPil(**size).save_pretrained(folder)


def write_inception(path: Path, seed: int) -> None:
    """A file of weights that torch-fidelity reads; its features differ between images."""
    with fid.bare_package("torch_fidelity"):
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    class Bare(FeatureExtractorInceptionV3):
        """As it is before weights are read."""

        def load_state_dict(self, _weights: dict[str, Any]) -> None:
            """None are."""

    torch.save({}, path)
    network = Bare("bare", ["2048"], str(path))
    torch.manual_seed(seed)
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)  # torch's own start would leave nothing of an image after fifty layers
    torch.save(network.state_dict(), path)
