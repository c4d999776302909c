# On 4 cores: taskset -c 0-3 bash ab/keys.sh. This tree, the tree before, this tree with prints; 75 s each at most.
cores=($(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0))[:4])'))
[ ${#cores[@]} -ge 4 ] && flags="--service-cores ${cores[0]},${cores[1]} --client-cores ${cores[2]} --attacker-cores ${cores[3]}"
site="${PYTHONPATH%:*}"; here="$PWD"
run() {
  cd "$1" || return
  PYTHONPATH="$1:$site" timeout ${LIMIT:-100} python3 -m tools.fuzz.two_keys --rooms --only prefixes --rounds "$2" $flags 2>&1 | grep '^{\|Error' | tail -3
}
for copy in before probe; do mkdir -p /tmp/keys_$copy && cp -r "$here"/. /tmp/keys_$copy/; done
cp ab/executor_before.py.txt /tmp/keys_before/worker/loop/executor.py; cp ab/prompt_order_before.py.txt /tmp/keys_before/worker/loop/prompt_order.py
mkdir -p /tmp/keys_logs && rm -f /tmp/keys_logs/*
python3 ab/probe.py /tmp/keys_probe
timeout 100 python3 -c "import torch, transformers, trio, llguidance" 2>/dev/null
export PROBE_DIR=/tmp/keys_logs
echo "now, with prints: $(LIMIT=130 run /tmp/keys_probe 3)"
python3 "$here"/ab/stages.py /tmp/keys_logs
echo "before: $(run /tmp/keys_before 2)"
