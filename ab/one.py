import sys; args = sys.argv[1:]; sys.argv = [sys.argv[0], "--cells", "", args[0]]
exec(open("ab/attn.py").read().replace("\nmain()\n", "\n"))
choose(args[0]); c = Cell(*CELLS[args[1]]); c.layers = 2
for _ in range(3): c.run(0); torch.cuda.synchronize()
