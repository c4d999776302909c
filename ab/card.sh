#!/bin/bash
export HISPARSE_KERNEL_CACHE=$PWD/ab/cache PYTHONPATH="${PYTHONPATH:-$PWD}"
T0=$(date +%s); now() { echo $(( $(date +%s) - T0 )); }; at() { echo "== $1 at $(now)s"; }
for i in 0 1 2 3 4; do timeout 25 python3 ab/bench.py compile $i 5 > /tmp/dc$i 2>&1 & done; wait; head -c 300 /tmp/dc0; at compiled
timeout 15 python3 ab/bench.py check 2>&1 | tail -n 12 | cut -c1-300; at checked
LEFT=14 timeout 18 python3 ab/bench.py times 2>&1 | tail -n 24 | cut -c1-420; at timed
timeout 9 python3 ab/bench.py probe 2>&1 | tail -n 14 | cut -c1-420; at probed
