#!/bin/bash
# Two H200s: a 32k prompt split by both ranks against unsplit; then tokens of generate() over NCCL. At most 150 s.
cd "$(dirname "$0")/.."
nvidia-smi topo -m 2>/dev/null | head -4
bench() { timeout "$1" python3 -m benchmarks.prompt_layer --gpus 2 "${@:2}" 2>&1 | grep -v '"level": *"info"' | cut -c1-600 | tail -12; }
began=$SECONDS
bench 85 --layers 6 --repeats 5
echo "took $((SECONDS - began)) s"
timeout $((110 - SECONDS + began)) python3 -m pytest tests/gpu/test_group.py -q -x -n0 -p no:cacheprovider \
    -k "split_the_prompts" 2>&1 | tail -15 | cut -c1-400
echo "took $((SECONDS - began)) s"
left=$((148 - SECONDS + began))
[ $left -gt 20 ] && bench $left --layers 6 --repeats 3 --matmul w8a8
echo "took $((SECONDS - began)) s"
