"""`ds-flux train --dry_run`: what a run would do.  Reads no weights and needs no process group."""

import json
import math
from typing import Any

from ds_flux import assemble, inputs, lora, models, runtime
from ds_flux.config import Config
from ds_flux.data.stream import StreamSchedule
from ds_flux.zero.ds_config import ModelSize


def dry_run(config: Config) -> str:
    """Settings, DeepSpeed configs, what trains, and on what."""
    architecture = models.find_architecture(config.model)
    assemble.check_fits_model(config, architecture)
    transformer = models.transformer_on_meta(architecture)
    sections = {"settings": config.to_yaml()}
    size = ModelSize.of(transformer)
    sections["DeepSpeed, transformer"] = json.dumps(assemble.transformer_ds_config(config, size), indent=2)
    for spec in architecture.family.text_encoders:
        if spec.is_large and config.model.shard_text_encoder:
            encoder = models.text_encoder_on_meta(spec, models.component_folder(config.model, spec.component))
            ds_config = assemble.frozen_ds_config(config, ModelSize.of(encoder))
            sections[f"DeepSpeed, {spec.component}"] = json.dumps(ds_config, indent=2)
    sections["what trains"] = what_trains(config, architecture, transformer, size) + "\n" + on_what(config, architecture)
    return "\n".join(f"=== {title}\n{text.rstrip()}\n" for title, text in sections.items())


def what_trains(config: Config, architecture: models.Architecture, transformer: Any, size: ModelSize) -> str:
    """Counts, and of a LoRA the layers it adapts."""
    lines = []
    if config.lora.rank is not None:
        layers = lora.matched_layers(transformer, lora.adapted_layers(config.lora, architecture.family))
        lines = [f"a LoRA of rank {config.lora.rank} on {len(layers)} layers:", *lora.summary(layers)]
        lora.inject(transformer, config.lora, architecture.family, config.run.seed)
    trainable = [(name, tuple(p.shape)) for name, p in transformer.named_parameters() if p.requires_grad]
    total = sum(math.prod(shape) for _, shape in trainable)
    return "\n".join(
        [
            *lines,
            f"{total:,} parameters in {len(trainable)} tensors of {architecture.family.transformer_class.__name__} "
            f"({size.num_params:,} parameters), {trainable[0][0]} ... {trainable[-1][0]}",
        ]
    )


def on_what(config: Config, architecture: models.Architecture) -> str:
    """Steps, images, and the batches' shapes."""
    rules = inputs.image_rules(config, architecture)
    source, _ = inputs.parts_of(config, inputs.open_data(config, architecture, rules))
    shapes = inputs.look(config, architecture, source, rules)
    inputs.check_shares(config, architecture, shapes)
    schedule = inputs.make_schedule(config, architecture, source, shapes)
    last_step = inputs.num_steps(config, schedule)
    if isinstance(schedule, StreamSchedule):
        return (
            f"{last_step} optimizer steps of {schedule.global_batch_size} images on {runtime.env_world_size()} processes; "
            f"{schedule.described}"
        )
    counts = inputs.counts_of_shapes(schedule)
    sizes = sorted({schedule.size_of(shape) for shape in counts})
    per_step = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    lines = [
        f"{last_step} optimizer steps of {per_step} images on {runtime.env_world_size()} processes; {schedule.described} in "
        f"{len(counts)} {'shape' if len(counts) == 1 else 'shapes'}"
    ]
    if len(counts) > 1:
        lines += [f"  {count:6} x {inputs.described(shape)}" for shape, count in counts.most_common()]
    return "\n".join(lines)
