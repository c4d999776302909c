#!/bin/bash
# One H200, at most 420 s. Ranks that split on one card; a prompt of 1M; peaks at 128k; prefix and 32k prompts before and after the ring.
cd "$(dirname "$0")/.."; root=$PWD; site=${PYTHONPATH%%:*}
old=/tmp/all-old; mkdir -p $old; tar xJf "${OLD_TREE:-.carry/all-old.txz}" -C $old 2>&1 | tail -1
export PYTHONPATH=$site:$root PYTHONUNBUFFERED=1 HISPARSE_KERNEL_CACHE=${HISPARSE_KERNEL_CACHE:-/tmp/hk}; mkdir -p $HISPARSE_KERNEL_CACHE
export OMP_NUM_THREADS=2 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
began=$SECONDS; logs=/tmp/all-logs; mkdir -p $logs
at() { echo "== at $((SECONDS - began)) s: $*"; }
left() { local l=$(( $1 - SECONDS + began )); [ $l -lt 2 ] && l=2; echo $l; }
brief() { grep -v '"level": *"info"' "$1" | grep -v Warning | cut -c1-700 | tail -"$2"; }
run() { name=$1; s=$2; shift 2; timeout -s INT -k 5 $s "$@" > $logs/$name.txt 2>&1; echo "rc $? after $((SECONDS - began))" >> $logs/$name.txt; }
(run old-warm 200 env PYTHONPATH=$site:$old HISPARSE_KERNEL_CACHE=/tmp/hk-old python3 $root/ab/prefix.py old-warm 1 1) & A=$!
(run long-auto 230 python3 ab/long.py --prompt 131072 --matmul auto; run long-v32 $(left 245) python3 ab/long.py --prompt 131072 --family deepseek-v3.2) & B=$!
(run million 240 python3 ab/long.py --prompt 1048512) & C=$!
tests() { n=$1; shift; mkdir -p /tmp/all-t$n; run tests-$n 200 env TMPDIR=/tmp/all-t$n python3 -m pytest -q -n0 -p no:cacheprovider "$@"; }
(tests ds tests/gpu/test_group.py -k "on_one_gpu and deepseek") & D=$!
(tests glm tests/gpu/test_group.py -k "on_one_gpu and glm") & E=$!
(tests rows tests/gpu/test_rows_and_seats.py tests/gpu/test_runner.py -k "split_unit or rows_of or seats_are or replay_in") & F=$!
wait $D $E $F; at tests; for n in ds glm rows; do brief $logs/tests-$n.txt 14; done
wait $B; at 128k; for n in long-auto long-v32; do brief $logs/$n.txt 4; done
wait $C; at million; brief $logs/million.txt 4
wait $A; at old; brief $logs/old-warm.txt 2
for turn in 1 2 3; do for tree in old new; do
  [ $((SECONDS - began)) -gt 385 ] && break 2
  if [ $tree = old ]; then p=$old; k=/tmp/hk-old; else p=$root; k=$HISPARSE_KERNEL_CACHE; fi
  run $tree-$turn $(left 418) env PYTHONPATH=$site:$p HISPARSE_KERNEL_CACHE=$k python3 $root/ab/prefix.py $tree-$turn 12 6
  brief $logs/$tree-$turn.txt 2
done; done
at end
