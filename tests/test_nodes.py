"""Two nodes for real: ssh, pdsh, the hostfile; checkpoints on a disk that they share, and on disks of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_flux import keep
from ds_flux.consolidate import main as consolidate
from tests.conftest import Assets
from tests.distributed import metrics
from tests.nodes import Nodes

ODD = {"--caption_prefix": "it's 100% of $HOME; *", "--instance_prompt": "x;y"}


def recipe(assets: Assets, output_dir: Path, folder: Path, **changes: object) -> tuple[str, str]:
    """A YAML file of a run of four steps with a checkpoint in its middle, and its DeepSpeed JSON."""
    words = assets.flags(output_dir, train_batch_size=2, max_train_steps=4, checkpointing_steps=2, **changes)
    settings = {name[2:]: value if value == "no" else yaml.safe_load(value) for name, value in zip(words[::2], words[1::2])}
    path = folder / f"{output_dir.name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path), settings["deepspeed_config"]


def multi_node(nodes: Nodes, *words: str, **variables: str) -> str:
    """Run launch/multi_node.sh on node 1; its output."""
    done = nodes.run(["bash", "launch/multi_node.sh", str(nodes.hostfile), *words], **variables)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


@pytest.fixture(scope="module")
def shared(assets: Assets, nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that launch/multi_node.sh has started."""
    folder = tmp_path_factory.mktemp("shared")
    output = multi_node(nodes, *recipe(assets, folder / "out", folder), *(word for pair in ODD.items() for word in pair))
    assert "on 4 processes" in output
    for node in nodes.hosts:
        assert f"{node}:" in output
    return folder / "out"


def test_a_run_on_a_shared_disk(shared: Path) -> None:
    """It had its words as they were, though a shell would change them, and took all of its steps."""
    settings = yaml.safe_load((shared / "config.yaml").read_text())
    assert {f"--{name}": settings[name] for name in ("caption_prefix", "instance_prompt")} == ODD
    assert [row["step"] for row in metrics(shared)] == [1, 2, 3, 4]


def ds_config(assets: Assets, stage: int) -> str:
    """Of nodes with disks of their own."""
    sections = json.loads(Path(assets.ds_config(stage)).read_text())
    path = assets.folder / f"local{stage}.json"
    path.write_text(json.dumps({**sections, "checkpoint": {"use_node_local_storage": True}}))
    return str(path)


SHORT = {"train_batch_size": 2, "max_train_steps": 4, "checkpointing_steps": 2}


def test_runs_on_disks_of_their_own(assets: Assets, nodes: Nodes, shared: Path, tmp_path: Path) -> None:
    """Refused unless asked for; then each node keeps its part, goes on from it, and the parts can be gathered.

    In the same launch, which takes long to start, the run on the shared disk is resumed.
    """
    runs: dict[int, dict[str, Any]] = {3: {"ema_decay": 0.5, "rank": 4}, 2: {}}
    path_of = {stage: ds_config(assets, stage) for stage in runs}
    jobs: list[Any] = [
        refusal(assets.flags(nodes.disk / "no"), f"--output_dir {nodes.disk}/no is not shared: ranks 2, 3"),
        refusal(assets.flags(tmp_path / "no", deepspeed_config=path_of[3]), "all nodes see the same --output_dir"),
        refusal(assets.flags(nodes.disk / "no", deepspeed_config=path_of[3], cache_text="true"), "Give --cache_dir"),
    ]
    for stage, more in runs.items():
        flags = {**SHORT, **more, "deepspeed_config": path_of[stage]}
        jobs.append(assets.flags(nodes.disk / f"straight{stage}", **flags))
        halfway = nodes.disk / f"straight{stage}/checkpoint-2"
        jobs.append(assets.flags(nodes.disk / f"resumed{stage}", resume_from_checkpoint=halfway, **flags))
    halfway = nodes.disk / "straight3/checkpoint-2"
    again = {**SHORT, **runs[3], "deepspeed_config": ds_config(assets, 1), "resume_from_checkpoint": halfway}
    jobs.append(refusal(assets.flags(nodes.disk / "no", **again), "gather it first"))
    flags = {**SHORT, **{name[2:]: value for name, value in ODD.items()}}
    jobs.append(assets.flags(tmp_path / "shared", resume_from_checkpoint=shared / "checkpoint-2", **flags))
    nodes.run_jobs(jobs, tmp_path)
    assert consolidated(shared, tmp_path / "a") == consolidated(tmp_path / "shared", tmp_path / "b")
    checkpoint = nodes.disk / "straight3/checkpoint-4"
    done = nodes.run(["ds-flux", "consolidate", str(checkpoint), str(tmp_path / "out")])
    said = f"{checkpoint} is not whole here: the rest is on node2; on node1: {gathering(checkpoint)}\n"
    assert (done.returncode, done.stderr) == (2, f"ds-flux: error: {said}")
    for stage in runs:
        straight, resumed = (weights(nodes, nodes.disk / f"{kind}{stage}", tmp_path) for kind in ("straight", "resumed"))
        assert straight == resumed and len(straight) > 1000


def refusal(flags: list[str], words: str) -> dict[str, Any]:
    return {"function": "tests.nodes:refused", "args": [flags, words]}


def gathering(checkpoint: Path) -> str:
    """The command that brings node 2's part to node 1."""
    return f"rsync -a node2:{checkpoint}/ {checkpoint}/"


def weights(nodes: Nodes, run: Path, folder: Path) -> bytes:
    """Of a run's end, from the parts of both nodes; where not even one checksum is wrong."""
    command = f"{gathering(run / 'checkpoint-4')} && cp -r {run} {folder}"
    assert nodes.run(["sh", "-c", command]).returncode == 0
    assert keep.main(["verify", str(folder / run.name / "checkpoint-4")]) == 0
    return consolidated(folder / run.name, folder / f"{run.name}-consolidated")


def consolidated(run: Path, out: Path) -> bytes:
    """The weights of a run's end."""
    assert consolidate([str(run / "checkpoint-4"), str(out), "--dtype", "fp32"]) == 0
    return b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors")))
