#!/bin/bash
# One H200, at most 260 s. Split against unsplit bits at real sizes; a prompt of 1M; peaks at 128k; prefix and 32k prompts before and after the ring.
cd "$(dirname "$0")/.."; root=$PWD; site=${PYTHONPATH%%:*}
old=/tmp/all-old; mkdir -p $old; tar xJf "${OLD_TREE:-.carry/all-old.txz}" -C $old 2>&1 | tail -1
export PYTHONPATH=$site:$root PYTHONUNBUFFERED=1 HISPARSE_KERNEL_CACHE=${HISPARSE_KERNEL_CACHE:-/tmp/hk}; mkdir -p $HISPARSE_KERNEL_CACHE
export OMP_NUM_THREADS=2 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
began=$SECONDS; logs=/tmp/all-logs; mkdir -p $logs
at() { echo "== at $((SECONDS - began)) s: $*"; }
left() { local l=$(( $1 - SECONDS + began )); [ $l -lt 2 ] && l=2; echo $l; }
brief() { grep -v '"level": *"info"' "$1" | grep -v Warning | cut -c1-600 | tail -"$2"; }
run() { name=$1; s=$2; shift 2; timeout -s INT -k 3 $s "$@" > $logs/$name.txt 2>&1; echo "rc $? at $((SECONDS - began))" >> $logs/$name.txt; }
(run million 158 python3 ab/long.py --prompt 1048512) & C=$!
(run same-w8a8 100 python3 ab/same.py w8a8; run same-wo $(left 140) python3 ab/same.py weight_only) & S=$!
(run old-warm 130 env PYTHONPATH=$site:$old HISPARSE_KERNEL_CACHE=/tmp/hk-old python3 $root/ab/prefix.py old-warm 1 1) & A=$!
(run long-auto 140 python3 ab/long.py --prompt 131072 --matmul auto) & B=$!
mkdir -p /tmp/all-t
(run tests 140 env TMPDIR=/tmp/all-t python3 -m pytest -q -n0 -p no:cacheprovider tests/gpu/test_runner.py tests/gpu/test_rows_and_seats.py -k "split_unit or rows_of or seats_are or replay_in") & F=$!
wait $S; at same; brief $logs/same-w8a8.txt 14; brief $logs/same-wo.txt 14
wait $F; at tests; brief $logs/tests.txt 8
wait $B; at 128k; brief $logs/long-auto.txt 3
wait $A; brief $logs/old-warm.txt 2
wait $C; at million; brief $logs/million.txt 3
for turn in 1 2 3; do for tree in old new; do
  [ $((SECONDS - began)) -gt 236 ] && break 2
  if [ $tree = old ]; then p=$old; k=/tmp/hk-old; else p=$root; k=$HISPARSE_KERNEL_CACHE; fi
  run $tree-$turn $(left 256) env PYTHONPATH=$site:$p HISPARSE_KERNEL_CACHE=$k python3 $root/ab/prefix.py $tree-$turn 8 4
  brief $logs/$tree-$turn.txt 2
done; done
at end
