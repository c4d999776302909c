# On 4 cores: taskset -c 0-3 bash ab/keys.sh. This tree, the tree before, this tree with prints; 75 s each at most.
cores=($(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0))[:4])'))
[ ${#cores[@]} -ge 4 ] && flags="--service-cores ${cores[0]},${cores[1]} --client-cores ${cores[2]} --attacker-cores ${cores[3]}"
site="${PYTHONPATH%:*}"; here="$PWD"
run() {
  cd "$1" || return
  PYTHONPATH="$1:$site" timeout ${LIMIT:-100} python3 -m tools.fuzz.two_keys --rooms --only prefixes --rounds "$2" $flags 2>&1 | grep '^{\|Error' | tail -3
}
for copy in before probe; do mkdir -p /tmp/keys_$copy && cp -r "$here"/. /tmp/keys_$copy/; done
cp ab/executor_before.py.txt /tmp/keys_before/worker/loop/executor.py
mkdir -p /tmp/keys_logs && rm -f /tmp/keys_logs/*
python3 ab/probe.py /tmp/keys_probe
[ -n "$PROBE_ONLY" ] || { echo "now: $(run "$here" 3)"; echo "before: $(run /tmp/keys_before 3)"; }
export PROBE_DIR=/tmp/keys_logs
echo "with prints: $(run /tmp/keys_probe ${PROBE_ROUNDS:-2})"
python3 "$here"/ab/stages.py /tmp/keys_logs
