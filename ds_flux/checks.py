"""Contradictions between settings, found before anything is loaded."""

import importlib.util

from PIL import ImageColor

from ds_flux import UserError
from ds_flux.config import Config, DataConfig, LoraConfig, ModelConfig, OptimConfig, TrainConfig, ValidationConfig
from ds_flux.flags import names_of, steps_of

Rules = list[tuple[bool, str]]  # whether it is broken, and what to say then

SHARES = (
    "proportion_empty_prompts", "text_encoder_dropout", "text_encoder_2_dropout", "reference_dropout", "max_bad_fraction",
)  # fmt: skip
POSITIVE = (
    "train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "checkpointing_steps", "reference_max_pixels",
    "max_image_pixels", "repeats", "shuffle_buffer", "max_skipped_steps", "timeout_s", "sequence_parallel",
    "validation_sigmas",
    "num_validation_images",
    "num_validation_inference_steps",
    "gradient_checkpointing_every",
    "logging_steps",
)  # fmt: skip
POSITIVE_IF_GIVEN = (
    "tokens_per_batch", "max_train_steps", "checkpoints_total_limit", "max_sequence_length", "rank", "precomputation_items",
    "validation_steps",
)  # fmt: skip
MONITORS = {"tensorboard": None, "csv": None, "wandb": "wandb", "comet": "comet_ml"}  # the package of each


def check(config: Config) -> None:
    """Contradictions between settings, which no single type can hold.  Raises UserError."""
    flat, lora, shift = config.flat(), config.lora, config.flow.timestep_shift
    rules = [
        *model_rules(config.model),
        *source_rules(config.data),
        *reference_rules(config.data),
        *size_rules(config.data, config.train),
        *stream_rules(config.data, config.train, config.zero.sequence_parallel),
        (
            lora.rank is None and lora != LoraConfig(),
            "LoRA flags without --rank have no effect: give --rank, or leave them out",
        ),
        *ema_rules(config.optim),
        *validation_rules(config),
        (config.log.peak_tflops is not None and config.log.peak_tflops <= 0, "--peak_tflops must be more than 0"),
        (not is_shift(shift), f"--timestep_shift {shift}: expected none, resolution or a number > 0"),
        *[(not 0 <= flat[name] <= 1, f"--{name} {flat[name]} is not between 0 and 1") for name in SHARES],
        *[(flat[name] < 1, f"--{name} {flat[name]} must be 1 or more") for name in POSITIVE],
        *[
            (flat[name] is not None and flat[name] < 1, f"--{name} {flat[name]} must be 1 or more")
            for name in POSITIVE_IF_GIVEN
        ],
    ]
    for broken, message in rules:
        if broken:
            raise UserError(message)
    check_colour(config.data.alpha_background)
    check_monitors(names_of(config.log.report_to))
    steps_of("--profile", config.log.profile)


def check_data(data: DataConfig) -> None:
    """What says which data it is.  Raises UserError."""
    for broken, message in source_rules(data):
        if broken:
            raise UserError(message)
    check_colour(data.alpha_background)


def ema_rules(optim: OptimConfig) -> Rules:
    """The average of the weights."""
    return [
        (
            optim.ema_decay is not None and not 0 < optim.ema_decay < 1,
            f"--ema_decay {optim.ema_decay} is not between 0 and 1, both excluded",
        ),
        (optim.ema_decay is None and optim.ema_device is not None, "--ema_device has no effect without --ema_decay"),
    ]


def validation_rules(config: Config) -> Rules:
    """What is measured, and on what."""
    settings = config.validation
    has_data = settings.validation_dataset is not None or settings.validation_fraction > 0
    given = {name for name, value in vars(settings).items() if value != vars(ValidationConfig())[name]}
    of_images = {
        "validation_image", "num_validation_images", "num_validation_inference_steps", "validation_guidance_scale"
    }  # fmt: skip
    has_images = settings.validation_prompt is not None
    of_loss = given - of_images - {"validation_prompt", "validation_steps"}
    return [
        (
            settings.validation_dataset is not None and settings.validation_fraction > 0,
            "--validation_dataset and --validation_fraction contradict each other: give one",
        ),
        (
            not 0 <= settings.validation_fraction < 1,
            f"--validation_fraction {settings.validation_fraction} is not between 0 and 1",
        ),
        (
            settings.validation_fraction > 0 and config.data.streaming,
            "--validation_fraction needs to know all samples, and --streaming does not: give --validation_dataset",
        ),
        *[
            (not has_data, f"--{name} has no effect without --validation_dataset or --validation_fraction")
            for name in sorted(of_loss)
        ],
        *[(not has_images, f"--{name} has no effect without --validation_prompt") for name in sorted(given & of_images)],
        (
            not (has_data or has_images) and "validation_steps" in given,
            "--validation_steps has no effect without --validation_dataset, --validation_fraction or --validation_prompt",
        ),
    ]


def model_rules(model: ModelConfig) -> Rules:
    """Which weights."""
    return [
        (
            not model.gradient_checkpointing and (model.gradient_checkpointing_every > 1 or model.offload_activations),
            "--gradient_checkpointing_every and --offload_activations have no effect without --gradient_checkpointing",
        ),
        (model.pretrained_model_name_or_path is None, "--pretrained_model_name_or_path is missing: a folder or a hub id"),
        (model.transformer_config is not None and not model.from_scratch, "--transformer_config needs --from_scratch"),
        (
            model.transformer_path is not None and model.from_scratch,
            "--transformer_path and --from_scratch contradict each other: give one",
        ),
    ]


