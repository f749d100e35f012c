#!/usr/bin/env bash
# From a fresh clone to images of a model trained here, without a GPU and without a download but packages:
#
#     bash launch/quickstart.sh [FOLDER]          (default: out/quickstart; it must not hold an earlier run)
#
# Makes .venv, a small FLUX.1 and a data set of handwritten digits; trains with two ZeRO-3 processes, parameters and
# optimizer offloaded, T5 in a ZeRO-3 engine of its own; stops half-way and resumes; consolidates; samples with diffusers'
# FluxPipeline; writes the run's page (ds-flux report).  The last line is one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-out/quickstart}
if [ -e "$folder/out" ]; then echo "$folder holds an earlier run: remove it, or name another folder" >&2; exit 2; fi
. launch/install.sh demo
export HF_HUB_OFFLINE=1
[ -e /dev/nvidia0 ] || export DS_ACCELERATOR=cpu
began=$(date +%s)

echo "== 1/5 a small FLUX.1 and 1,797 handwritten digits"
OMP_NUM_THREADS=2 ds-flux demo --output_dir "$folder"

train=(deepspeed --log_level warning --num_accelerators 2 --module ds_flux train
    --config "$folder/run.yaml" --deepspeed_config ds_configs/zero3_offload.json)

echo "== 2/5 training, to be stopped by SIGTERM after 300 steps: a checkpoint is written, nothing is lost"
"${train[@]}" &
launcher=$!
steps() { cat "$folder/out/logs/metrics.jsonl" 2>/dev/null | wc -l; }
while kill -0 $launcher 2>/dev/null && [ "$(steps)" -lt 300 ]; do sleep 1; done
pkill -TERM -f -- "-m ds_flux --local_rank=0 train --config $folder/run.yaml" || true
status=0; wait $launcher || status=$?
[ $status -eq 0 ] || { echo "the run ended with status $status instead of 0, as a run that is asked to stop does" >&2; exit 1; }

echo "== 3/5 going on from there"
"${train[@]}" --resume_from_checkpoint latest

echo "== 4/5 ZeRO checkpoint -> safetensors"
ds-flux consolidate "$folder/out" "$folder/transformer"

echo "== 5/5 100 digits from diffusers' FluxPipeline, and the samples of the run, shown to a classifier that knows the real ones"
OMP_NUM_THREADS=2 ds-flux demo --output_dir "$folder" --score "$folder/transformer" --began "$began"
