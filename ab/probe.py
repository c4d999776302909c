"""Put prints into a copy of the tree (argument 1)."""
import sys
root = sys.argv[1]
open(f"{root}/basics/probe_log.py", "w").write('''
import os, time
_f = None
def note(*words):
    global _f
    if _f is None:
        _f = open(f"{os.environ['PROBE_DIR']}/{os.getpid()}.log", "a")
    _f.write(f"{time.monotonic():.6f} {' '.join(map(str, words))}\\n")
    _f.flush()
''')
def sub(path, old, new):
    path = f"{root}/{path}"
    s = open(path).read()
    assert old in s, (path, old)
    open(path, "w").write(s.replace(old, new, 1))
p = "coordinator/scheduling/request_state.py"
sub(p, "        self._note(now, event, reason)\n\n    def _note", '        self._note(now, event, reason)\n        note("move", self.facts.request_index, self.facts.prompt_tokens, event)\n\n    def _note')
sub(p, "from basics.request_states", "from basics.probe_log import note\nfrom basics.request_states")
sub(p, "        self.facts = facts\n", '        self.facts = facts\n        note("move", facts.request_index, facts.prompt_tokens, "submitted")\n')
p = "worker/loop/executor.py"
sub(p, "from basics.rooms", "from basics.probe_log import note\nfrom basics.rooms")
sub(p, '        """A command for a departed placement does nothing."""\n', '        """A command for a departed placement does nothing."""\n        note("apply", type(command).__name__, getattr(command, "placement", 0), getattr(command, "request_index", -1))\n')
sub(p, "            for part in self._prompts.launch(unit):\n", '            w0 = time.monotonic()\n            parts = self._prompts.launch(unit)\n            note("unit", int(beside_steps), unit.stop - unit.first, f"{1e3 * (time.monotonic() - w0):.2f}", f"{1e3 * self._pace.plain_step_s:.2f}")\n            for part in parts:\n')
sub(p, "        request.first_token = None\n        now", '        request.first_token = None\n        note("first", request.placement)\n        now')
sub(p, "        request.progress.durable = request.prompt_tokens\n        if", '        request.progress.durable = request.prompt_tokens\n        note("takeover", request.placement)\n        if')
sub(p, "    def _leave(self, request: RunningRequest) -> None:\n", '    def _leave(self, request: RunningRequest) -> None:\n        note("leave", request.placement)\n')
