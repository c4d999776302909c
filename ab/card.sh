#!/bin/bash
# Second call: what a step has gained; prompts' lists; the rank's table; tests of what changed.
export HISPARSE_KERNEL_CACHE=/tmp/kc PYTHONPATH="${PYTHONPATH:-$PWD}:$PWD" PYTHONUNBUFFERED=1 OUT="${OUT:-/tmp}"
mkdir -p /tmp/kc; rm -f /tmp/gate /tmp/gate.up
T0=$(date +%s); at() { echo "== $1 at $(( $(date +%s) - T0 ))s"; }; past() { echo $(( $(date +%s) - T0 )); }
S=kernels/cuda/src; P="ab/p0 ab/p2 ab/p2:TEAM_REGISTERS=152,LISTER_REGISTERS=72 ab/p6 ab/p6:TEAM_REGISTERS=152,LISTER_REGISTERS=72 ab/p6:LIST_READS=4"
END=$((T0 + 150)) timeout 152 python3 ab/rank.py 13 /tmp/gate ab/cells2.py > /tmp/rank.out 2>&1 & RANK=$!
timeout 90 python3 ab/pindex.py compile $P $S > /tmp/u1 2>&1 & A=$!
t() { n=$1; shift; timeout 60 python3 -m pytest tests/gpu/$n.py -q -x -p no:cacheprovider "$@" > /tmp/t_$n 2>&1; echo "$n: $(tail -n 1 /tmp/t_$n | cut -c1-120)"; grep -h "^E " /tmp/t_$n | head -n 3 | cut -c1-200; }
t test_prompt_index & B=$!; t test_routing & C=$!; t test_deep_gemm -k "not oracle and not float32" & D=$!
wait $A $B $C $D; grep -h FAILED /tmp/u1 | cut -c1-200 | head -5; at compiled
while [ ! -f /tmp/gate.up ] && [ $(past) -lt 75 ] && kill -0 $RANK 2>/dev/null; do sleep 0.5; done; at up
timeout 40 python3 ab/pindex.py run $P 2>&1 | tail -n 8 | cut -c1-150; at prompts
touch /tmp/gate; wait $RANK; grep -v "^weights\|^pool\|Warning\|warn" /tmp/rank.out | cut -c1-1600 | tail -n 40; at steps
timeout 20 python3 -m benchmarks.prompt_index --out $OUT/prompt.json 2>&1 | sed 's/"//g; s/fp8, context/c/; s/overlap.*//' | cut -c1-80; at prompt_index
L=$(( 293 - $(past) )); timeout $L python3 -m benchmarks.rank --of 8 --contexts 32768 --overlaps 0.99 --matmul auto --budget-seconds $((L - 12)) --out $OUT/rank.json 2>&1 | grep -v arn | cut -c1-260 | tail -n 9; at rank
