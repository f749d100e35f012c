"""The settings of a training run: flags, YAML, help.

A section is a frozen dataclass for one consumer, which receives its section and never the whole.  On the command line and
in YAML the fields are flat and carry the names of diffusers' FLUX scripts.  Order: defaults < --config run.yaml < flags.
"""

from dataclasses import dataclass, fields
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from ds_flux.flags import parse
from ds_flux.sections import (
    CheckpointConfig,
    DataConfig,
    FlowConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainConfig,
    ValidationConfig,
    ZeroConfig,
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """One complete training run."""

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig
    data: DataConfig
    flow: FlowConfig
    optim: OptimConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    validation: ValidationConfig
    zero: ZeroConfig
    log: LogConfig

    def flat(self) -> dict[str, Any]:
        """{flag: value} of every section."""
        return {f.name: vars(section)[f.name] for section in vars(self).values() for f in fields(section)}

    def to_yaml(self) -> str:
        """The settings as a YAML file that --config reads back."""
        return yaml.safe_dump(self.flat(), sort_keys=False)


SECTIONS: dict[str, type] = {f.name: f.type for f in fields(Config)}


def load(argv: list[str], prog: str, command: type) -> tuple[Config, Any]:
    """The settings of `argv`, unchecked against each other, and the command's own flags as a dataclass of `commands`.

    Raises:
        UserError: unknown flag or key (the nearest known one is named), or a wrong type.
    """
    parser = ArgumentParser(prog=prog, exit_on_error=False)
    parser.add_argument("--config", action="config", help="YAML file with these same flat keys; the command line wins")
    for section in (command, *SECTIONS.values()):
        parser.add_class_arguments(section)
    namespace = parse(parser, argv)

    def build(section: type) -> Any:
        return section(**{f.name: namespace[f.name] for f in fields(section)})

    return Config(**{name: build(section) for name, section in SECTIONS.items()}), build(command)
