#!/usr/bin/env bash
# Train on the nodes of a hostfile; run on the first of them, from the root of the repository:
#
#     cp launch/hostfile.example launch/hostfile        # and edit it
#     ds-flux doctor --hostfile launch/hostfile --config launch/recipes/flux1_dev_full.yaml
#     bash launch/multi_node.sh launch/hostfile [flags of deepspeed] RECIPE.yaml [DEEPSPEED.json] [flags of ds-flux train]
#
# The repository, its environment and the model lie at the same path on every node, and so does the output folder: on a shared
# disk, or on each node's own with {"checkpoint": {"use_node_local_storage": true}} in the DeepSpeed JSON.
#
# Flags of deepspeed, in front of the recipe:
#     --include node1@node2:0,1                       only these nodes, and of node2 only these GPUs
#     --exclude node2:3                               all but these
#     --num_nodes 2, --num_gpus 4                     the first so many nodes, and GPUs of each
#     --master_addr 10.0.0.1, --master_port 29600     where rank 0 listens; by default node1's first address, port 29500
#     --ssh_port 2222
#     --launcher openmpi --launcher_args "--mca btl_tcp_if_include eth1"     instead of pdsh, which is the default; or mpich,
#                                                     impi, mvapich.  For SLURM there is launch/slurm.sbatch
#     --no_ssh --node_rank 1 --master_addr node1      no ssh: run this same line on every node, each with its own --node_rank
#
# Every node gets this shell's python, its working folder, and its variables that ds_flux/travel.py names (PATH, HF_*, NCCL_*,
# OMP_*, ...); lines NAME=value of a file .deepspeed_env, at home or here, add others or change them.
set -euo pipefail
usage="usage: launch/multi_node.sh HOSTFILE [flags of deepspeed] RECIPE.yaml [DEEPSPEED.json] [flags of ds-flux train]"
fail() { echo "launch/multi_node.sh: error: $1" >&2; exit 2; }

# ---- the words of the command line
hostfile=${1:?$usage}; shift
python -m ds_flux.hostfile "$hostfile"
launcher=pdsh ssh=yes ssh_port="" master_port=29500 of_deepspeed=()
first=$(sed -n 's/^ *\([^ #][^ ]*\) .*/\1/p' "$hostfile" | head -1)
master_addr=$first
while [ $# -gt 0 ] && [[ $1 != *.yaml && $1 != *.yml ]]; do
    case $1 in
        --no_ssh) ssh=no ;;
        --launcher | --master_addr | --master_port | --ssh_port) declare "${1#--}=${2:?$usage}" ;;
        --launcher=* | --master_addr=* | --master_port=* | --ssh_port=*) declare "${1#--}" ;;
    esac
    of_deepspeed+=("$1"); shift
done
recipe=${1:?$usage}; shift
ds_config=ds_configs/zero3.json
if [ "${1:+${1##*.}}" = json ]; then ds_config=$1; shift; fi
for file in "$recipe" "$ds_config"; do [ -f "$file" ] || fail "$file: no such file"; done

words=(--config "$recipe" --deepspeed_config "$ds_config" "$@")
if [ $ssh = no ]; then
    exec deepspeed --hostfile "$hostfile" "${of_deepspeed[@]}" --module ds_flux train "${words[@]}"
fi

# ---- what the nodes need
case ${launcher,,} in
    slurm) fail "DeepSpeed's own slurm launcher cannot start a module: sbatch launch/slurm.sbatch" ;;
    pdsh) command -v pdsh >/dev/null || fail "pdsh is not installed here (Debian, Ubuntu: apt install pdsh); or give --launcher" ;;
esac
if [ "${launcher,,}" = pdsh ]; then
    mapfile -d '' words < <(python -m ds_flux.travel words -- "${words[@]}")
    of_deepspeed+=(--force_multi)  # or --include with one node left would train on this one, whichever it is
fi
file_of_variables=$(mktemp)
python -m ds_flux.travel variables >"$file_of_variables" || { rm "$file_of_variables"; exit 2; }
echo "MASTER_ADDR=$master_addr"$'\n'"MASTER_PORT=$master_port" >>"$file_of_variables"  # what MPI's processes go by
# read by deepspeed through the open file, which leaves nothing behind
exec 3<"$file_of_variables"
rm "$file_of_variables"
# where its first node does not answer, DeepSpeed ends with a traceback; with --include or --exclude it may be another node
if [[ " ${of_deepspeed[*]}" != *" --include"* && " ${of_deepspeed[*]}" != *" --exclude"* ]]; then
    reason=$(ssh -n -o BatchMode=yes -o ConnectTimeout=8 ${ssh_port:+-p "$ssh_port"} "$first" true 2>&1 | tr -d '\r') ||
        fail "$first does not let this machine in (${reason##*$'\n'}); what to do: ds-flux doctor --hostfile $hostfile"
fi
DS_ENV_FILE=/proc/self/fd/3 exec deepspeed --hostfile "$hostfile" "${of_deepspeed[@]}" --module ds_flux train "${words[@]}"
