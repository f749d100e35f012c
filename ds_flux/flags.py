"""Reading flags and YAML with jsonargparse, so that whatever is wrong is one line that names the nearest right thing."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, set_parsing_settings

from ds_flux import UserError

set_parsing_settings(docstring_parse_attribute_docstrings=True)  # help texts stand under the fields


OTHER_NAMES = {  # of diffusers' scripts -> ours, with a value where theirs is a switch for it
    "fsdp_text_encoder": ("shard_text_encoder", None),
    "enable_npu_flash_attention": ("attention_backend", "_native_npu"),
}


def parse(parser: ArgumentParser, argv: list[str]) -> Any:
    """`parser.parse_args` that also takes bare switches, and whose errors are one line with the nearest known name."""
    flags = {option[2:]: action for action in parser._actions for option in action.option_strings if option[:2] == "--"}
    switches = {name for name, action in flags.items() if is_switch(action)}
    argv = [in_our_name(argument) for argument in argv]
    for argument in argv:
        if argument.startswith("--"):
            check_known([argument[2:].split("=")[0].split("+")[0]], flags, "flag", "--")
    try:
        if isinstance(flags.get("config"), ActionConfigFile):
            check_files(values_of(argv, "--config"), set(flags) - {"help", "config", "print_config"})
            argv = with_files_first(argv)
        return parser.parse_args(with_explicit_switches(argv, switches))
    except ArgumentError as error:
        raise UserError(in_plain_words(str(error))) from None


def check_files(paths: list[str], known: set[str]) -> None:
    """Raise UserError for the first key of the YAML files that is not among the `known` ones."""
    for path in paths:
        settings = read_yaml(path)
        for name in OTHER_NAMES.keys() & settings.keys():
            ours, value = OTHER_NAMES[name]
            raise UserError(f"{name} in {path} is another name: write {ours}: {value or settings[name]}")
        if settings.get("mixed_precision") is False:  # as YAML reads a bare `no`
            raise UserError(f'mixed_precision in {path}: YAML takes no for false; write mixed_precision: "no"')
        check_known(settings, known, f"key in {path}")


def with_files_first(argv: list[str]) -> list[str]:
    """The command line wins over --config wherever it stands; jsonargparse lets the later one win."""
    files, rest = [], []
    left = iter(argv)
    for argument in left:
        place = files if argument.split("=")[0] == "--config" else rest
        place.append(argument)
        if argument == "--config":
            place += [value for value in [next(left, None)] if value is not None]
    return files + rest


def in_our_name(argument: str) -> str:
    """A flag that has another name here, by that."""
    name, equals, given = argument.removeprefix("--").partition("=")
    if not argument.startswith("--") or name not in OTHER_NAMES:
        return argument
    ours, value = OTHER_NAMES[name]
    return f"--{ours}={value}" if value else f"--{ours}{equals}{given}"


def in_plain_words(message: str) -> str:
    """One line of jsonargparse's message: the flag, what was expected, what came."""
    message = " ".join(message.split()).replace("typing.", "").replace("Expected a ", "expected ")
    message = re.sub(r"<class '(\w+)'>", r"\1", message)
    return re.sub(r'^Parser key "([^"]+)": ', r"--\1: ", message)


def is_switch(action: Any) -> bool:
    """Whether a parser action takes true or false (jsonargparse keeps the type in a private attribute)."""
    return action.type is bool or vars(action).get("_typehint") is bool


def with_explicit_switches(argv: list[str], switches: set[str]) -> list[str]:
    """diffusers' scripts write `--random_flip`; the typed parser wants `--random_flip true`."""
    out = []
    for argument, following in zip(argv, [*argv[1:], "--"]):
        out.append(argument)
        if argument[2:] in switches and argument[:2] == "--" and following.lower() not in ("true", "false", "yes", "no"):
            out.append("true")
    return out


def values_of(argv: list[str], flag: str) -> list[str]:
    """What `flag` is set to in argv, as `flag value` or `flag=value`."""
    spaced = [value for name, value in zip(argv, argv[1:]) if name == flag]
    return spaced + [a.split("=", 1)[1] for a in argv if a.startswith(flag + "=")]


def read_yaml(path: str) -> dict[str, Any]:
    """A flat YAML mapping.  Raises UserError when the file is absent or something else."""
    if not Path(path).is_file():
        raise UserError(f"--config {path}: no such file")
    try:
        settings = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"--config {path}: expected `key: value` lines, got a {type(settings).__name__}")
    return settings


def check_known(names: Iterable[str], known: Iterable[str], what: str, prefix: str = "") -> None:
    """Raise UserError for the first of `names` that is not among `known`, naming the nearest."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            hint = f"; the nearest known one is {prefix}{near[0]}" if near else ""
            raise UserError(f"unknown {what}: {prefix}{name}{hint}")


def names_of(value: str | list[str] | None) -> list[str]:
    """ "a, b" or ["a", "b"] -> ["a", "b"]."""
    parts = value.split(",") if isinstance(value, str) else value or []
    return [part.strip() for part in parts]


def steps_of(flag: str, asked: str | None) -> tuple[int, int] | None:
    """ "5" or "5-7" -> the first and the last step; None: none.  Raises UserError."""
    if asked is None:
        return None
    first, _, last = str(asked).partition("-")
    if not (first.isdigit() and (last or first).isdigit() and 0 < int(first) <= int(last or first)):
        raise UserError(f"{flag} {asked}: expected a step, or the first and the last one, as in 5-7")
    return int(first), int(last or first)
