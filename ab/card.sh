#!/bin/bash
# A keeper of 10 GB of weights on one H200: attach, kills, faults, sums, memory, decode interleaved. At most 150 s.
cd "$(dirname "$0")/.."
export TOKENIZERS_PARALLELISM=false
mkdir -p /tmp/keeper-card
timeout 149 python3 ab/card.py /tmp/keeper-card 2>&1 | grep -v "products compiled\|loading weights" | cut -c1-420 | tail -90
rm -rf /tmp/keeper-card
