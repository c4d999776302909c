"""The swap-in runtime's device side: data layout, and each kernel as one function over preallocated tensors.

Internal to hisparse: programs import `hisparse.kernels`, which offers the contracts below.

    layout        where every byte lies; imports neither torch nor CUDA
    state         DeviceState, StepBatch, BackupPlan, MissPlan
    seat          set up, resize and clear the hot buffer of a seat
    begin_step    place a step's new tokens, plan their backup
    index_topk    score the context, choose the top-k
    prompt_topk   the same for each token of a prompt, or of a part of it
    swap_in       top-k to device rows: hits, victims, misses; replay for layers that share the top-k
    row_format    float32, bfloat16 and fp8 rows and index keys: encode, decode
    encode        values to rows and index keys, in as few launches as the device allows
    attention     absorbed attention over the rows that swap_in named
    rows          a model's reads and writes of rows and index keys
    block_weight  a weight in block-FP8
    block_fp8     products with block-FP8 weights, dense and of experts
    routing       rows on their way to experts: what a row chooses, bytes that travel, sums; expert_choice how
    copy_rows     device rows to host pages and back
    check, integrity   checks of arguments; consistency of a seat's tables

    reference/    all of them in torch or numpy; what runs on the CPU
    cuda/         launchers for GPUs; their CUDA C++ in cuda/src/, compiled at worker start (by compile.py for every
                  architecture)

The functions of these modules are the contracts: they check their arguments and call one of the two (backend.py, which
also prepares a state). A kernel runs inside one stream operation and orders nothing by itself: fences are the caller's
(worker.streams).
"""
