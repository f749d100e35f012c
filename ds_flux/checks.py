"""Contradictions between settings, found before anything is loaded."""

from PIL import ImageColor

from ds_flux import UserError
from ds_flux.config import Config, LoraConfig


def check(config: Config) -> None:
    """Contradictions between settings, which no single type can hold.  Raises UserError."""
    model, lora, data, flow = config.model, config.lora, config.data, config.flow
    shares = ("proportion_empty_prompts", "text_encoder_dropout", "text_encoder_2_dropout", "reference_dropout")
    positive = (
        "train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "checkpointing_steps",
        "reference_max_pixels",
        "max_image_pixels",
    )
    optional = ("max_train_steps", "checkpoints_total_limit", "max_sequence_length", "rank")
    flat = config.flat()
    rules = [
        (model.pretrained_model_name_or_path is None, "--pretrained_model_name_or_path is missing: a folder or a hub id"),
        (model.transformer_config is not None and not model.from_scratch, "--transformer_config needs --from_scratch"),
        (
            model.transformer_path is not None and model.from_scratch,
            "--transformer_path and --from_scratch contradict each other: give one",
        ),
        (
            (data.dataset_name is None) == (data.instance_data_dir is None),
            "give either --dataset_name or --instance_data_dir" + (", not both" if data.dataset_name else ""),
        ),
        (
            data.dataset_name is not None and (data.caption_column or data.instance_prompt) is None,
            "--dataset_name needs --caption_column or --instance_prompt",
        ),
        (
            data.instance_data_dir is not None and data.caption_column is not None,
            "--caption_column goes with --dataset_name; images of --instance_data_dir have .txt or .caption files",
        ),
        (
            data.cond_image_column is not None and data.dataset_name is None,
            "--cond_image_column names a column: it goes with --dataset_name",
        ),
        (
            data.cond_image_column is None and (data.reference_dropout > 0 or data.augment_references),
            "--reference_dropout and --augment_references have no effect without --cond_image_column",
        ),
        (
            data.cond_image_column is not None and data.random_flip and not data.augment_references,
            "--random_flip would mirror the image and not its references: add --augment_references, or leave it out",
        ),
        (
            data.instance_prompt is not None and not data.instance_prompt.strip(),
            "--instance_prompt is empty: to train without prompts, give --proportion_empty_prompts 1",
        ),
        (data.keep_tags < 0, f"--keep_tags {data.keep_tags} must be 0 or more"),
        (data.keep_tags > 0 and not data.shuffle_tags, "--keep_tags has no effect without --shuffle_tags"),
        (data.resolution % 16 != 0 or data.resolution < 16, f"--resolution {data.resolution} is not a multiple of 16"),
        (
            lora.rank is None and lora != LoraConfig(),
            "LoRA flags without --rank have no effect: give --rank, or leave them out",
        ),
        (
            not is_shift(flow.timestep_shift),
            f"--timestep_shift {flow.timestep_shift}: expected none, resolution or a number > 0",
        ),
        *[(not 0 <= flat[name] <= 1, f"--{name} {flat[name]} is not between 0 and 1") for name in shares],
        *[(flat[name] < 1, f"--{name} {flat[name]} must be 1 or more") for name in positive],
        *[(flat[name] is not None and flat[name] < 1, f"--{name} {flat[name]} must be 1 or more") for name in optional],
    ]
    for broken, message in rules:
        if broken:
            raise UserError(message)
    check_colour(data.alpha_background)


def is_shift(text: str) -> bool:
    """Whether --timestep_shift has a meaning."""
    try:
        return text in ("none", "resolution") or float(text) > 0
    except ValueError:
        return False


def check_colour(text: str) -> None:
    """Raise UserError where --alpha_background has no meaning."""
    try:
        ImageColor.getcolor(text, "RGB")
    except ValueError:
        raise UserError(f"--alpha_background {text}: expected the name of a colour, or #rrggbb") from None
