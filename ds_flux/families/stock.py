"""The stock pipeline of a model folder, as a judge: text encoders and tokenizers are its own, and nothing of ours is in it."""

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoModel, DiffusionPipeline, FluxKontextPipeline, ModularPipeline
from diffusers.utils import logging
from PIL import Image

NOT_ASKED_FOR = "prompt_upsampler"  # a step that would rewrite the prompt with another model


def load(folder: Path, transformer: Path | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The pipeline of a model folder, perhaps with another transformer."""
    logging.disable_progress_bar()  # of the loading
    others = {} if transformer is None else {"transformer": AutoModel.from_pretrained(str(transformer), dtype=dtype)}
    if (folder / "model_index.json").exists():
        pipeline = DiffusionPipeline.from_pretrained(folder, dtype=dtype, **others)
    else:
        blocks = ModularPipeline.from_pretrained(str(folder)).blocks
        blocks.sub_blocks.pop(NOT_ASKED_FOR)
        pipeline = blocks.init_pipeline(str(folder))
        pipeline.load_components(dtype=dtype)
        pipeline.update_components(**others)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipeline: Any, prompts: list[str], generator: torch.Generator, **inputs: Any) -> list[Image.Image]:
    """An image of each prompt; `inputs` are the pipeline's own arguments: height, width, image, ..."""
    if isinstance(pipeline, ModularPipeline):
        inputs.pop("max_sequence_length", None)  # its text windows are the model's own
        return [pipeline(prompt=p, generator=generator, output="images", **inputs)[0] for p in prompts]
    if isinstance(pipeline, FluxKontextPipeline):
        # it would move every size to about a megapixel
        inputs |= {"max_area": inputs["height"] * inputs["width"], "_auto_resize": False}
    return pipeline(prompt=prompts, generator=generator, **inputs).images
