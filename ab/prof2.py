import os,sys,socket,subprocess,time,cProfile,pstats
from pathlib import Path
from worker.runners.tiny import write_tiny_checkpoint
from worker.runners.transformers_dsa import TransformersRunner
D=Path("/tmp/kprof"); D.mkdir(exist_ok=True); CK=D/"ck"; SOCK=D/"w.sock"
write_tiny_checkpoint(CK, fp8=True, whole_blocks=True, layers=60, experts=32)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as l:
    SOCK.unlink(missing_ok=True); l.bind(str(SOCK)); l.listen()
    k=subprocess.Popen([sys.executable,"-m","hisparse.cluster.weights",str(l.fileno()),str(os.getpid()),"info","logfmt","w0"],pass_fds=(l.fileno(),))
try:
    for i in range(3):
        t=time.monotonic()
        r=TransformersRunner.load(CK, keeper=SOCK, keeps_fp8=True, dtype="bfloat16"); print("load", time.monotonic()-t, r.weights_seconds)
    p=cProfile.Profile(); p.enable(); r=TransformersRunner.load(CK, keeper=SOCK, keeps_fp8=True, dtype="bfloat16"); p.disable()
    pstats.Stats(p).sort_stats("cumulative").print_stats(45)
finally: k.kill()
