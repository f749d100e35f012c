"""What is evaluated: the base model, another transformer, a LoRA, or what a checkpoint holds."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ds_flux import UserError, assemble, disks, fingerprints, lora, models, runtime
from ds_flux.commands import EvaluateCommand
from ds_flux.config import Config, LoraConfig
from ds_flux.consolidate import Weights, consolidate, is_lora_file
from ds_flux.manifest import MANIFEST, Manifest, differences, read_manifest
from ds_flux.manifest import find as find_latest
from ds_flux.zero.files import has_ema

MAX_SHARD_BYTES = 10 * 10**9


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    folder: Path
    manifest: Manifest
    weights: Weights

    @property
    def run(self) -> Path:
        """The folder of its run."""
        return self.folder.parent

    @property
    def name(self) -> str:
        """Of a folder for what is found out about it."""
        return self.folder.name + ("-ema" if self.weights == "ema" else "")


@dataclass(frozen=True)
class Subject:
    """Where the weights are."""

    config: Config
    architecture: models.Architecture
    lora: LoraConfig
    checkpoint: Checkpoint | None
    """instead"""
    folder: Path
    """for the results"""

    @property
    def title(self) -> str:
        """In words."""
        if self.checkpoint is not None:
            which = ", average of the weights" if self.checkpoint.weights == "ema" else ""
            return f"{self.checkpoint.folder}{which}"
        base = self.config.model.transformer_path or self.config.model.pretrained_model_name_or_path
        return f"{self.lora.lora_init_from} on {base}" if self.lora.lora_init_from else str(base)


def find(config: Config, command: EvaluateCommand) -> Subject:
    """Look at it; no weights are read.

    Raises:
        UserError: it is nowhere, not whole, or of another model.
    """
    if command.transformer is not None:
        config = assemble.with_transformer(config, command.transformer)
    architecture = assemble.find_model(config)
    checkpoint = None if command.checkpoint is None else open_checkpoint(command, config, architecture)
    place = Path("evaluation") if checkpoint is None else checkpoint.run / "evaluation" / checkpoint.name
    folder = place if command.evaluate_dir is None else Path(command.evaluate_dir)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already: remove it, or name another --evaluate_dir")
    adapters = LoraConfig() if command.lora is None else lora.config_of_file(Path(command.lora), architecture.family)
    return Subject(config, architecture, adapters, checkpoint, folder)


def open_checkpoint(command: EvaluateCommand, config: Config, architecture: models.Architecture) -> Checkpoint:
    """The checkpoint, or the run's latest one.  Raises UserError where it is not whole, or does not fit the flags."""
    folder = folder_of(Path(str(command.checkpoint)))
    manifest = read_manifest(folder)
    if command.weights == "ema" and not has_ema(manifest):
        raise UserError(f"--weights ema: {folder} has no EMA weights, it was made without --ema_decay")
    here = json.loads(json.dumps(architecture.config, default=list))
    if here != manifest.transformer_config:
        differ = differences(manifest.transformer_config, here)
        raise UserError(f"--checkpoint {folder} is of another model than --pretrained_model_name_or_path: {differ}")
    if manifest.lora is not None:
        found = fingerprints.base_fingerprint(architecture, config.model, config.run.seed)
        if found != manifest.base_fingerprint:
            raise UserError(
                f"--checkpoint {folder}: its LoRA was trained on other base weights (fingerprint {manifest.base_fingerprint}, "
                f"these have {found})"
            )
    return Checkpoint(folder, manifest, command.weights)


def folder_of(path: Path) -> Path:
    """The checkpoint itself, or the latest one of a run's folder.  Raises UserError where there is none."""
    if is_lora_file(path):
        raise UserError(f"--checkpoint {path} is a LoRA's file: give it as --lora")
    found = path if (path / MANIFEST).exists() else find_latest(path)
    if found is None:
        raise UserError(
            f"--checkpoint {path} is no checkpoint of ds_flux and has none in it; one of plain DeepSpeed or accelerate: "
            "bring it to safetensors with ds-flux consolidate, and give --transformer"
        )
    return found


def load(subject: Subject) -> Any:
    """The transformer with its weights, sharded over the ranks; a frozen module.  A collective."""
    if subject.checkpoint is None:
        return assemble.build_frozen_transformer(subject.config, subject.architecture, subject.lora)
    with in_safetensors(subject, subject.checkpoint) as folder:
        if subject.checkpoint.manifest.lora is not None:
            with runtime.together("reading the LoRA"):
                adapters = lora.config_of_file(folder, subject.architecture.family)
            return assemble.build_frozen_transformer(subject.config, subject.architecture, adapters)
        config = replace(subject.config, model=replace(subject.config.model, variant=None))  # their names have none
        return assemble.build_frozen_transformer(config, replace(subject.architecture, folder=folder), LoraConfig())


@contextmanager
def in_safetensors(subject: Subject, checkpoint: Checkpoint) -> Iterator[Path]:
    """A checkpoint's weights as files that every rank can read its part of: beside the results, and gone afterwards.

    A collective.  All weights are in the precision that they are computed in, as they are while they train.
    """
    folder = subject.folder / "weights"
    disk = disks.look(folder)
    is_lora = checkpoint.manifest.lora is not None
    dtype = torch.float32 if is_lora else models.weight_dtype(subject.config.model)

    def write() -> None:
        try:
            consolidate(checkpoint.folder, folder, dtype, MAX_SHARD_BYTES, weights=checkpoint.weights)
        except OSError as error:
            raise UserError(f"{folder} cannot be written: {error.strerror}") from None

    try:
        disk.on_first(write, "reading the checkpoint")
        yield folder
        runtime.barrier()
    finally:
        if runtime.rank() == disk.first:
            for path in (folder, folder.with_name(f"{folder.name}.partial")):
                shutil.rmtree(path, ignore_errors=True)
