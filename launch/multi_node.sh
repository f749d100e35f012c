#!/usr/bin/env bash
# Train on the nodes of a hostfile; run on the first of them.  The repository, the model and the output folder lie on every
# node at the same path (the output folder on a shared disk), and ssh works without a password (pdsh is DeepSpeed's launcher):
#
#     cp launch/hostfile.example launch/hostfile        # and edit it
#     bash launch/multi_node.sh launch/hostfile launch/recipes/flux1_dev_full.yaml [ds_configs/zero3.json] [flags of ds-flux train]
set -euo pipefail
hostfile=${1:?usage: launch/multi_node.sh HOSTFILE RECIPE.yaml [DEEPSPEED.json] [flags]}
recipe=${2:?usage: launch/multi_node.sh HOSTFILE RECIPE.yaml [DEEPSPEED.json] [flags]}
shift 2
# DeepSpeed itself trains on this node alone if the file is not there
[ -f "$hostfile" ] || { echo "launch/multi_node.sh: error: hostfile $hostfile: no such file" >&2; exit 2; }
ds_config=ds_configs/zero3.json
if [ "${1:+${1##*.}}" = json ]; then ds_config=$1; shift; fi
exec deepspeed --hostfile "$hostfile" --module ds_flux train --config "$recipe" --deepspeed_config "$ds_config" "$@"
