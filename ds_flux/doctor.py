"""`ds-flux doctor`: whether every node of a hostfile, or this machine, can run what a config says.

With --data instead every image and caption of a run's data is tried as training would; that needs no model.
"""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ds_flux import findings, hostfile, nodes, progress, travel
from ds_flux.commands import DoctorCommand
from ds_flux.config import Config, DataConfig, ModelConfig
from ds_flux.data.captions import texts_of
from ds_flux.data.decode import BadSample
from ds_flux.data.images import in_one_line, upright
from ds_flux.data.skipped import Bad
from ds_flux.data.sources import Source, open_source
from ds_flux.data.stream import StreamedRow, open_stream
from ds_flux.findings import Finding
from ds_flux.nodes import Answer, Asker
from ds_flux.zero import ds_config

NUM_SHOWN = 20
SAMPLES_AT_ONCE = 256
NETWORK_BYTES = 16 << 20
HERE = "this machine"


@dataclass(frozen=True)
class DataReport:
    """What was found."""

    num_samples: int
    num_references: int
    sizes: Counter[tuple[int, int]]
    bad: list[Bad]


def check_data(config: DataConfig) -> DataReport:
    """Decode every image and reference, read every caption.

    Raises:
        UserError: there is no such data.
    """
    samples, total = every_sample(config)
    sizes: Counter[tuple[int, int]] = Counter()
    bad: list[Bad] = []
    num_references = 0
    with (
        ThreadPoolExecutor(max(1, config.dataloader_num_workers)) as pool,
        progress.bar(total=total, desc="look at the data", unit="sample") as bar,
    ):
        while some := list(islice(samples, SAMPLES_AT_ONCE)):
            for (source, index), found in zip(some, pool.map(lambda sample: look(sample[0], config, sample[1]), some)):
                bar.update()
                if isinstance(found, str):
                    bad.append(Bad(index, source.name(index), found))
                else:
                    sizes[found[0]] += 1
                    num_references += len(found) - 1
    return DataReport(sum(sizes.values()) + len(bad), num_references, sizes, bad)


def every_sample(config: DataConfig) -> tuple[Iterator[tuple[Source | StreamedRow, int]], int | None]:
    """What can be asked for a sample, and the sample's number there; and how many there are, if that is known."""
    if config.streaming:
        return ((row, 0) for row in open_stream(config, 0, ()).once()), None
    source = open_source(config)
    return ((source, index) for index in range(len(source))), len(source)


def look(source: Source | StreamedRow, config: DataConfig, index: int) -> list[tuple[int, int]] | str:
    """Sizes of the image and the references of a row, or what is wrong with it."""
    try:
        texts_of(source.caption(index))
        return [upright(image, config).size for image in (*source.images(index), *source.references(index))]
    except (BadSample, OSError, ValueError) as error:
        return in_one_line(error)


def report_of_data(config: Config) -> tuple[str, bool]:
    """In words, and whether a run would accept it."""
    found = check_data(config.data)
    allowed = 0.0 if config.data.on_bad_sample == "error" else config.data.max_bad_fraction
    is_fine = len(found.bad) <= allowed * found.num_samples
    lines = [f"{found.num_samples} samples, {found.num_references} references, {len(found.bad)} that cannot be used"]
    lines += [f"  {bad}" for bad in found.bad[:NUM_SHOWN]]
    lines += [f"  ... and {len(found.bad) - NUM_SHOWN} more"] if len(found.bad) > NUM_SHOWN else []
    lines += [f"{count:8} x {width}x{height}" for (width, height), count in found.sizes.most_common(NUM_SHOWN)]
    verdict = "a run would leave these out" if found.bad else "all of it can be used"
    lines.append(verdict if is_fine else "too many: mend or remove them, or raise --max_bad_fraction")
    return "\n".join(lines), is_fine


# ---------------------------------------------------------------------------------------------------------------------
# nodes


def report_of_nodes(config: Config, command: DoctorCommand) -> tuple[str, bool]:
    """A table, and whether all is well.

    Raises:
        UserError: the hostfile or the DeepSpeed JSON is malformed.
    """
    path = None if command.hostfile is None else Path(command.hostfile)
    slots = {HERE: 1} if path is None else hostfile.read(path)
    zero = ds_config.read(config.zero.deepspeed_config)
    asker = Asker(travel.variables(os.environ, [Path.home(), Path()]), command.ssh_port)
    found = look_at_nodes(asker, slots, kernels_of(zero), config, command.master_port)
    if path is not None:
        is_ready = all(one.is_fine for one in found)
        request = {"num_bytes": NETWORK_BYTES, "output_dir": config.run.output_dir}
        answer = asker.network(path, command.master_port, request) if is_ready else Answer(None, "not tried")
        is_local = len(slots) > 1 and zero.get("checkpoint", {}).get("use_node_local_storage", False)
        found += findings.connected(", ".join(slots), answer, sum(slots.values()), config.run.output_dir, is_local)
    return findings.table(found), all(one.is_fine for one in found)


def look_at_nodes(asker: Asker, slots: dict[str, int], kernels: list[str], config: Config, master_port: int) -> list[Finding]:
    """What can be told of each node for itself, and by comparing them; those that do not answer have one line."""
    names = {None if node == HERE else node: node for node in slots}
    reached = asker.ask_all(names, asker.reach)
    found = findings.reached({names[host]: answer for host, answer in reached.items()}) if HERE not in slots else []
    up = [host for host, answer in reached.items() if answer.error is None]

    def facts_of(host: str | None) -> Answer:
        is_first = host == next(iter(names))
        request = {"output_dir": config.run.output_dir, "models": model_names(config.model)}
        return asker.probe(host, "facts", {**request, "master_port": master_port if is_first else None}, nodes.FACTS_S)

    answers = {names[host]: answer for host, answer in asker.ask_all(up, facts_of).items()}
    found += [findings.silent(node, answer.error, asker.python) for node, answer in answers.items() if answer.error is not None]
    facts = {node: answer.value for node, answer in answers.items() if answer.error is None}
    if facts:
        found += findings.compared(facts, slots, config.run.output_dir, master_port)
    if kernels and len(facts) == len(slots):
        built = asker.ask_all(names, lambda host: asker.probe(host, "ops", kernels, nodes.OPS_S))
        found += findings.built({names[host]: answer for host, answer in built.items()})
    return found


def model_names(model: ModelConfig) -> list[str]:
    """Folders and hub ids that a run reads."""
    paths = [model.pretrained_model_name_or_path, model.transformer_path, model.vae_path, model.text_encoder_path]
    paths += [model.text_encoder_2_path, model.tokenizer_path, model.tokenizer_2_path, model.scheduler_path]
    return [path for path in paths if path is not None]


def kernels_of(config: dict[str, Any]) -> list[str]:
    """DeepSpeed's kernels that a run with this JSON builds at its start."""
    zero = config.get("zero_optimization", {})
    is_on_nvme = "nvme" in [(zero.get(key) or {}).get("device") for key in ("offload_optimizer", "offload_param")]
    is_on_cpu = ds_config.optimizer_device(config) != "none"
    return ["cpu_adam"] * is_on_cpu + ["async_io"] * is_on_nvme
