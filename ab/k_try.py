import os, sys, socket, subprocess, time, tempfile
from pathlib import Path
import torch
from protocol import logs

logs.configure("info", "logfmt")
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner

d = Path(tempfile.mkdtemp())
ck = d / "m"
write_tiny_checkpoint(ck, fp8="fp8" in sys.argv)
sock = d / "w.sock"
l = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
l.bind(str(sock))
l.listen()
p = subprocess.Popen(
    [sys.executable, "-m", "hisparse.cluster.weights", str(l.fileno()), str(os.getpid()), "info", "logfmt", "w0"],
    pass_fds=(l.fileno(),),
)
l.close()
try:
    a = TransformersRunner.load(ck, keeper=sock, keeps_fp8="fp8" in sys.argv)
    b = TransformersRunner.load(ck, keeper=sock, keeps_fp8="fp8" in sys.argv)
    c = TransformersRunner.load(ck, keeps_fp8="fp8" in sys.argv)
    for (n, x), (m, y), (o, z) in zip(
        a._layers.model.state_dict().items(), b._layers.model.state_dict().items(), c._layers.model.state_dict().items()
    ):
        assert n == m == o and torch.equal(x.float(), y.float()) and torch.equal(x.float(), z.float()), n
    print(b.weights_seconds, a.weights_bytes() == b.weights_bytes() == c.weights_bytes())
    d2 = TransformersRunner.load(ck, keeper=sock, dtype="bfloat16")
    print(
        subprocess.run(["cat", f"/proc/{p.pid}/status"], capture_output=True, text=True).stdout.split("VmRSS")[1][:30]
    )
finally:
    p.kill()
