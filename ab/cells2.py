from contextlib import ExitStack
from worker.runners.layers import Layers
def old(route=False, room=False):
    """Without the router ahead, without room beside a swap-in."""
    stack = ExitStack()
    if route: stack.enter_context(patch.object(Layers, "route", lambda *_: None))
    if room: stack.enter_context(patch.object(W, "swap_in", lambda *about, beside: swap_in_main(*about)))
    return stack
swap_in_main = W.swap_in
def go(name, rows, overlap=0.99, *, beside=16, show=(), **off):
    with old(**off): run(name, rows, overlap, beside=beside, show=show)
go("now", 64, show=("table", "line"))
go("no route", 64, route=True)
go("no room", 64, room=True)
go("neither", 64, route=True, room=True)
go("now", 16, show=("line",))
go("no route", 16, route=True)
go("24", 16, beside=24)
go("now", 1)
go("no route", 1, route=True)
go("now", 80)
go("now", 64)
go("no route", 64, route=True)
go("now", 64, 0.93)
go("now", 8)
go("in line", 8, beside=8)
