#!/bin/bash
# First call: a rank's step by blocks of swap_in and by streams; prompts' lists; bfloat16 attention's entries.
export HISPARSE_KERNEL_CACHE=/tmp/kc PYTHONPATH="${PYTHONPATH:-$PWD}:$PWD" PYTHONUNBUFFERED=1
mkdir -p /tmp/kc; rm -f /tmp/gate /tmp/gate.up
T0=$(date +%s); at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }; past() { echo $(( $(date +%s) - T0 )); }
S=kernels/cuda/src
END=$((T0 + 284)) LAYERS=13 timeout 285 python3 ab/rank.py 13 /tmp/gate ab/cells1.py > /tmp/rank.out 2>&1 & RANK=$!
HD=128 KB=2 timeout 90 python3 ab/compile.py $S ab/b:LOOK=1 ab/b:LOOK=2 > /tmp/u1 2>&1 & A=$!
HD=128 KB=2 timeout 90 python3 ab/compile.py ab/b:LOOK=2,FETCH=1 ab/b:LOOK=2,BFA=1 ab/b:LOOK=2,FETCH=1,BFA=1 > /tmp/u2 2>&1 & B=$!
timeout 90 python3 ab/pindex.py compile ab/p0 ab/p2 $S ab/q2 > /tmp/u3 2>&1 & C=$!
wait $A $B $C; grep -h FAILED /tmp/u? | cut -c1-200 | head -5; at compiled
for v in LOOK=2,FETCH=1 LOOK=2,FETCH=1,BFA=1; do KINDS=bfloat16 HD=128 timeout 25 python3 ab/attn.py --check ab/b:$v 2>&1 | tail -n 1 | cut -c1-230; done; at checked
while [ ! -f /tmp/gate.up ] && [ $(past) -lt 130 ] && kill -0 $RANK 2>/dev/null; do sleep 0.5; done; at up; head -n 3 /tmp/rank.out | cut -c1-200
timeout 45 python3 ab/pindex.py run ab/p0 ab/p2 $S ab/q2 2>&1 | tail -n 9 | cut -c1-150; at prompts
C=d64,d128,p2048,p4096
echo "bf16: main LOOK=1 LOOK=2 +FETCH LOOK=2+BFA all"; timeout 26 python3 ab/attn.py --cells bfx128${C//,/,bfx128} $S ab/b:LOOK=1 ab/b:LOOK=2 ab/b:LOOK=2,FETCH=1 ab/b:LOOK=2,BFA=1 ab/b:LOOK=2,FETCH=1,BFA=1 2>&1 | tail -n 4 | cut -c1-200; at attention
touch /tmp/gate; wait $RANK; grep -v "^weights\|^pool\|Warning\|warn" /tmp/rank.out | cut -c1-1500 | tail -n 45; at rank
