"""One cell for ncu: python ab/cell.py index CONTEXT BATCH | prompt CONTEXT TOKENS | attn NAME"""
import sys, torch
what, *rest = sys.argv[1:]
if what == "index":
    from benchmarks import index_topk as b
    b.KEY_BYTES_MOST = 1 << 30
    c = b.Cell("fp8", int(rest[0]), int(rest[1]))
    for g in range(4): c.whole(g % c.groups); torch.cuda.synchronize()
elif what == "prompt":
    import benchmarks.prompt_index as b
    b.GROUPS = 2; b.REPLAYS = 2
    run = b._time
    b._checked = lambda *a: {}
    print(b.measure("fp8", int(rest[0]), int(rest[1])))
