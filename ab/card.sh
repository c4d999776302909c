#!/bin/bash
export AB=$(mktemp -d) PYTHONUNBUFFERED=1
say() { echo "== $(date +%T) $*"; }
say begin
timeout 97 python3 ab/layer.py w8a8 > $AB/w8a8.txt 2>&1 & A=$!
timeout 97 python3 ab/layer.py weight_only > $AB/weight_only.txt 2>&1 & B=$!
timeout 97 python3 ab/layer.py map > $AB/map.txt 2>&1 & C=$!
wait $A; say w8a8; cut -c1-230 $AB/w8a8.txt | head -90
wait $B; say weight_only; cut -c1-200 $AB/weight_only.txt | head -34
wait $C; say map; cut -c1-900 $AB/map.txt | tail -12
say end
