"""The scripts in launch/: what they refuse, what they make of SLURM's variables, and MPI's."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ds_flux import UserError, travel
from tests.conftest import Assets
from tests.distributed import ROOT, environment
from tests.nodes import PATH, Nodes


@pytest.mark.parametrize(
    "script", sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/*.sbatch")]), ids=lambda path: path.name
)
def test_scripts_are_bash(script: Path) -> None:
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


REFUSED = {
    "no hostfile": (["nowhere", "r.yaml"], "hostfile nowhere: no such file"),
    "zero slots": (["zero", "r.yaml"], "has no slots"),
    "no recipe": (["hosts", "none.yaml"], "none.yaml: no such file"),
    "no JSON": (["hosts", "r.yaml", "none.json"], "none.json: no such file"),
    "slurm": (["hosts", "--launcher", "slurm", "r.yaml"], "sbatch launch/slurm.sbatch"),
    "a node that is not there": (["hosts", "r.yaml"], "node1 does not let this machine in (ssh: "),
    "bad variables": (["hosts", "r.yaml"], ".deepspeed_env line 1: expected NAME=value, got `export A=1`"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_multi_node_refuses_before_anything_starts(tmp_path: Path, what: str) -> None:
    """One line; the launcher is not started."""
    words, said = REFUSED[what]
    (tmp_path / "hosts").write_text("node1 slots=2\n")
    (tmp_path / "zero").write_text("node1 slots=0\n")
    (tmp_path / "r.yaml").write_text("resolution: 32\n")
    shutil.copytree(ROOT / "ds_configs", tmp_path / "ds_configs")
    if what == "bad variables":
        (tmp_path / ".deepspeed_env").write_text("export A=1\n")
    for name in ("deepspeed", "pdsh"):
        (tmp_path / name).write_text("#!/bin/sh\necho started\n")
        (tmp_path / name).chmod(0o755)
    command = ["bash", str(ROOT / "launch/multi_node.sh"), *words]
    variables = {**environment(), "PATH": f"{tmp_path}:{PATH}"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""


SRUN = """#!/bin/sh
[ "$1 $2" = "--ntasks-per-node=1 --kill-on-bad-exit=1" ] || exit 3
shift 2
SLURM_NODEID=1 exec "$@"
"""
DEEPSPEED = """#!/bin/sh
echo "$@" >words
cp "$2" seen
"""


def test_a_hostfile_of_slurms_allocation(tmp_path: Path) -> None:
    """What the launcher is given on the second node; scontrol, srun and the launcher are stand-ins."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "scontrol").write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames gpu[1-2]' ] && printf 'gpu1\\ngpu2\\n'\n")
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "deepspeed").write_text(DEEPSPEED)
    for name in ("scontrol", "srun", "deepspeed"):
        (tmp_path / name).chmod(0o755)
    slurm = {"JOB_ID": "77", "JOB_NAME": "fine", "JOB_NODELIST": "gpu[1-2]", "GPUS_ON_NODE": "8", "SUBMIT_DIR": str(tmp_path)}
    variables = {**environment(), "PATH": f"{tmp_path}:{PATH}", **{f"SLURM_{name}": value for name, value in slurm.items()}}
    command = ["bash", str(ROOT / "launch/slurm.sbatch"), "r.yaml", "z.json", "--rank", "4"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == "gpu1 slots=8\ngpu2 slots=8\n"
    assert (tmp_path / "words").read_text() == (
        "--hostfile launch/hostfile.77 --no_ssh --node_rank 1 --master_addr gpu1 --master_port 20077 --module ds_flux train "
        "--config r.yaml --deepspeed_config z.json --output_dir out/fine --resume_from_checkpoint latest --rank 4\n"
    )
    assert not (tmp_path / "launch/hostfile.77").exists(), "nothing is left behind"


def test_ranks_that_mpi_has_started() -> None:
    of_mpi = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    of_mpi |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UserError, match="MASTER_ADDR"):
        travel.adopt_mpi(dict(of_mpi))
    variables = {**of_mpi, "MASTER_ADDR": "node1"}
    travel.adopt_mpi(variables)
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "MASTER_PORT": "29500"}
    assert variables == {**of_mpi, "MASTER_ADDR": "node1", **expected}
    already = {**variables, "RANK": "0"}
    travel.adopt_mpi(already)
    assert already["RANK"] == "0", "a launcher's own word wins"


def written(words: list[str], path: Path) -> str:
    """Flags as a recipe."""
    path.write_text(yaml.safe_dump(dict(zip((word[2:] for word in words[::2]), words[1::2]))))
    return str(path)


def test_openmpi_instead_of_pdsh(assets: Assets, nodes: Nodes, tmp_path: Path) -> None:
    """Four processes on two nodes that know of one another; one of them speaks."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian's openmpi-bin)")
    recipe = written(assets.flags(tmp_path / "out"), tmp_path / "r.yaml")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["bash", "launch/multi_node.sh", str(nodes.hostfile), "--launcher", "openmpi"]
    done = nodes.run([*command, recipe, "--dry_run"], **as_root)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert done.stdout.count("6 optimizer steps of 16 images on 4 processes") == 1


def test_one_node_of_two(assets: Assets, nodes: Nodes, tmp_path: Path) -> None:
    """--include: it is that node which works, where DeepSpeed by itself takes the one it is started on."""
    recipe = written(assets.flags(tmp_path / "out"), tmp_path / "r.yaml")
    command = ["bash", "launch/multi_node.sh", str(nodes.hostfile), "--include", "node2:0", recipe, "--dry_run"]
    done = nodes.run(command)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if "6 optimizer steps of 4 images on 1 processes" in line]
    assert line.startswith("node2: ")
