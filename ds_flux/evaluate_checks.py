"""What `ds-flux evaluate` is asked for, looked at before anything is loaded."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ds_flux import UserError, checks, fid
from ds_flux.checks import Rules
from ds_flux.commands import EvaluateCommand
from ds_flux.config import Config
from ds_flux.validation import data_of

OF_IMAGES = ("prompts", "num_images_per_prompt", "height", "width", "num_inference_steps", "sample_guidance_scale")
COUNTS = ("num_images_per_prompt", "num_inference_steps")


def check(config: Config, command: EvaluateCommand) -> None:
    """Contradictions, what is missing, and what would have no effect.  Raises UserError."""
    for broken, message in (*weights_rules(command), *fid_rules(command), *scores_rules(config, command)):
        if broken:
            raise UserError(message)
    check_settings(config)
    for name, is_there in FILES.items():
        path = vars(command)[name]
        if path is not None and not is_there(Path(path)):
            raise UserError(f"--{name} {path}: no such file or folder")
    if wants_fid(command):
        fid.check_is_installed()


FILES: dict[str, Callable[[Path], bool]] = {
    "transformer": Path.is_dir,
    "lora": Path.exists,
    "checkpoint": Path.exists,
    "fid_weights": Path.is_file,
    "fid_statistics": Path.is_file,
}


def has_validation(config: Config) -> bool:
    """Whether there are samples to take the loss on."""
    return config.validation.validation_dataset is not None or config.validation.validation_fraction > 0


def wants_fid(command: EvaluateCommand) -> bool:
    """Whether there is a set to compare with."""
    return command.fid_dataset is not None or command.fid_statistics is not None


def wants_images(command: EvaluateCommand) -> bool:
    """Whether a score of images is asked for."""
    return command.clip_model is not None or wants_fid(command)


def check_settings(config: Config) -> None:
    """The run's own, as far as they matter here.  Raises UserError."""
    if not has_validation(config):
        for broken, message in checks.model_rules(config.model):
            if broken:
                raise UserError(message)
        checks.check_colour(config.data.alpha_background)
        return
    dataset = config.validation.validation_dataset
    checks.check(config if dataset is None else replace(config, data=data_of(config.data, dataset)))


def weights_rules(command: EvaluateCommand) -> Rules:
    """Which weights."""
    return [
        (
            command.checkpoint is not None and (command.transformer or command.lora) is not None,
            "--checkpoint says itself which weights it has: leave out --transformer and --lora",
        ),
        (
            command.checkpoint is None and command.weights != EvaluateCommand.weights,
            f"--weights {command.weights} has no effect without --checkpoint",
        ),
    ]


def fid_rules(command: EvaluateCommand) -> Rules:
    """What FID needs."""
    return [
        (
            command.fid_dataset is not None and command.fid_statistics is not None,
            "--fid_dataset and --fid_statistics contradict each other: give one",
        ),
        (
            wants_fid(command) and command.fid_weights is None,
            "FID needs --fid_weights: a file of Inception's weights, pt_inception-2015-12-05-6726825d.pth",
        ),
        (
            not wants_fid(command) and command.fid_weights is not None,
            "--fid_weights has no effect without --fid_dataset or --fid_statistics: FID compares with a set of images",
        ),
        (
            command.fid_dataset is None and command.save_fid_statistics is not None,
            "--save_fid_statistics has no effect without --fid_dataset",
        ),
    ]


def scores_rules(config: Config, command: EvaluateCommand) -> Rules:
    """What is measured, and on which images."""
    given = [name for name in OF_IMAGES if vars(command)[name] != vars(EvaluateCommand())[name]]
    return [
        *[(vars(command)[name] < 1, f"--{name} {vars(command)[name]} must be 1 or more") for name in COUNTS],
        (
            not (wants_images(command) or has_validation(config)),
            "there is nothing to measure: give --validation_dataset or --validation_fraction, --clip_model, or --fid_weights "
            "with --fid_dataset or --fid_statistics",
        ),
        *[
            (not wants_images(command), f"--{name} has no effect without --clip_model, --fid_dataset or --fid_statistics")
            for name in given
        ],
        (
            wants_images(command) and command.prompts is None and not has_validation(config),
            "--prompts is missing: a .txt file with one on each line; or give a validation set, whose captions are taken",
        ),
    ]
