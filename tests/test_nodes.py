"""Two nodes for real: ssh, pdsh, the hostfile; checkpoints on a disk that they share, and on disks of their own."""

import json
from pathlib import Path
from typing import Any

import yaml

from ds_flux import keep
from ds_flux.consolidate import main as consolidate
from tests.conftest import Assets
from tests.distributed import metrics
from tests.nodes import Nodes

ODD = "it's 100% of $HOME; *"


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


def test_a_run_on_a_shared_disk(assets: Assets, nodes: Nodes, tmp_path: Path) -> None:
    """Trains on both, with words that a shell would change; its checkpoint goes on in one process, and is consolidated."""
    words = recipe(assets, tmp_path / "out", tmp_path)
    output = multi_node(nodes, *words, "--caption_prefix", ODD, "--instance_prompt=x;y")
    assert "on 4 processes" in output
    for node in nodes.hosts:
        assert f"{node}:" in output
    settings = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert (settings["caption_prefix"], settings["instance_prompt"]) == (ODD, "x;y")
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1, 2, 3, 4]
    assert consolidate([str(tmp_path / "out"), str(tmp_path / "transformer")]) == 0


def ds_config(assets: Assets, stage: int) -> str:
    """Of nodes with disks of their own."""
    sections = json.loads(Path(assets.ds_config(stage)).read_text())
    path = assets.folder / f"local{stage}.json"
    path.write_text(json.dumps({**sections, "checkpoint": {"use_node_local_storage": True}}))
    return str(path)


SHORT = {"train_batch_size": 2, "max_train_steps": 4, "checkpointing_steps": 2}


def test_runs_on_disks_of_their_own(assets: Assets, nodes: Nodes, tmp_path: Path) -> None:
    """Refused unless asked for; then each node keeps its part, goes on from it, and the parts can be gathered."""
    runs = {3: {"ema_decay": 0.5, "rank": 4}, 2: {}}
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
    nodes.run_jobs(jobs, tmp_path)
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
    checkpoint, out = folder / run.name / "checkpoint-4", folder / f"{run.name}-consolidated"
    assert keep.main(["verify", str(checkpoint)]) == 0
    assert consolidate([str(checkpoint), str(out), "--dtype", "fp32"]) == 0
    return b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors")))
