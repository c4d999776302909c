#!/bin/bash
export AB=$(mktemp -d) PYTHONUNBUFFERED=1
say() { echo "== $(date +%T) $*"; }
say begin
touch $AB/weight_only.ready $AB/tests.done
timeout 60 python3 ab/layer.py w8a8 > $AB/w8a8.txt 2>&1
say w8a8; cut -c1-330 $AB/w8a8.txt | head -90
touch $AB/w8a8.done
timeout 50 python3 ab/layer.py weight_only > $AB/weight_only.txt 2>&1
say weight_only; cut -c1-230 $AB/weight_only.txt | head -26
say end
