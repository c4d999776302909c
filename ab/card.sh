#!/bin/bash
# Weights mapped against own: attach after the library's imports, products of a decode step interleaved. At most 41 s.
cd "$(dirname "$0")/.."
export TOKENIZERS_PARALLELISM=false BEGAN=$(date +%s)
mkdir -p /tmp/keeper-card
timeout 41 python3 ab/card.py /tmp/keeper-card 2>&1 | grep -v "products compiled\|loading weights" | cut -c1-420 | tail -60
rm -rf /tmp/keeper-card
