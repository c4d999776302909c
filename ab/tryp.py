import sys
from pathlib import Path
import kernels.cuda.jit as jit
from kernels.cuda import prompt_index
jit.SOURCE_DIR = Path(sys.argv[1]); kb=int(sys.argv[2])
keep = jit.parse_resources
def show(log):
    print([l for l in log.splitlines() if "C7" in l or "warning" in l or "spill" in l or "registers" in l]); return keep(log)
jit.parse_resources = show
extra=tuple((a.split("=")[0], int(a.split("=")[1])) for a in sys.argv[4:])
d=dict(prompt_index.defines_of(64,kb)); d.update(dict(extra))
c=jit.compile_unit("prompt_index", tuple(d.items()), "sm_90")
Path(sys.argv[3]).write_bytes(c.cubin); print(len(c.cubin))
jit.compile_unit("prompt_merge", (), "sm_90")
