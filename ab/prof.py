import os,sys,socket,subprocess,time,cProfile,pstats
from pathlib import Path
D=Path("/tmp/kprof"); CK=D/"ck"; SOCK=D/"w.sock"
if len(sys.argv)>1:
    import torch
    import worker.process
    from worker.runners.transformers_dsa import TransformersRunner
    from protocol import logs; logs.configure("info","logfmt")
    p=cProfile.Profile(); t=time.monotonic()
    p.enable(); r=TransformersRunner.load(CK, keeper=SOCK, keeps_fp8=True, dtype="bfloat16"); p.disable()
    print("load", time.monotonic()-t, r.weights_seconds)
    if sys.argv[1]=="prof":
        s=pstats.Stats(p); s.sort_stats("cumulative").print_stats(70)
else:
    D.mkdir(exist_ok=True)
    if not CK.exists():
        sys.argv=["x",str(D)]; os.environ.update(ROLE="none-look",DEVICE="cuda",SHRINK="1")
        src=open("ab/card.py").read().split("\nif ROLE ==")[0]
        exec(compile(src,"ab/card.py","exec")); make()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as l:
        SOCK.unlink(missing_ok=True); l.bind(str(SOCK)); l.listen()
        k=subprocess.Popen([sys.executable,"-m","hisparse.cluster.weights",str(l.fileno()),str(os.getpid()),"info","logfmt","w0"],pass_fds=(l.fileno(),))
    try:
        for kind in ("x","x","prof"):
            subprocess.run([sys.executable,__file__,kind])
    finally: k.kill()
