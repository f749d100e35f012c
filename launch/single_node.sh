#!/usr/bin/env bash
# Train on all GPUs of this machine:
#
#     bash launch/single_node.sh launch/recipes/flux1_dev_lora.yaml [ds_configs/zero3.json] [flags of ds-flux train]
set -euo pipefail
recipe=${1:?usage: launch/single_node.sh RECIPE.yaml [DEEPSPEED.json] [flags]}
shift
ds_config=ds_configs/zero3.json
if [ "${1:+${1##*.}}" = json ]; then ds_config=$1; shift; fi
level=warning
if [[ " $* " == *" --verbose "* ]]; then level=info; fi
exec deepspeed --log_level $level --module ds_flux train --config "$recipe" --deepspeed_config "$ds_config" "$@"
