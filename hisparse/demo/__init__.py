"""`hisparse demo`: the whole service on real input, every output token checked against the model library.

plan.py      what is asked: prompts cut from text files, hot buffers too small for any context     pure
compare.py   each request's tokens against the oracle's, and the one excuse there is               pure
report.py    the figures, the verdict, the table                                                   pure
watch.py     what was seen of requests, workers and pools while it ran                             pure
setup.py     text, checkpoint, and settings of the cluster
scenario.py  submit, retract and resume one request mid-decode, drain one worker with handover     trio
oracles.py   the model library's own generate(), in processes that import nothing of ours          trio
display.py   live progress on stderr                                                               rich
run.py       checkpoint, service, scenario, oracles, report: in this order                         trio
"""