def source_rules(data: DataConfig) -> Rules:
    """Which images and captions."""
    return [
        (
            (data.dataset_name is None and data.data_files is None) == (data.instance_data_dir is None),
            "give either --dataset_name (or --data_files) or --instance_data_dir"
            + (", not both" if data.instance_data_dir else ""),
        ),
        (
            data.instance_data_dir is None and (data.caption_column or data.instance_prompt) is None,
            f"--{'dataset_name' if data.dataset_name else 'data_files'} needs --caption_column or --instance_prompt",
        ),
        (
            data.instance_data_dir is not None and data.caption_column is not None,
            "--caption_column goes with --dataset_name; images of --instance_data_dir have .txt files",
        ),
        (
            data.instance_prompt is not None and not data.instance_prompt.strip(),
            "--instance_prompt is empty: to train without prompts, give --proportion_empty_prompts 1",
        ),
        (
            data.cache_text and data.shuffle_tags and data.precomputation_items is None,
            "--cache_text keeps every prompt, and --shuffle_tags makes new ones at every visit: give one of them, "
            "or --precomputation_items",
        ),
        (data.keep_tags < 0, f"--keep_tags {data.keep_tags} must be 0 or more"),
        (data.keep_tags > 0 and not data.shuffle_tags, "--keep_tags has no effect without --shuffle_tags"),
    ]


def stream_rules(data: DataConfig, train: TrainConfig, sharing: int) -> Rules:
    """What cannot be had of data that are read from front to back; and mixtures."""
    num_data_sets = len(names_of(data.dataset_name or data.instance_data_dir or data.data_files and ["files"]))
    needs_all = {
        "cache_latents": data.cache_latents, "cache_text": data.cache_text, "tokens_per_batch": train.tokens_per_batch,
        "instance_data_dir": data.instance_data_dir,
    }  # fmt: skip
    return [
        (
            data.streaming and train.max_train_steps is None,
            "--streaming needs --max_train_steps: nobody knows how long a stream is",
        ),
        (data.streaming and train.repeats > 1, "--repeats has no effect with --streaming: a stream goes on anyway"),
        *[
            (
                data.streaming and bool(value),
                f"--{name} and --streaming contradict each other: nobody knows a stream beforehand",
            )
            for name, value in needs_all.items()
        ],
        (
            data.streaming and data.cond_image_column is not None and sharing > 1,
            "--streaming with --cond_image_column and --sequence_parallel contradict each other: nobody knows beforehand "
            "whether the references can be shared",
        ),
        (
            data.dataset_weights is not None and len(data.dataset_weights) != num_data_sets,
            f"--dataset_weights has {len(data.dataset_weights or [])} numbers for {num_data_sets} data sets",
        ),
        (
            data.dataset_weights is not None and min([*data.dataset_weights, 1]) <= 0,
            f"--dataset_weights {data.dataset_weights}: each must be more than 0",
        ),
    ]


def reference_rules(data: DataConfig) -> Rules:
    """What belongs to editing."""
    return [
        (
            data.cond_image_column is not None and data.instance_data_dir is not None,
            "--cond_image_column names a column: it goes with --dataset_name or --data_files",
        ),
        (
            data.cond_image_column is None and (data.reference_dropout > 0 or data.augment_references),
            "--reference_dropout and --augment_references have no effect without --cond_image_column",
        ),
        (
            data.cond_image_column is not None and data.random_flip and not data.augment_references,
            "--random_flip would mirror the image and not its references: add --augment_references, or leave it out",
        ),
    ]


def size_rules(data: DataConfig, train: TrainConfig) -> Rules:
    """Sizes of images and of batches."""
    return [
        (
            not data.resolutions or any(resolution % 16 or resolution < 16 for resolution in data.resolutions),
            f"--resolution {data.resolution} is not a multiple of 16",
        ),
        (
            data.aspect_ratio_buckets is not None and not data.use_aspect_ratio_buckets,
            "--aspect_ratio_buckets needs --use_aspect_ratio_buckets",
        ),
        (
            data.aspect_ratio_buckets is not None and len(data.resolutions) > 1,
            "--aspect_ratio_buckets says all sizes itself: give one --resolution",
        ),
        (
            data.cache_latents and len(data.resolutions) > 1 and data.precomputation_items is None,
            "--cache_latents keeps one size of each image: give one --resolution, or --precomputation_items",
        ),
        (
            data.precomputation_items is not None and not (data.cache_text or data.cache_latents),
            "--precomputation_items has no effect without --cache_text or --cache_latents",
        ),
        (
            train.tokens_per_batch is not None and train.train_batch_size != 1,
            "--tokens_per_batch and --train_batch_size contradict each other: give one",
        ),
    ]


def check_colour(text: str) -> None:
    """Raise UserError where --alpha_background has no meaning."""
    try:
        ImageColor.getcolor(text, "RGB")
    except ValueError:
        raise UserError(f"--alpha_background {text}: expected the name of a colour, or #rrggbb") from None


def is_shift(text: str) -> bool:
    """Whether --timestep_shift has a meaning."""
    try:
        return text in ("none", "resolution") or float(text) > 0
    except ValueError:
        return False


def check_monitors(names: list[str]) -> None:
    """Raise UserError for a monitor that there is not, or whose package is missing."""
    for name in names:
        if name not in MONITORS:
            raise UserError(f"--report_to {name}: expected {', '.join(MONITORS)}")
        package = MONITORS[name]
        if package and importlib.util.find_spec(package) is None:
            raise UserError(f"--report_to {name} needs a package: pip install {package}")
