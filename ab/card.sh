#!/bin/bash
export AB=$(mktemp -d) PYTHONUNBUFFERED=1
say() { echo "== $(date +%T) $*"; }
say begin
timeout 98 python3 ab/layer.py w8a8 > $AB/w8a8.txt 2>&1 & A=$!
timeout 98 python3 ab/layer.py weight_only > $AB/weight_only.txt 2>&1 & B=$!
(timeout -s INT 62 python3 -m pytest -q -p no:cacheprovider --maxfail=6 tests/gpu/test_pointwise.py tests/gpu/test_routing.py > $AB/tests.txt 2>&1; touch $AB/tests.done) & C=$!
wait $A; say w8a8; cut -c1-330 $AB/w8a8.txt | head -90
wait $B; say weight_only; cut -c1-230 $AB/weight_only.txt | head -30
wait $C; say tests; tail -5 $AB/tests.txt | cut -c1-200
say end
