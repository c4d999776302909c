#!/bin/bash
# A keeper of 10 GB of weights on one H200: attach, kills, faults, sums, memory, decode interleaved. At most 150 s.
cd "$(dirname "$0")/.."
export TOKENIZERS_PARALLELISM=false BEGAN=$(date +%s)
mkdir -p /tmp/keeper-card
timeout 40 python3 -m pytest tests/gpu/test_kept_weights.py -q -n0 -p no:cacheprovider 2>&1 | tail -25 | cut -c1-300
timeout $((BEGAN + 148 - $(date +%s))) python3 ab/card.py /tmp/keeper-card 2>&1 | grep -v "products compiled\|loading weights" | cut -c1-420 | tail -80
rm -rf /tmp/keeper-card
