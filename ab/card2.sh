#!/bin/bash
# Two H200s, at most 170 s: a 32k prompt split by both ranks against unsplit; split tests over NCCL; rows of a slab from a start.
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True HISPARSE_KERNEL_CACHE=${HISPARSE_KERNEL_CACHE:-/tmp/hk}; mkdir -p $HISPARSE_KERNEL_CACHE
nvidia-smi topo -m 2>/dev/null | head -4
began=$SECONDS; left() { local l=$(( $1 - SECONDS + began )); [ $l -lt 2 ] && l=2; echo $l; }
bench() { s=$1; shift; timeout -s INT -k 3 "$s" python3 -m benchmarks.prompt_layer --gpus 2 "$@" 2>&1 | grep -v '"level": *"info"' | grep -v Warning | cut -c1-700 | tail -12; echo "at $((SECONDS - began)) s"; }
bench 85 --layers 6 --repeats 5
timeout -s INT -k 3 $(left 145) python3 -m pytest tests/gpu/test_group.py -q -n0 -p no:cacheprovider -k "over_nccl and split" 2>&1 | tail -15 | cut -c1-400; echo "at $((SECONDS - began)) s"
TMPDIR=/tmp/t-rows timeout -s INT -k 3 $(left 166) python3 -m pytest tests/gpu/test_rows_and_seats.py -q -n0 -p no:cacheprovider 2>&1 | tail -4 | cut -c1-300
[ $(left 168) -gt 45 ] && bench $(left 168) --layers 6 --repeats 3 --matmul w8a8
echo "end at $((SECONDS - began)) s"
